"""The model as an ASGI application: called plainly, and through uvicorn."""

import asyncio
import contextlib
import json
import socket
import threading
import time
import urllib.error
import urllib.request

import pytest
import uvicorn
from conftest import DEMO

import forebay

STORY = {"messages": [{"role": "user", "content": "Tell me a story."}], "max_tokens": 12, "temperature": 0}


@pytest.fixture(scope="module")
def llm():
    """A model of its own: its server ends with it."""
    with forebay.Model(DEMO, device="cpu", memory="1G") as model:
        yield model


@pytest.fixture(scope="module")
def app(llm):
    return llm.asgi()


def scope(method="POST", path="/v1/chat/completions", **fields):
    return {
        "type": "http",
        "method": method,
        "path": path,
        "query_string": b"",
        "headers": [(b"host", b"localhost"), (b"content-type", b"application/json")],
        "client": ("127.0.0.1", 40000),
        **fields,
    }


async def ask(app, body, pieces=1, **fields):
    """Sends a request whose body comes in pieces; returns the status, the headers and the pieces of the response."""
    size = -(-len(body) // pieces)
    received = [
        {"type": "http.request", "body": body[at * size : (at + 1) * size], "more_body": at + 1 < pieces}
        for at in range(pieces)
    ]
    sent = []

    async def receive():
        if received:
            return received.pop(0)
        await asyncio.Event().wait()

    async def send(message):
        sent.append(message)

    await asyncio.wait_for(app(scope(**fields), receive, send), 60)
    assert sent[0]["type"] == "http.response.start" and not sent[-1].get("more_body", False)
    assert all(message["type"] == "http.response.body" for message in sent[1:])
    return sent[0]["status"], dict(sent[0]["headers"]), [message["body"] for message in sent[1:]]


def contents(stream):
    """The texts of the events of a streamed chat."""
    events = [line.removeprefix("data: ") for line in stream.decode().splitlines() if line.startswith("data: ")]
    assert events[-1] == "[DONE]"
    chunks = [json.loads(event) for event in events[:-1]]
    return [text for chunk in chunks for choice in chunk["choices"] if (text := choice["delta"].get("content"))]


def test_an_answer_is_the_model_s_and_a_stream_has_the_same_text(app, llm):
    text = llm.chat("Tell me a story.", max_tokens=12, temperature=0).text
    status, headers, body = asyncio.run(ask(app, json.dumps(STORY).encode(), pieces=7))
    assert status == 200 and headers[b"content-type"] == b"application/json"
    assert int(headers[b"content-length"]) == len(b"".join(body))
    answer = json.loads(b"".join(body))
    assert answer["choices"][0]["message"]["content"] == text and answer["model"] == llm.name
    status, headers, body = asyncio.run(ask(app, json.dumps({**STORY, "stream": True}).encode()))
    assert status == 200 and headers[b"content-type"].startswith(b"text/event-stream")
    pieces = contents(b"".join(body))
    assert len(pieces) > 3 and "".join(pieces) == text


def test_both_apis_and_the_program_s_own_requests(app):
    async def both():
        body = {"messages": [{"role": "user", "content": "Hello"}], "max_tokens": 3, "model": "any"}
        message = await app.request("POST", "/v1/messages", json.dumps(body).encode())
        models = await app.request("GET", "/v1/models")
        return json.loads(message.body), json.loads(models.body)

    message, models = asyncio.run(both())
    assert message["type"] == "message" and message["role"] == "assistant"
    assert models["object"] == "list"


def test_a_path_below_a_root_and_a_path_that_does_not_exist(app):
    async def paths():
        below = await ask(app, b"", method="GET", path="/llm/v1/models", root_path="/llm")
        missing = await ask(app, b"", method="GET", path="/v1/nothing here?")
        return below, missing

    below, missing = asyncio.run(paths())
    assert below[0] == 200 and missing[0] == 404
    assert "nothing%20here%3F" in json.loads(b"".join(missing[2]))["error"]["message"]


def test_clients_have_to_pass_the_checks(llm):
    app = llm.asgi(keys=["secret"], max_body=1000)
    key = [(b"authorization", b"Bearer secret"), (b"host", b"localhost")]

    async def statuses():
        yield (await ask(app, b"{}"))[0]
        yield (await ask(app, b"", method="GET", path="/v1/models", headers=key))[0]
        yield (await app.request("GET", "/v1/models")).status
        # No more is read of a body that is too large than is needed to know that.
        announced = [*key, (b"content-length", b"100000000")]
        yield (await ask(app, b"x" * 5000, pieces=50, headers=announced))[0]

    async def together():
        return [status async for status in statuses()]

    assert asyncio.run(together()) == [401, 200, 200, 413]
    with pytest.raises(forebay.RequestError, match="max_body"):
        llm.asgi(max_body="many")
    with pytest.raises(TypeError, match="ServerOptions"):
        llm.asgi(port=80)


def counted(app, name):
    """A counter of the server."""
    metrics = asyncio.run(app.request("GET", "/metrics")).body.decode()
    [line] = [line for line in metrics.splitlines() if line.startswith(f"forebay_{name} ")]
    return float(line.split()[1])


def busy_answers(app):
    """How many answers are being computed."""
    return counted(app, "requests_running")


def cancelled_answers(app):
    """How many answers were cancelled."""
    return counted(app, "answers_cancelled_total")


def wait_until(condition):
    end = time.monotonic() + 30
    while not condition():
        assert time.monotonic() < end, "it did not happen"
        time.sleep(0.02)


ENDLESS = json.dumps({**STORY, "max_tokens": 3000, "ignore_eos": True, "stream": True}).encode()


def test_a_client_that_leaves_cancels_its_answer(app):
    sent = []

    async def leave():
        left = asyncio.Event()
        messages = [{"type": "http.request", "body": ENDLESS, "more_body": False}]

        async def receive():
            if messages:
                return messages.pop()
            await left.wait()
            return {"type": "http.disconnect"}

        async def send(message):
            sent.append(message)
            if len(sent) == 5:
                await asyncio.to_thread(wait_until, lambda: busy_answers(app) == 1)
                left.set()

        await asyncio.wait_for(app(scope(), receive, send), 60)

    before = cancelled_answers(app)
    asyncio.run(leave())
    assert sent[-1].get("more_body"), "the answer has ended by itself"
    wait_until(lambda: cancelled_answers(app) == before + 1)


def test_a_cancelled_task_and_a_closed_iterator_cancel_the_answer(app):
    async def cancel():
        parts = app.stream("POST", "/v1/chat/completions", ENDLESS)
        assert (await anext(parts))[0] == 200
        await anext(parts)
        await asyncio.to_thread(wait_until, lambda: busy_answers(app) == 1)
        await parts.aclose()
        await asyncio.to_thread(wait_until, lambda: cancelled_answers(app) == before + 1)
        task = asyncio.create_task(ask(app, ENDLESS))
        await asyncio.to_thread(wait_until, lambda: busy_answers(app) == 1)
        task.cancel()
        with contextlib.suppress(asyncio.CancelledError):
            await task

    before = cancelled_answers(app)
    asyncio.run(cancel())
    wait_until(lambda: cancelled_answers(app) == before + 2)


def test_the_model_s_end_is_its_applications_end():
    llm = forebay.Model(device="cpu")
    app = llm.asgi()
    llm.close()
    with pytest.raises(forebay.ForebayError, match="closed"):
        asyncio.run(app.request("GET", "/v1/models"))


@contextlib.contextmanager
def serving(app):
    """The address of the application in uvicorn."""
    listener = socket.create_server(("127.0.0.1", 0))
    server = uvicorn.Server(uvicorn.Config(app, log_level="warning"))
    thread = threading.Thread(target=server.run, kwargs={"sockets": [listener]})
    thread.start()
    try:
        yield f"http://127.0.0.1:{listener.getsockname()[1]}"
    finally:
        server.should_exit = True
        thread.join(30)
        assert not thread.is_alive()


def test_uvicorn_streams_and_cancels(app, llm):
    with serving(app) as address:
        url = f"{address}/v1/chat/completions"
        with urllib.request.urlopen(url, json.dumps({**STORY, "stream": True}).encode(), timeout=30) as response:
            assert "".join(contents(response.read())) == llm.chat("Tell me a story.", max_tokens=12, temperature=0).text
        before = cancelled_answers(app)
        with urllib.request.urlopen(url, ENDLESS, timeout=30) as response:
            assert response.readline().startswith(b"data: ")
            wait_until(lambda: busy_answers(app) == 1)
        wait_until(lambda: cancelled_answers(app) == before + 1)
        with pytest.raises(urllib.error.HTTPError, match="400"):
            urllib.request.urlopen(url, b"no JSON", timeout=30)
