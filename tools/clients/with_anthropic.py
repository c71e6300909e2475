"""Checks with Anthropic's client."""

import asyncio
import functools
import time
from typing import Literal

import anthropic
from anthropic import Anthropic, AsyncAnthropic

from checks import STORY, collected
from with_openai import Cat, look_tool, no_end, refused, sit_tool

CHECKS, check = collected()
LIMITS, limit = collected()


def client(server, **options):
    return made(server.address, api_key=options.pop("api_key", server.key or "none"), **options)


@functools.cache
def made(address, **options):
    return Anthropic(base_url=address, **{"max_retries": 0, "timeout": 60, **options})


def request(model, temperature=0, **options):
    # The client no longer knows these fields and sends them unchanged.
    extra = {"temperature": temperature, **options.pop("extra_body", {})}
    return {"model": model, "max_tokens": 40, "messages": STORY, "extra_body": extra, **options}


def tool(described):
    return {"name": described["name"], "description": described["description"], "input_schema": described["parameters"]}


TOOLS = [tool(look_tool()), tool(sit_tool())]


@check
def a_message(server, model):
    message = client(server).messages.create(**request(model, max_tokens=500, system="You tell stories."))
    assert message.type == "message" and message.role == "assistant" and message.model == model
    assert message.stop_reason == "end_turn" and message.stop_sequence is None
    [block] = message.content
    assert block.type == "text" and len(block.text) > 20
    usage = message.usage
    assert usage.output_tokens > 10 and usage.cache_creation_input_tokens == 0
    again = client(server).messages.create(**request(model, max_tokens=500, system="You tell stories."))
    assert again.content[0].text == block.text
    # Tokens from the cache are counted separately.
    assert again.usage.cache_read_input_tokens > 0
    total = lambda usage: usage.input_tokens + usage.cache_read_input_tokens
    assert total(again.usage) == total(usage)


@check
def a_message_in_pieces(server, model):
    whole = client(server).messages.create(**request(model))
    assert whole.stop_reason == "max_tokens" and whole.usage.output_tokens == 40
    events = [event.type for event in client(server).messages.create(**request(model), stream=True)]
    events = [event for event in events if event != "ping"]
    assert events[:2] == ["message_start", "content_block_start"]
    assert events[-3:] == ["content_block_stop", "message_delta", "message_stop"]
    assert set(events[2:-3]) == {"content_block_delta"}
    with client(server).messages.stream(**request(model)) as stream:
        text = "".join(stream.text_stream)
        final = stream.get_final_message()
    assert text == whole.content[0].text == final.content[0].text
    assert final.stop_reason == "max_tokens" and final.usage.output_tokens == 40
    assert final.usage.cache_read_input_tokens > 0


@check
def stop_sequences(server, model):
    whole = client(server).messages.create(**request(model)).content[0].text
    stop = whole[20:24]
    cut = client(server).messages.create(**request(model, stop_sequences=["no such text", stop]))
    assert (cut.stop_reason, cut.stop_sequence) == ("stop_sequence", stop)
    assert cut.content[0].text == whole[: whole.index(stop)]
    with client(server).messages.stream(**request(model, stop_sequences=[stop])) as stream:
        assert stream.get_final_message().stop_sequence == stop


@check
def what_is_cached_and_what_changes_every_time(server, model):
    def ask(number):
        text = [
            {"type": "text", "text": f"x-anthropic-billing-header: cc_version=2.{number}; cch={number}f;"},
            {"type": "text", "text": "You are a friend of animals.", "cache_control": {"type": "ephemeral"}},
        ]
        return client(server).messages.create(**request(model, system=text, metadata={"user_id": "me"})).usage

    first, second = ask(1), ask(2)
    # The last token is computed in any case.
    assert second.cache_read_input_tokens == first.input_tokens - 1, (first, second)


