"""Checks with OpenAI's client."""

import asyncio
import functools
import json
import re
import time
import urllib.request
from typing import Literal

import openai
from openai import AsyncOpenAI, OpenAI
from pydantic import BaseModel, Field

from checks import STORY, collected

CHECKS, check = collected()
LIMITS, limit = collected()


def client(server, **options):
    return made(server.address, api_key=options.pop("api_key", server.key or "none"), **options)


@functools.cache
def made(address, **options):
    return OpenAI(base_url=f"{address}/v1", **{"max_retries": 0, "timeout": 60, **options})


def refused(kind, ask):
    """The error that a request ends with."""
    try:
        ask()
    except kind as error:
        return error
    raise AssertionError(f"no {kind.__name__}")


class Cat(BaseModel):
    name: Literal["Tom", "Mia"]
    lives: int = Field(ge=1, le=9)
    red: bool


def look_tool():
    at = {"type": "string", "enum": ["cat", "dog"]}
    parameters = {"type": "object", "properties": {"at": at}, "required": ["at"], "additionalProperties": False}
    return {"name": "look", "description": "Look at something", "parameters": parameters}


def sit_tool():
    return {"name": "sit", "description": "Sit down", "parameters": {"type": "object", "properties": {}}}


TOOLS = [{"type": "function", "function": tool} for tool in [look_tool(), sit_tool()]]
RESPONSE_TOOLS = [{"type": "function", "strict": False, **tool} for tool in [look_tool(), sit_tool()]]


def told(server, model, **options):
    """A story, the same one every time."""
    options = {"messages": STORY, "max_tokens": 40, "temperature": 0, **options}
    return client(server).chat.completions.create(model=model, **options)


@check
def a_chat(server, model):
    answer = told(server, model)
    assert answer.object == "chat.completion" and answer.id.startswith("chatcmpl-")
    assert answer.model == model
    [choice] = answer.choices
    assert choice.message.role == "assistant" and len(choice.message.content) > 20
    assert choice.finish_reason == "length"
    usage = answer.usage
    assert usage.completion_tokens == 40
    assert usage.total_tokens == usage.prompt_tokens + 40
    assert usage.prompt_tokens_details.cached_tokens is not None


@check
def a_chat_in_pieces(server, model):
    whole = told(server, model).choices[0].message.content
    chunks = list(told(server, model, stream=True))
    assert len({chunk.id for chunk in chunks}) == 1 and len({chunk.created for chunk in chunks}) == 1
    assert chunks[0].choices[0].delta.role == "assistant"
    deltas = [chunk.choices[0].delta.content for chunk in chunks]
    assert "".join(text or "" for text in deltas) == whole
    assert "" not in deltas[1:], "there are empty pieces"
    finishes = [chunk.choices[0].finish_reason for chunk in chunks]
    assert finishes[-1] == "length" and not any(finishes[:-1])
    assert all(chunk.usage is None for chunk in chunks)
    chunks = list(told(server, model, stream=True, stream_options={"include_usage": True}))
    assert chunks[-1].choices == [] and chunks[-1].usage.completion_tokens == 40


@check
def a_chat_in_pieces_put_together_by_the_client(server, model):
    answer = told(server, model, max_tokens=500)
    whole = answer.choices[0].message.content
    with client(server).chat.completions.stream(
        model=model, messages=STORY, max_tokens=500, temperature=0, stream_options={"include_usage": True}
    ) as stream:
        texts = [event.delta for event in stream if event.type == "content.delta"]
        final = stream.get_final_completion()
    assert "".join(texts) == whole == final.choices[0].message.content
    assert final.choices[0].finish_reason == "stop"
    assert final.usage.completion_tokens == answer.usage.completion_tokens


@check
def instructions_parts_and_unknown_fields(server, model):
    parts = [{"type": "text", "text": "Tell me a story"}, {"type": "text", "text": "about a cat."}]
    messages = [{"role": "developer", "content": "You tell stories."}, {"role": "user", "content": parts}]
    answer = told(server, model, messages=messages, extra_body={"no_such_field": 1}, user="me", store=False)
    assert answer.choices[0].message.content


