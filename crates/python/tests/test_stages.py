"""A model in stages gives the bits of the whole model, also when a stage is lost."""

import threading

import pytest

import forebay
from conftest import DEMO, PROMPT


class Here:
    """A stage in this process. It is lost at certain calls, before or after it has done what was asked."""

    def __init__(self, layers, lost_at=(), **options):
        self.layers, self.lost_at, self.options = layers, set(lost_at), options
        self.calls = self.starts = 0
        self.restart()

    def restart(self):
        self.stage = forebay.Stage(DEMO, layers=self.layers, device="cpu", **self.options)
        self.starts += 1

    def call(self, message):
        self.calls += 1
        if self.calls in self.lost_at:
            if self.calls % 2:
                self.stage.handle(message)
            self.stage.close()
        return self.stage.handle(message)


def staged(stages, lost_at=((), ()), **options):
    *ranges, _ = forebay.split_layers(DEMO, stages=stages)
    transports = [Here(layers, lost, **options) for layers, lost in zip(ranges, lost_at)]
    return forebay.Model(DEMO, stages=transports, device="cpu", **options), transports


def logits(llm):
    """Of a prompt, and of each token after it."""
    tokens = llm.tokenizer.encode(PROMPT)
    session = llm.session()
    session.extend(tokens[:8])
    rows = [bytes(session.logits)]
    for token in tokens[8:]:
        session.push(token)
        rows.append(bytes(session.logits))
    return rows


@pytest.mark.parametrize("stages", [2, 3])
def test_logits_of_stages_equal_those_of_the_whole_model(llm, stages):
    model, transports = staged(stages)
    with model:
        assert logits(model) == logits(llm)
    assert len(transports) == stages - 1 and all(transport.calls > 5 for transport in transports)


def test_a_stage_says_what_it_is(llm):
    with forebay.Stage(DEMO, layers=(2, 4), device="cpu", memory="1G") as stage:
        assert stage.layers == (2, 4) and stage.model_layers == 8
        assert stage.plan.experts * 4 == llm.plan.experts and stage.plan.budget == 1 << 30
        assert stage.meters().hits == 0
        assert repr(stage).endswith("layers 2 to 3 of 8>")
        # Not a message: the reply says so to the model.
        assert b"same version" in stage.handle(b"Hello")
    assert stage.closed and repr(stage).endswith("closed>")
    for use in (lambda: stage.layers, lambda: stage.handle(b"")):
        with pytest.raises(forebay.ForebayError, match="the stage is closed"):
            use()
    stage.close()


def test_an_answer_goes_on_after_its_stages_were_lost(llm):
    ask = {"max_tokens": 40, "temperature": 0.8, "seed": 7}
    expected = llm.generate(PROMPT, **ask).text
    model, transports = staged(3, lost_at=[(7, 20), (12,)])
    with model:
        assert model.generate(PROMPT, **ask).text == expected
        assert [transport.starts for transport in transports] == [3, 2]


def test_answers_from_several_threads(llm):
    prompts = ["Once upon a time", "The cat", "The sea", PROMPT]
    expected = [llm.generate(prompt, max_tokens=20, temperature=0).text for prompt in prompts]
    model, transports = staged(3, lost_at=[(9,), (12,)])
    found = [None] * len(prompts)

    def ask(n):
        found[n] = model.generate(prompts[n], max_tokens=20, temperature=0).text

    with model:
        threads = [threading.Thread(target=ask, args=(n,)) for n in range(len(prompts))]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    assert found == expected and [transport.starts for transport in transports] == [2, 2]


def test_a_stage_that_stays_lost_ends_the_answer_with_its_words():
    class Gone(Here):
        is_gone = False

        def call(self, message):
            if self.is_gone:
                raise ConnectionError("the cable is cut")
            return super().call(message)

        def restart(self):
            if self.is_gone:
                raise TimeoutError("nobody answers")
            super().restart()

    stage = Gone((0, 3))
    with forebay.Model(DEMO, stages=[stage], device="cpu") as model:
        first = model.generate(PROMPT, max_tokens=10, temperature=0).text
        Gone.is_gone = True
        with pytest.raises(forebay.ForebayError, match="layers 0..3 of 8 is lost: TimeoutError: nobody answers"):
            model.generate("Another text", max_tokens=10)
        # The next answer tries again.
        Gone.is_gone = False
        assert model.generate(PROMPT, max_tokens=10, temperature=0).text == first


def test_an_interrupt_in_a_transport_is_not_swallowed():
    class Interrupted(Here):
        def call(self, message):
            if self.calls == 6:
                self.calls += 1
                raise KeyboardInterrupt
            return super().call(message)

    stage = Interrupted((0, 3))
    with forebay.Model(DEMO, stages=[stage], device="cpu") as model:
        with pytest.raises(KeyboardInterrupt):
            model.generate(PROMPT, max_tokens=100, ignore_eos=True)
            # It comes soon, on this thread.
            threading.Event().wait(60)
        assert stage.starts == 1
        assert model.generate(PROMPT, max_tokens=3).finish_reason == "length"


def test_stages_that_do_not_fit_together_are_refused():
    with pytest.raises(forebay.RequestError, match=r"Model\(stages=\)"):
        forebay.Stage(DEMO, layers=(3, 8), device="cpu")
    with pytest.raises(forebay.RequestError, match="layers= is 4..9, but the model has only layers 0..8"):
        forebay.Stage(DEMO, layers=(4, 9), device="cpu")
    with pytest.raises(forebay.RequestError, match="Model without stages"):
        forebay.Model(DEMO, stages=[])
    with pytest.raises(forebay.RequestError, match="layer 0 of 8 must be next"):
        forebay.Model(DEMO, stages=[Here((2, 4))], device="cpu")
    with pytest.raises(forebay.RequestError, match="cannot have 9 stages"):
        forebay.split_layers(DEMO, stages=9)
    with pytest.raises(forebay.ForebayError, match="is lost: AttributeError"):
        forebay.Model(DEMO, stages=[object()], device="cpu")