@check
def tokens_are_counted(server, model):
    counted = client(server).messages.count_tokens(model=model, messages=STORY, tools=TOOLS, system="Be kind.")
    usage = client(server).messages.create(**request(model, tools=TOOLS, system="Be kind.")).usage
    assert counted.input_tokens == usage.input_tokens + usage.cache_read_input_tokens


@check
def models(server, model):
    [listed] = client(server).models.list()
    assert (listed.id, listed.type) == (model, "model")
    assert abs(listed.created_at.timestamp() - time.time()) < 600
    refused(anthropic.NotFoundError, lambda: client(server).models.retrieve("no-such"))


@check
def a_tool_is_used(server, model):
    ask = request(model, tools=TOOLS, tool_choice={"type": "any"}, max_tokens=120)
    message = client(server).messages.create(**ask)
    assert message.stop_reason == "tool_use"
    assert message.content[0].type == "tool_use" and message.content[0].name in ("look", "sit")


@check
def a_named_tool_in_pieces_and_what_it_gave(server, model):
    choice = {"type": "tool", "name": "look", "disable_parallel_tool_use": True}
    ask = request(model, tools=TOOLS, tool_choice=choice, max_tokens=120)
    whole = client(server).messages.create(**ask)
    [block] = whole.content
    assert block.name == "look" and block.input["at"] in ("cat", "dog")
    with client(server).messages.stream(**ask) as stream:
        parts = [event.partial_json for event in stream if event.type == "input_json"]
        final = stream.get_final_message()
    assert parts and final.content[0].input == block.input and final.stop_reason == "tool_use"
    result = {"type": "tool_result", "tool_use_id": block.id, "content": [{"type": "text", "text": "It is red."}]}
    messages = [*STORY, whole.to_param(), {"role": "user", "content": [result]}]
    answer = client(server).messages.create(**request(model, messages=messages, tools=TOOLS))
    assert answer.content[0].type == "text"
    known = whole.usage.input_tokens + whole.usage.cache_read_input_tokens
    assert answer.usage.cache_read_input_tokens >= known, (whole.usage, answer.usage)


@check
def a_tool_runner_keeps_the_conversation(server, model):
    """The client asks the server to keep a thread. When the server refuses, the client sends all messages itself."""

    @anthropic.beta_tool
    def look(at: Literal["cat", "dog"]) -> str:
        """Look at something."""
        return f"The {at} is red."

    ask = request(model, tools=[look], tool_choice={"type": "any"}, max_tokens=120, max_iterations=2)
    first, second = client(server).beta.messages.tool_runner(**ask)
    read = lambda message: message.usage.input_tokens + message.usage.cache_read_input_tokens
    assert read(second) > read(first), (first.usage, second.usage)


@check
def an_answer_of_a_form(server, model):
    message = client(server).messages.parse(**request(model, output_format=Cat, max_tokens=100))
    assert isinstance(message.parsed_output, Cat), message


@check
def thinking(server, model):
    ask = request(model, thinking={"type": "enabled", "budget_tokens": 1024}, max_tokens=40)
    message = client(server).messages.create(**ask)
    assert message.content[0].type == "thinking" and message.content[0].thinking and message.content[0].signature
    with client(server).messages.stream(**ask) as stream:
        kinds = {event.type for event in stream}
        final = stream.get_final_message()
    assert {"thinking", "signature"} <= kinds
    assert final.content[0].thinking == message.content[0].thinking
    assert final.content[0].signature == message.content[0].signature
    # After the reasoning budget, the answer follows.
    ask["thinking"]["budget_tokens"] = 8
    assert [block.type for block in client(server).messages.create(**ask).content] == ["thinking", "text"]
    # The client sends it back with the next question.
    messages = [*STORY, message.to_param(), {"role": "user", "content": "Go on."}]
    assert client(server).messages.create(**request(model, messages=messages)).content[0].type == "text"


