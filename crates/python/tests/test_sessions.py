"""Sessions have the logits of the program, to the bit."""

import io

import numpy
import pytest

import forebay
from conftest import DEMO, PROMPT, read_logits


def test_logits_equal_those_of_the_program(llm, program, tmp_path):
    tokens = llm.tokenizer.encode(PROMPT)
    program("logits", DEMO, "--tokens", ",".join(map(str, tokens)), "--out", tmp_path / "logits")
    rows = read_logits(tmp_path / "logits")
    together, one_by_one = llm.session(), llm.session()
    assert len(rows) == len(tokens) and len(together.logits) == 0
    for n, token in enumerate(tokens):
        one_by_one.push(token)
        assert bytes(one_by_one.logits) == rows[n], n
    assert together.extend(tokens) == (0, len(tokens))
    assert bytes(together.logits) == rows[-1]
    assert together.extend(tokens[:5]) == (4, 1) and bytes(together.logits) == rows[4]
    assert together.tokens == tokens[:5] and len(together) == 5


def test_logits_are_a_read_only_array(llm):
    session = llm.session()
    session.extend(llm.tokenizer.encode("Once upon a"))
    logits = session.logits
    array = numpy.asarray(logits)
    assert array.dtype == numpy.float32 and array.shape == (llm.vocab_size,) and not array.flags.writeable
    view = memoryview(logits)
    assert view.readonly and view.format == "f" and view.contiguous and numpy.shares_memory(array, view)
    assert logits[3] == view[3] == array[3] and logits[-1] == array[-1]
    for wrong in (llm.vocab_size, -llm.vocab_size - 1):
        with pytest.raises(IndexError):
            logits[wrong]
    with pytest.raises(TypeError):
        view[0] = 0.0
    with pytest.raises(ValueError):
        array.setflags(write=True)
    with pytest.raises(TypeError):
        io.BytesIO(b"abcd").readinto(logits)
    # It is a copy: the array stays as it is when the session goes on, and when everything else is gone.
    before = array.copy()
    session.push(int(array.argmax()))
    assert numpy.array_equal(before, array) and bytes(session.logits) != bytes(logits)
    del view, logits, session
    assert numpy.array_equal(before, array)


def test_a_fork_goes_its_own_way(llm):
    tokens = llm.tokenizer.encode(PROMPT)
    session = llm.session()
    session.extend(tokens)
    fork = session.fork()
    assert bytes(fork.logits) == bytes(session.logits)
    fork.push(tokens[0])
    assert fork.tokens == [*tokens, tokens[0]] and session.tokens == tokens
    session.close()
    assert fork.extend([*tokens, tokens[0], tokens[1]]) == (len(tokens) + 1, 1)


def test_a_session_is_saved_and_loaded(llm, tmp_path):
    tokens = llm.tokenizer.encode(PROMPT)
    session = llm.session()
    session.extend(tokens)
    session.save(tmp_path / "session")
    again = llm.load_session(tmp_path / "session")
    assert again.tokens == tokens
    assert again.extend([*tokens, 5])[0] == len(tokens)
    session.push(5)
    assert bytes(again.logits) == bytes(session.logits)
    (tmp_path / "session").write_bytes(b"nothing")
    with pytest.raises(forebay.FileError):
        llm.load_session(tmp_path / "session")


def test_wrong_tokens_are_refused(llm):
    session = llm.session()
    with pytest.raises(forebay.RequestError, match="no tokens"):
        session.extend([])
    with pytest.raises(forebay.RequestError, match="vocabulary"):
        session.push(llm.vocab_size)
    with pytest.raises(forebay.ContextError) as error:
        session.extend([1] * (llm.context + 1))
    assert (error.value.tokens, error.value.limit) == (llm.context + 1, llm.context)
    with pytest.raises((OverflowError, TypeError)):
        session.push(-1)


def test_a_closed_session_refuses(llm):
    with llm.session() as session:
        session.push(1)
    session.close()
    for use in (lambda: session.push(1), lambda: session.logits, lambda: session.tokens, session.fork):
        with pytest.raises(forebay.ForebayError, match="the session is closed"):
            use()
