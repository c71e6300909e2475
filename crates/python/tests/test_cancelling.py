"""Answers end when nobody wants them any more: in the prompt, in the answer, by Ctrl-C, and with asyncio."""

import asyncio
import gc
import signal
import subprocess
import sys
import threading
import time

import pytest

import forebay


@pytest.fixture(scope="module")
def busy(slow):
    """A model that takes minutes for a prompt, and the prompt."""
    path, prompt = slow
    with forebay.Model(path, device="cpu", memory="2G", prefix_cache=False) as model:
        yield model, prompt


def until(condition, patience=60):
    """Waits until something is true."""
    end = time.monotonic() + patience
    while not condition():
        assert time.monotonic() < end, "it did not happen"
        time.sleep(0.005)


def has_begun(stream):
    return stream.progress is not None and stream.progress[0] > 0



def conversations(model):
    """Bytes that conversations hold."""
    return sum(use.bytes for use in model.memory() if use.purpose == "conversations")


@pytest.mark.parametrize("end", ["close", "drop", "with"])
def test_a_stream_ends_in_its_prompt(busy, end):
    model, prompt = busy
    stream = model.generate(prompt, stream=True)
    until(lambda: has_begun(stream))
    done, total = stream.progress
    assert done < total
    if end == "close":
        stream.close()
        assert list(stream) == []
        with pytest.raises(forebay.Cancelled):
            stream.whole()
    elif end == "with":
        with stream:
            pass
    del stream
    gc.collect()
    until(lambda: conversations(model) == 0)


def test_another_thread_closes_a_stream_that_is_waited_for(busy):
    model, prompt = busy
    stream = model.generate(prompt, stream=True)

    def close():
        until(lambda: has_begun(stream))
        stream.close()

    thread = threading.Thread(target=close)
    thread.start()
    with pytest.raises(forebay.Cancelled):
        stream.whole()
    thread.join()


def test_a_break_ends_the_answer(llm):
    for piece in llm.chat("Tell me a story.", stream=True, ignore_eos=True):
        assert str(piece)
        break
    # Nothing is left but what the prefix cache keeps.
    until(lambda: conversations(llm) == 0)


def test_a_cycle_ends_the_answer(busy):
    model, prompt = busy
    holder = {"stream": model.generate(prompt, stream=True)}
    holder["self"] = holder
    until(lambda: has_begun(holder["stream"]))
    del holder
    gc.collect()
    until(lambda: conversations(model) == 0)


def test_a_session_ends_in_its_prompt(busy):
    model, prompt = busy
    session = model.session()
    ended = []

    def extend():
        with pytest.raises(forebay.Cancelled):
            session.extend(prompt)
        ended.append(True)

    thread = threading.Thread(target=extend)
    thread.start()
    until(lambda: conversations(model) > 0)
    session.cancel()
    thread.join()
    assert ended and len(session) < len(prompt)
    # It is usable, and what was computed is kept.
    reused, computed = session.extend(prompt[: len(session) + 1])
    assert computed <= 1 + len(session) and reused + computed == len(session)


def test_closing_the_model_ends_what_it_computes(slow):
    path, prompt = slow
    model = forebay.Model(path, device="cpu", memory="2G")
    stream, session = model.generate(prompt, stream=True), model.session()
    failures = []

    def extend():
        try:
            session.extend(prompt)
        except forebay.ForebayError as error:
            failures.append(error)

    thread = threading.Thread(target=extend)
    thread.start()
    until(lambda: has_begun(stream))
    model.close()
    thread.join()
    assert len(failures) == 1
    with pytest.raises(forebay.Cancelled):
        stream.whole()
    with pytest.raises(forebay.ForebayError, match="the model is closed"):
        session.extend([1])


CTRL_C = """
import sys, threading, time
import forebay

path, what = sys.argv[1:]
prompt = [1 + n % 4000 for n in range(60_000)]
llm = forebay.Model(path, device="cpu", memory="2G", progress=False)
session, stream = llm.session(), None

def began():
    if what == "session":
        return sum(use.bytes for use in llm.memory() if use.purpose == "conversations") > 0
    return stream is not None and stream.progress is not None and stream.progress[0] > 0

def announce():
    while not began():
        time.sleep(0.005)
    print("began", flush=True)

threading.Thread(target=announce, daemon=True).start()
try:
    if what == "session":
        session.extend(prompt)
    else:
        stream = llm.generate(prompt, stream=True)
        stream.whole()
except KeyboardInterrupt:
    print(f"interrupted {time.monotonic()}", flush=True)
    # The model is usable.
    assert llm.generate([1, 2, 3], max_tokens=2).stats.generated_tokens == 2
    print("answered", flush=True)
"""


@pytest.mark.skipif(sys.platform == "win32", reason="Windows has other signals")
@pytest.mark.parametrize("what", ["stream", "session"])
def test_ctrl_c_ends_a_call_in_a_long_prompt(slow, what):
    command = [sys.executable, "-c", CTRL_C, str(slow[0]), what]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout.readline() == "began\n"
        sent = time.monotonic()
        process.send_signal(signal.SIGINT)
        word, at = process.stdout.readline().split()
        assert word == "interrupted"
        print(f"the call ended after {1000 * (float(at) - sent):.0f} ms")
        # Without Ctrl-C it would take minutes.
        assert float(at) - sent < 10
        assert process.stdout.read() == "answered\n"
        assert process.wait() == 0


def test_ctrl_c_ends_loading(slow):
    # The callback is called from the thread that waits, as a signal's handler is.
    def interrupt(doing, done, total):
        assert doing == "loading" and done <= total
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        forebay.Model(slow[0], device="cpu", progress=interrupt)


def test_a_cancelled_task_cancels_its_answer(busy):
    model, prompt = busy

    async def main():
        task = asyncio.create_task(model.agenerate(prompt))
        while conversations(model) == 0:
            await asyncio.sleep(0.005)
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
        stream = model.agenerate(prompt, stream=True)
        with pytest.raises(asyncio.TimeoutError):
            await asyncio.wait_for(anext(stream), 0.5)
        # A wait that ended early loses nothing.
        assert stream.progress[0] < stream.progress[1]
        await stream.aclose()
        return [piece async for piece in stream]

    assert asyncio.run(main()) == []
    until(lambda: conversations(model) == 0)
