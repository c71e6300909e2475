"""What goes wrong is an exception that says what to do, and leaks nothing."""

import gc
import pickle
import re
import subprocess
import sys
from pathlib import Path

import pytest

import forebay
from conftest import DEMO, ROOT


def test_a_model_that_is_not_there(tmp_path):
    with pytest.raises(forebay.FileError, match="nothing.gguf: cannot open") as error:
        forebay.Model(tmp_path / "nothing.gguf")
    assert error.value.path == str(tmp_path / "nothing.gguf")
    (tmp_path / "damaged.gguf").write_bytes(DEMO.read_bytes()[:5000])
    with pytest.raises(forebay.FileError, match="damaged.gguf"):
        forebay.Model(tmp_path / "damaged.gguf")


def test_a_budget_that_cannot_work():
    for make in (forebay.Model, forebay.plan):
        with pytest.raises(forebay.BudgetError, match="more memory with memory=") as error:
            make(DEMO, memory="30M", device="cpu")
        assert error.value.need > error.value.have == 30 << 20
        assert "Options" not in str(error.value)


def test_a_plan(program):
    plan = forebay.plan(DEMO, memory="1G", device="cpu", context=512)
    assert plan.budget == 1 << 30 >= plan.total and plan.reserved == 512 and not plan.streams
    # What the process itself needs changes from moment to moment.
    memory = plan.least_memory + (8 << 20)
    least = forebay.plan(DEMO, memory=memory, device="cpu", context=512)
    assert least.streams and least.slots < least.experts and least.device is None
    with forebay.Model(DEMO, memory=memory, device="cpu", context=512) as llm:
        assert llm.plan.streams and llm.plan.least_memory is None
        assert llm.generate("Once upon", max_tokens=8, temperature=0).text == " a time, there was a little girl"
        meters = llm.meters()
        assert meters.bytes_read > 0 and 0 < meters.hit_rate < 1
        assert sum(use.bytes for use in llm.memory()) <= memory


@pytest.mark.parametrize(
    ("options", "field"),
    [
        ({"memory": "lots"}, "memory"),
        ({"memory": 6}, "memory"),
        ({"expert_memory": "200%"}, "expert_memory"),
        ({"device": "gpu"}, "device"),
        ({"io": "tape"}, "io"),
        ({"policy": "mru"}, "policy"),
        ({"parallel": 0}, "parallel"),
        ({"chat_template": "{% if %}"}, "chat_template"),
    ],
)
def test_an_option_that_is_not_possible(options, field):
    with pytest.raises(forebay.RequestError, match=field) as error:
        forebay.Model(DEMO, **options)
    assert error.value.field == field


def test_options_that_do_not_exist(llm):
    for call in (
        lambda: forebay.Model(DEMO, memroy="8G"),
        lambda: forebay.plan(DEMO, memroy="8G"),
        lambda: llm.generate("a", tools=[]),
        lambda: llm.chat("a", max_token=1),
    ):
        with pytest.raises(TypeError, match="there is no option"):
            call()
    with pytest.raises(TypeError):
        forebay.Model(DEMO, threads="many")


@pytest.mark.parametrize(
    ("options", "field"),
    [
        ({"temperature": -1}, "temperature"),
        ({"temperature": "hot"}, "temperature"),
        ({"max_tokens": 0}, "max_tokens"),
        ({"stop": ""}, "stop"),
        ({"schema": {"type": "cat"}}, "json_schema"),
        ({"grammar": "start: ("}, "grammar"),
        ({"tools": [{"type": "function"}]}, "tools[0].function.name"),
        ({"tool_choice": "perhaps"}, "tool_choice"),
        ({"logit_bias": {-1: 0}}, "logit_bias"),
    ],
)
def test_a_request_that_is_not_possible(llm, options, field):
    with pytest.raises(forebay.RequestError) as error:
        llm.chat("Hello", **options)
    assert error.value.field == field and isinstance(error.value, ValueError)


def test_prompts_that_are_not_possible(llm):
    with pytest.raises(forebay.ContextError) as error:
        llm.generate([1] * llm.context)
    assert error.value.limit == llm.context
    for prompt in ("", [], [""]):
        with pytest.raises(forebay.RequestError):
            llm.generate(prompt)
    with pytest.raises(forebay.RequestError):
        llm.generate(["a", "b"], stream=True)
    with pytest.raises(forebay.RequestError, match="no messages"):
        llm.chat([])
    with pytest.raises(ValueError):
        llm.generate("a", temperature=float("nan"))


