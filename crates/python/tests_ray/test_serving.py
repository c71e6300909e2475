"""Replicas behind one address."""

import json
import time

import httpx
import openai
import pytest
import ray

import forebay

REPLICA = "x-forebay-replica"


def chat(address, messages, **fields):
    """Asks for an answer; returns the whole response."""
    body = {"messages": messages, "max_tokens": 12, "temperature": 0, **fields}
    response = httpx.post(f"{address}/v1/chat/completions", json=body, timeout=60)
    assert response.status_code == 200, response.text
    return response


def text_of(response):
    return response.json()["choices"][0]["message"]["content"]


def user(text):
    return {"role": "user", "content": text}


def wait_until(condition):
    end = time.monotonic() + 60
    while not condition():
        assert time.monotonic() < end, "it did not happen"
        time.sleep(0.05)


def metrics(address, replicas=2):
    """The counters of each replica, by its name. A request for them goes to any replica."""
    found = {}
    end = time.monotonic() + 60
    while len(found) < replicas:
        assert time.monotonic() < end, f"only {list(found)} respond"
        response = httpx.get(f"{address}/metrics")
        lines = [line.split() for line in response.text.splitlines() if not line.startswith("#")]
        found[response.headers[REPLICA]] = {line[0]: float(line[1]) for line in lines}
    return found


def total(address, name):
    return sum(counters[f"forebay_{name}"] for counters in metrics(address).values())


def test_the_openai_client_works_unchanged(address):
    client = openai.OpenAI(base_url=f"{address}/v1", api_key="none")
    asked = {"model": "any", "messages": [user("Tell me a story.")], "max_tokens": 12, "temperature": 0}
    whole = client.chat.completions.create(**asked).choices[0].message.content
    pieces = [chunk.choices[0].delta.content for chunk in client.chat.completions.create(**asked, stream=True) if chunk.choices]
    with forebay.Model(device="cpu") as llm:
        assert whole == llm.chat("Tell me a story.", max_tokens=12, temperature=0).text
    assert "".join(filter(None, pieces)) == whole and len(pieces) > 5
    with pytest.raises(openai.BadRequestError, match="temperature"):
        client.chat.completions.create(**{**asked, "temperature": -1})


def test_the_anthropic_api_and_errors_of_the_server(address):
    body = {"model": "any", "max_tokens": 5, "messages": [user("Hello")]}
    assert httpx.post(f"{address}/v1/messages", json=body).json()["type"] == "message"
    assert httpx.get(f"{address}/v1/nothing").json()["error"]["code"] == "unknown_url"
    assert httpx.post(f"{address}/v1/messages", content=b" " * (17 << 20), timeout=60).status_code == 413
    # A page of another site must not use the server.
    assert httpx.get(f"{address}/v1/models", headers={"host": "elsewhere.example"}).status_code == 403


def test_conversations_stay_on_their_replicas(address):
    subjects = ["a cat", "a dog", "the sea", "a bird", "a house", "the moon"]
    system = {"role": "system", "content": "Be brief."}
    conversations = {subject: [system, user(f"Tell me of {subject}.")] for subject in subjects}
    replicas = {subject: set() for subject in subjects}
    for turn in range(4):
        for subject, messages in conversations.items():
            response = chat(address, messages)
            replicas[subject].add(response.headers[REPLICA])
            cached = response.json()["usage"]["prompt_tokens_details"]["cached_tokens"]
            assert turn == 0 or cached > 0, "the replica does not hold the conversation"
            messages += [{"role": "assistant", "content": text_of(response)}, user("Go on.")]
    assert all(len(names) == 1 for names in replicas.values()), replicas


def test_new_conversations_use_all_replicas(address):
    names = {chat(address, [user(f"Hello number {i}")], max_tokens=1).headers[REPLICA] for i in range(30)}
    assert len(names) == 2


def test_an_answer_streams_and_a_client_that_leaves_cancels_it(address):
    before = total(address, "answers_cancelled_total")
    body = {"messages": [user("Go.")], "max_tokens": 900, "ignore_eos": True, "temperature": 0, "stream": True}
    with httpx.stream("POST", f"{address}/v1/chat/completions", json=body, timeout=60) as response:
        assert response.headers["content-type"].startswith("text/event-stream")
        events = (json.loads(line.removeprefix("data: ")) for line in response.iter_lines() if line.startswith("data: {"))
        for _ in range(3):
            assert next(events)["object"] == "chat.completion.chunk"
    wait_until(lambda: total(address, "answers_cancelled_total") == before + 1)
    assert total(address, "requests_running") == 0


def test_a_conversation_survives_its_replica(address):
    messages = [user("Tell me of the wind.")]
    first = chat(address, messages)
    messages += [{"role": "assistant", "content": text_of(first)}, user("Go on.")]
    expected = text_of(chat(address, messages))
    replica = ray.get_actor(f"SERVE_REPLICA::forebay#Engine#{first.headers[REPLICA]}", namespace="serve")
    ray.kill(replica)
    again = chat(address, messages)
    assert text_of(again) == expected and again.headers[REPLICA] != first.headers[REPLICA]
    # Ray replaces it.
    assert first.headers[REPLICA] not in metrics(address)