@check
def several_answers_and_seeds(server, model):
    ask = lambda: told(server, model, n=3, seed=7, temperature=1.0)
    first, again = ask(), ask()
    texts = [choice.message.content for choice in first.choices]
    assert [choice.index for choice in first.choices] == [0, 1, 2]
    assert len(set(texts)) == 3
    assert texts == [choice.message.content for choice in again.choices]
    assert first.usage.completion_tokens == 120


@check
def stop_texts(server, model):
    whole = told(server, model).choices[0].message.content
    stop = whole[20:24]
    answer = told(server, model, stop=[stop, "no such text"]).choices[0]
    assert answer.message.content == whole[: whole.index(stop)]
    assert answer.finish_reason == "stop"


@check
def how_likely_tokens_are(server, model):
    answer = told(server, model, logprobs=True, top_logprobs=5, max_tokens=10).choices[0]
    tokens = answer.logprobs.content
    assert len(tokens) == 10
    for token in tokens:
        assert len(token.top_logprobs) == 5 and token.logprob <= 0
        # Without a temperature the likeliest is taken.
        assert token.token == token.top_logprobs[0].token
        assert all(a.logprob >= b.logprob for a, b in zip(token.top_logprobs, token.top_logprobs[1:]))
    text = b"".join(bytes(token.bytes) for token in tokens).decode(errors="replace")
    assert text.startswith(answer.message.content[:20])
    chunks = told(server, model, logprobs=True, top_logprobs=5, max_tokens=10, stream=True)
    streamed = [token for chunk in chunks if chunk.choices[0].logprobs for token in chunk.choices[0].logprobs.content]
    assert [token.logprob for token in streamed] == [token.logprob for token in tokens]


@check
def biases(server, model):
    answer = told(server, model, logprobs=True, max_tokens=1).choices[0]
    taken = answer.logprobs.content[0].token
    token = json.loads(post(server, "/tokenize", {"content": taken}))["tokens"][0]
    other = told(server, model, max_tokens=1, logit_bias={str(token): -100}, logprobs=True).choices[0]
    assert other.logprobs.content[0].token != taken


@check
def a_text_continued(server, model):
    ask = {"model": model, "prompt": "Once upon a time", "max_tokens": 20, "temperature": 0}
    answer = client(server).completions.create(**ask)
    [choice] = answer.choices
    assert answer.object == "text_completion" and choice.text and choice.finish_reason == "length"
    chunks = list(client(server).completions.create(**ask, stream=True))
    assert "".join(chunk.choices[0].text for chunk in chunks) == choice.text
    both = client(server).completions.create(**{**ask, "prompt": ["Once upon a time", "One day"]}, echo=True)
    assert [choice.index for choice in both.choices] == [0, 1]
    assert both.choices[0].text == "Once upon a time" + choice.text
    scored = client(server).completions.create(**ask, logprobs=3)
    assert len(scored.choices[0].logprobs.tokens) == 20


@check
def a_call_that_is_required(server, model):
    ask = {"tools": TOOLS, "tool_choice": "required", "max_tokens": 120}
    choice = told(server, model, **ask).choices[0]
    assert choice.finish_reason == "tool_calls", choice
    call = choice.message.tool_calls[0]
    assert call.type == "function" and call.id and call.function.name in ("look", "sit")
    arguments = json.loads(call.function.arguments)
    assert arguments in ({}, {"at": "cat"}, {"at": "dog"}), arguments


@check
def a_call_of_a_named_tool_in_pieces(server, model):
    ask = {"tools": TOOLS, "tool_choice": {"type": "function", "function": {"name": "look"}}, "max_tokens": 120}
    whole = told(server, model, **ask).choices[0]
    assert whole.message.tool_calls[0].function.name == "look"
    assert json.loads(whole.message.tool_calls[0].function.arguments)["at"] in ("cat", "dog")
    with client(server).chat.completions.stream(model=model, messages=STORY, temperature=0, **ask) as stream:
        events = [event.type for event in stream]
        final = stream.get_final_completion().choices[0]
    assert "tool_calls.function.arguments.delta" in events
    assert final.finish_reason == "tool_calls"
    mine = [(call.function.name, call.function.arguments) for call in final.message.tool_calls]
    assert mine == [(call.function.name, call.function.arguments) for call in whole.message.tool_calls]


