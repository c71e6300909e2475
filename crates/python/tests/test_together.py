"""Many threads, many tasks."""

import asyncio
import multiprocessing
import sys
import threading

import pytest

import forebay

PROMPTS = [f"Tell me a story about a {animal}." for animal in "cat dog bear fish bird fox mouse frog".split()]


@pytest.fixture(scope="module")
def alone(llm):
    return [llm.chat(prompt, max_tokens=24, temperature=0).tokens for prompt in PROMPTS]


def test_eight_threads_at_once(llm, alone):
    answers = [None] * len(PROMPTS)
    barrier = threading.Barrier(len(PROMPTS))

    def ask(n):
        barrier.wait()
        with llm.session() as session:
            tokens = llm.tokenizer.encode(PROMPTS[n])
            session.extend(tokens)
            logits = bytes(session.logits)
            stream = llm.chat(PROMPTS[n], max_tokens=24, temperature=0, stream=True)
            text = "".join(map(str, stream))
            answers[n] = (stream.answer.tokens, text == stream.answer.text, logits == bytes(session.fork().logits))

    threads = [threading.Thread(target=ask, args=(n,)) for n in range(len(PROMPTS))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert answers == [(tokens, True, True) for tokens in alone]


def test_a_session_is_used_by_several_threads(llm):
    session, tokens = llm.session(), llm.tokenizer.encode("Once upon a time there was a little girl")
    threads = [threading.Thread(target=session.extend, args=(tokens,)) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert session.tokens == tokens


def test_tasks_at_once(llm, alone):
    async def ask(prompt):
        stream = llm.achat(prompt, max_tokens=24, temperature=0, stream=True)
        async with stream:
            text = "".join([str(piece) async for piece in stream])
        assert text == stream.answer.text
        return stream.answer.tokens

    async def main():
        whole = [llm.achat(prompt, max_tokens=24, temperature=0) for prompt in PROMPTS]
        streamed, whole = await asyncio.gather(asyncio.gather(*map(ask, PROMPTS)), asyncio.gather(*whole))
        return streamed, [answer.tokens for answer in whole]

    assert asyncio.run(main()) == (alone, alone)


def test_an_error_of_a_task_is_raised_where_it_is_awaited(llm):
    async def main():
        with pytest.raises(forebay.RequestError, match="temperature"):
            await llm.achat("Hello", temperature=-1)
        with pytest.raises(forebay.RequestError, match="temperature"):
            async for _ in llm.achat("Hello", temperature=-1, stream=True):
                pass

    asyncio.run(main())


def in_a_fork(llm, results):
    try:
        llm.generate("Once", max_tokens=1)
    except forebay.ForebayError as error:
        results.put(str(error))


@pytest.mark.skipif(sys.platform == "win32", reason="Windows has no fork")
def test_a_fork_of_the_process_is_told_why_it_has_no_model(llm):
    context = multiprocessing.get_context("fork")
    results = context.Queue()
    process = context.Process(target=in_a_fork, args=(llm, results))
    process.start()
    assert "forked" in results.get(timeout=60)
    process.join()
    assert process.exitcode == 0