@check
def what_is_wrong_is_named(server, model):
    asked = client(server)
    picture = {"type": "image", "source": {"type": "base64", "media_type": "image/png", "data": "aa"}}
    paper = {"type": "document", "source": {"type": "text", "media_type": "text/plain", "data": "x"}}
    said = lambda block: [{"role": "user", "content": [block]}]
    for options, words in [
        ({"messages": said(picture)}, "messages.0.content.0: blocks of type image are not supported here"),
        ({"messages": said(paper)}, "blocks of type document"),
        ({"messages": []}, "messages"),
        ({"temperature": -1}, "temperature"),
        ({"max_tokens": 0}, "max_tokens"),
        ({"stop_sequences": [""]}, "stop_sequences"),
        ({"tools": [{"type": "web_search_20250305", "name": "web_search"}]}, "web_search_20250305"),
        ({"tools": TOOLS, "tool_choice": {"type": "tool", "name": "fly"}}, "fly"),
        ({"messages": [{"role": "user", "content": "cat " * 2000}]}, "> 1024 maximum"),
    ]:
        error = refused(anthropic.BadRequestError, lambda: asked.messages.create(**request(model, **options)))
        assert error.body["type"] == "error" and error.body["error"]["type"] == "invalid_request_error"
        assert words in error.body["error"]["message"], error.body
        assert error.response.headers["x-should-retry"] == "false"
    error = refused(anthropic.NotFoundError, lambda: asked.post("/v1/messages/batches", body={}, cast_to=object))
    assert error.body["error"]["type"] == "not_found_error"
    error = refused(anthropic.NotFoundError, lambda: asked.models.retrieve("another"))
    assert error.body["type"] == "error" and "another" in error.body["error"]["message"]


@check
def several_at_once(server, model):
    animals = ["cat", "dog", "bird", "fish"]
    ask = lambda animal: request(model, messages=[{"role": "user", "content": f"Tell me about a {animal}."}])
    alone = [client(server).messages.create(**ask(animal)).content[0].text for animal in animals]

    async def one(asking, animal):
        async with asking.messages.stream(**ask(animal)) as stream:
            return await stream.get_final_text()

    async def all_of_them():
        async with AsyncAnthropic(base_url=server.address, api_key="none", max_retries=0) as asking:
            return await asyncio.gather(*(one(asking, animal) for animal in animals))

    assert asyncio.run(all_of_them()) == alone


@check
def a_client_that_goes_away(server, model):
    before = server.metric("forebay_answers_cancelled_total")
    for _ in range(5):
        # A short answer may have ended before its client leaves.
        with client(server).messages.stream(**request(model, temperature=1, max_tokens=900)) as stream:
            next(iter(stream.text_stream))
        end = time.monotonic() + 10
        while server.metric("forebay_requests_open") > 0:
            assert time.monotonic() < end, "the answer continues"
            time.sleep(0.02)
        if server.metric("forebay_answers_cancelled_total") > before:
            return
    raise AssertionError("no answer was cancelled")


@limit
def a_key_is_needed(server, model):
    assert client(server).messages.create(**request(model, max_tokens=3)).content
    error = refused(
        anthropic.AuthenticationError,
        lambda: client(server, api_key="wrong").messages.create(**request(model, max_tokens=3)),
    )
    assert error.body["error"]["type"] == "authentication_error"
    bearer = Anthropic(base_url=server.address, auth_token=server.key, api_key=None, max_retries=0)
    assert bearer.messages.create(**request(model, max_tokens=3)).content


@limit
def too_many_at_once(server, model):
    from with_openai import client as other

    stream = other(server).chat.completions.create(
        model=model, messages=STORY, max_tokens=900, stream=True, logit_bias=no_end(server)
    )
    next(iter(stream))
    error = refused(anthropic.RateLimitError, lambda: client(server).messages.create(**request(model)))
    assert error.body["error"]["type"] == "rate_limit_error" and int(error.response.headers["retry-after"]) > 0
    stream.close()