@check
def what_a_tool_gave_is_read(server, model):
    ask = {"tools": TOOLS, "tool_choice": {"type": "function", "function": {"name": "look"}}, "max_tokens": 120}
    first = told(server, model, parallel_tool_calls=False, **ask)
    message = first.choices[0].message
    [call] = message.tool_calls
    result = {"role": "tool", "tool_call_id": call.id, "content": "The cat is red."}
    messages = [*STORY, message.model_dump(exclude_none=True), result]
    answer = told(server, model, messages=messages, tools=TOOLS)
    assert answer.choices[0].message.content
    # The required tool does not change the prompt.
    assert answer.usage.prompt_tokens_details.cached_tokens >= first.usage.prompt_tokens


@check
def an_answer_of_a_form(server, model):
    answer = client(server).chat.completions.parse(
        model=model, messages=STORY, response_format=Cat, temperature=0, max_tokens=100
    )
    assert isinstance(answer.choices[0].message.parsed, Cat), answer
    with client(server).chat.completions.stream(
        model=model, messages=STORY, response_format=Cat, temperature=0, max_tokens=100
    ) as stream:
        parsed = stream.get_final_completion().choices[0].message.parsed
    assert parsed == answer.choices[0].message.parsed
    return parsed


@check
def any_json_object(server, model):
    answer = told(server, model, response_format={"type": "json_object"}, max_tokens=200)
    choice = answer.choices[0]
    assert choice.message.content.lstrip().startswith("{")
    if choice.finish_reason == "stop":
        assert isinstance(json.loads(choice.message.content), dict)


@check
def reasoning(server, model):
    think = {"chat_template_kwargs": {"enable_thinking": True}}
    answer = told(server, model, extra_body=think)
    message = answer.choices[0].message
    assert message.reasoning_content and not message.content
    assert answer.usage.completion_tokens_details.reasoning_tokens == 40


@check
def a_response(server, model):
    answer = client(server).responses.create(
        model=model, input="Tell me a story about a cat.", instructions="Be brief.", temperature=0, max_output_tokens=500
    )
    assert answer.object == "response" and answer.status == "completed" and answer.id.startswith("resp_")
    [item] = answer.output
    assert item.type == "message" and item.status == "completed" and item.content[0].type == "output_text"
    assert answer.output_text == item.content[0].text and len(answer.output_text) > 20
    usage = answer.usage
    assert usage.total_tokens == usage.input_tokens + usage.output_tokens
    assert usage.input_tokens_details.cached_tokens is not None
    assert usage.output_tokens_details.reasoning_tokens == 0
    assert answer.instructions == "Be brief." and answer.error is None


@check
def a_response_in_pieces(server, model):
    ask = {"model": model, "input": [{"role": "user", "content": "Tell me a story about a dog."}], "temperature": 0}
    whole = client(server).responses.create(**ask, max_output_tokens=500)
    events = list(client(server).responses.create(**ask, max_output_tokens=500, stream=True))
    assert [event.sequence_number for event in events] == list(range(len(events)))
    kinds = [event.type.removeprefix("response.") for event in events]
    assert kinds[:4] == ["created", "in_progress", "output_item.added", "content_part.added"]
    assert kinds[-4:] == ["output_text.done", "content_part.done", "output_item.done", "completed"]
    assert set(kinds[4:-4]) == {"output_text.delta"}
    with client(server).responses.stream(**ask, max_output_tokens=500) as stream:
        text = "".join(event.delta for event in stream if event.type == "response.output_text.delta")
        final = stream.get_final_response()
    assert text == whole.output_text == final.output_text
    cut = list(client(server).responses.create(**ask, max_output_tokens=5, stream=True))[-1]
    assert cut.type == "response.incomplete"
    assert cut.response.incomplete_details.reason == "max_output_tokens"