def test_a_closed_model():
    llm = forebay.Model(DEMO, device="cpu")
    tokenizer, session, stream = llm.tokenizer, llm.session(), llm.generate("Once", stream=True, ignore_eos=True)
    session.push(1)
    llm.close()
    llm.close()
    assert llm.closed and "closed" in repr(llm)
    for use in (
        lambda: llm.generate("a"),
        lambda: llm.chat("a"),
        lambda: llm.create_chat_completion(messages=[]),
        lambda: llm.session(),
        lambda: llm.load_session("x"),
        lambda: llm.context,
        lambda: llm.plan,
        lambda: llm.memory(),
        lambda: llm.meters(),
        lambda: tokenizer.encode("a"),
        lambda: session.push(1),
        lambda: session.fork(),
    ):
        with pytest.raises(forebay.ForebayError, match="the model is closed"):
            use()
    with pytest.raises(forebay.Cancelled):
        stream.whole()


def test_exceptions_survive_pickling():
    for error in (
        forebay.BudgetError("a", 3, 2),
        forebay.ContextError("b", 3, 2),
        forebay.FileError("c", "d"),
        forebay.RequestError("e", "f"),
        forebay.Cancelled("g"),
    ):
        again = pickle.loads(pickle.dumps(error))
        assert type(again) is type(error) and str(again) == str(error) and vars(again) == vars(error)
        assert isinstance(error, forebay.ForebayError)


def test_answers_survive_pickling(llm):
    answer = llm.chat("Hello", max_tokens=3, logprobs=1)
    assert pickle.loads(pickle.dumps(answer)) == answer


def test_the_words_of_the_engine_are_translated():
    """Messages of the engine name its options, which are arguments here."""
    table = (ROOT / "crates" / "python" / "src" / "errors.rs").read_text()
    sources = (path.read_text() for path in (ROOT / "crates" / "engine" / "src").rglob("*.rs"))
    code = (line for source in sources for line in source.splitlines() if not line.strip().startswith("//"))
    named = {option for line in code for option in re.findall(r"Options::[a-z_]+\b(?!\()", line)}
    # The package has no stages, and so no argument for their layers.
    named.discard("Options::layers")
    assert named and all(f'"{option}' in table for option in named), named


def resident():
    status = Path("/proc/self/status").read_text()
    return int(re.search(r"VmRSS:\s+(\d+) kB", status)[1]) << 10


@pytest.mark.skipif(sys.platform != "linux", reason="memory is measured as Linux tells it")
@pytest.mark.parametrize("what", ["generate", "stream", "session", "logits", "error", "openai"])
def test_a_thousand_calls_leak_nothing(llm, what):
    tokens = llm.tokenizer.encode("Once upon a time")

    def call():
        match what:
            case "generate":
                llm.generate("Once", max_tokens=1, logprobs=5)
            case "stream":
                next(llm.chat("Tell me a story.", stream=True))
            case "session":
                session = llm.session()
                session.extend(tokens)
                session.fork().push(1)
            case "logits":
                session = llm.session()
                session.extend(tokens[:1])
                memoryview(session.logits)
            case "error":
                with pytest.raises(forebay.RequestError):
                    llm.chat("Hello", temperature=-1)
                with pytest.raises(forebay.FileError):
                    forebay.Model("nothing.gguf")
            case "openai":
                next(llm.create_chat_completion(messages=[{"role": "user", "content": "a"}], stream=True))

    for _ in range(200):
        call()
    gc.collect()
    before = resident()
    for _ in range(1000):
        call()
    gc.collect()
    grown = resident() - before
    print(f"{what}: {grown >> 10} KiB more after 1000 calls")
    # A leak of two kilobytes in each call is found.
    assert grown < 2 << 20


@pytest.mark.skipif(sys.platform != "linux", reason="memory is measured as Linux tells it")
def test_a_closed_model_gives_its_memory_back():
    def load():
        llm = forebay.Model(DEMO, device="cpu", memory="256M")
        session, stream = llm.session(), llm.generate("Once upon a time", stream=True)
        session.push(1)
        next(stream)
        llm.close()
        return session, stream

    kept = [load()]
    before = resident()
    kept += [load() for _ in range(10)]
    # Each has more than 20 MiB while it is open.
    assert resident() - before < 64 << 20


def test_a_program_that_ends_while_the_model_computes():
    program = (
        "import forebay; llm = forebay.Model(progress=False);"
        "stream = llm.generate('Once upon a time', stream=True, ignore_eos=True); next(stream)"
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True)
    assert (done.returncode, done.stderr) == (0, "")