@check
def a_response_with_calls(server, model):
    ask = {"model": model, "tools": RESPONSE_TOOLS, "temperature": 0, "max_output_tokens": 120}
    ask["tool_choice"] = {"type": "function", "name": "look"}
    asked = [{"role": "user", "content": "Look at the cat."}]
    whole = client(server).responses.create(**ask, input=asked, parallel_tool_calls=False)
    [call] = whole.output
    assert call.type == "function_call" and call.name == "look"
    assert json.loads(call.arguments)["at"] in ("cat", "dog")
    with client(server).responses.stream(**ask, input=asked, parallel_tool_calls=False) as stream:
        kinds = [event.type for event in stream]
        final = stream.get_final_response()
    assert "response.function_call_arguments.delta" in kinds and "response.function_call_arguments.done" in kinds
    assert final.output[0].arguments == call.arguments
    result = {"type": "function_call_output", "call_id": call.call_id, "output": "The cat is red."}
    answer = client(server).responses.create(
        **{**ask, "tool_choice": "auto"}, input=[*asked, call.model_dump(exclude_none=True), result]
    )
    assert answer.output_text
    assert answer.usage.input_tokens_details.cached_tokens >= whole.usage.input_tokens


@check
def a_response_of_a_form(server, model):
    ask = {"model": model, "input": "A cat", "temperature": 0, "max_output_tokens": 100}
    answer = client(server).responses.parse(**ask, text_format=Cat)
    assert isinstance(answer.output_parsed, Cat), answer
    with client(server).responses.stream(**ask, text_format=Cat) as stream:
        assert stream.get_final_response().output_parsed == answer.output_parsed


@check
def a_response_with_reasoning_and_probabilities(server, model):
    ask = {"model": model, "input": "Tell me a story about a cat.", "temperature": 0, "max_output_tokens": 20}
    include = ["reasoning.encrypted_content", "message.output_text.logprobs"]
    answer = client(server).responses.create(**ask, include=include, top_logprobs=2)
    likely = answer.output[0].content[0].logprobs
    assert len(likely) == 20 and len(likely[0].top_logprobs) == 2
    ask["extra_body"] = {"chat_template_kwargs": {"enable_thinking": True}}
    thought = client(server).responses.create(**ask, include=include)
    [item] = thought.output
    assert item.type == "reasoning" and item.content[0].text and item.encrypted_content
    assert thought.usage.output_tokens_details.reasoning_tokens == 20
    kinds = [event.type for event in client(server).responses.create(**ask, stream=True)]
    assert "response.reasoning_text.delta" in kinds and "response.reasoning_text.done" in kinds
    # The client sends it back with the next question.
    items = [{"role": "user", "content": "Hello"}, item.model_dump(exclude_none=True), {"role": "user", "content": "Go on."}]
    assert client(server).responses.create(model=model, input=items, max_output_tokens=5).output_text


@check
def models(server, model):
    listed = client(server).models.list()
    assert [one.id for one in listed] == [model]
    assert client(server).models.retrieve(model).id == model
    error = refused(openai.NotFoundError, lambda: client(server).models.retrieve("no/such"))
    assert error.code == "model_not_found"


@check
def what_is_wrong_is_named(server, model):
    ask = client(server)
    chat = lambda **options: lambda: told(server, model, **options)
    respond = lambda **options: lambda: ask.responses.create(**{"model": model, "input": "x", **options})
    picture = [{"role": "user", "content": [{"type": "image_url", "image_url": {"url": "data:,"}}]}]
    drawing = [{"role": "user", "content": [{"type": "input_image", "image_url": "data:,", "detail": "auto"}]}]
    for request, param in [
        (chat(temperature=-1), "temperature"),
        (chat(n=0), "n"),
        (chat(messages=[]), "messages"),
        (chat(messages=picture), "messages[0].content"),
        (chat(max_tokens=0), "max_tokens"),
        (chat(tools=TOOLS, tool_choice={"type": "function", "function": {"name": "fly"}}), "tool_choice"),
        (chat(prediction={"type": "content", "content": "x"}), "prediction"),
        (respond(previous_response_id="resp_1"), "previous_response_id"),
        (respond(input=drawing), "input[0].content"),
        (respond(tools=[{"type": "web_search"}]), "tools[0].type"),
        (respond(top_p=7), "top_p"),
        (respond(max_output_tokens=0), "max_output_tokens"),
    ]:
        error = refused(openai.BadRequestError, request)
        assert error.param == param, (error.param, param)
        assert error.type == "invalid_request_error" and error.message
        assert error.response.headers["x-should-retry"] == "false"


@check
def too_long_a_prompt_is_told_with_both_numbers(server, model):
    long = "cat " * 2000
    for request in [
        lambda: told(server, model, messages=[{"role": "user", "content": long}]),
        lambda: client(server).responses.create(model=model, input=long),
    ]:
        error = refused(openai.BadRequestError, request)
        assert error.code == "context_length_exceeded"
        assert re.search(r"20\d\d tokens > 1024 maximum", error.message), error.message


@check
def several_at_once(server, model):
    animals = ["cat", "dog", "bird", "fish", "boat", "king", "girl", "tree"]
    said = lambda animal: [{"role": "user", "content": f"Tell me about a {animal}."}]
    alone = [told(server, model, messages=said(animal)).choices[0].message.content for animal in animals]

    async def one(asking, animal):
        text = ""
        stream = await asking.chat.completions.create(
            model=model, messages=said(animal), max_tokens=40, temperature=0, stream=True
        )
        async for chunk in stream:
            text += chunk.choices[0].delta.content or ""
        return text

    async def all_of_them():
        async with AsyncOpenAI(base_url=f"{server.address}/v1", api_key="none", max_retries=0) as asking:
            return await asyncio.gather(*(one(asking, animal) for animal in animals))

    assert asyncio.run(all_of_them()) == alone


@check
def a_client_that_goes_away(server, model):
    before = server.metric("forebay_answers_cancelled_total")
    stream = client(server).chat.completions.create(
        model=model, messages=STORY, max_tokens=900, stream=True, logit_bias=no_end(server)
    )
    for _, chunk in zip(range(5), stream):
        assert chunk.choices
    stream.close()
    end = time.monotonic() + 10
    while server.metric("forebay_requests_open") > 0:
        assert time.monotonic() < end, "the answer continues"
        time.sleep(0.02)
    assert server.metric("forebay_answers_cancelled_total") == before + 1


def no_end(server):
    """A bias against the end token."""
    return {str(json.loads(post(server, "/tokenize", {"content": "<|im_end|>"}))["tokens"][0]): -100}


def post(server, path, body):
    request = urllib.request.Request(server.address + path, json.dumps(body).encode())
    if server.key:
        request.add_header("Authorization", f"Bearer {server.key}")
    return urllib.request.urlopen(request).read()


@limit
def a_key_is_needed(server, model):
    assert client(server).models.list().data
    for key in ["wrong", "open sesam"]:
        error = refused(openai.AuthenticationError, lambda: client(server, api_key=key).models.list())
        assert error.code == "invalid_api_key"


@limit
def too_many_at_once(server, model):
    stream = client(server).chat.completions.create(
        model=model, messages=STORY, max_tokens=900, stream=True, logit_bias=no_end(server)
    )
    next(iter(stream))
    error = refused(openai.RateLimitError, lambda: told(server, model))
    assert int(error.response.headers["retry-after"]) > 0 and error.code == "rate_limit_exceeded"
    error = refused(openai.RateLimitError, lambda: client(server).responses.create(model=model, input="x"))
    stream.close()
    # A client that waits gets its answer.
    assert client(server, max_retries=3).chat.completions.create(model=model, messages=STORY, max_tokens=3).choices
