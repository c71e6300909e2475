"""Answers are those of the program."""

import json

import pytest
from pydantic import BaseModel

import forebay
from conftest import DEMO, PROMPT, ROOT


def test_a_continued_text_has_the_tokens_of_the_program(llm, program):
    said = json.loads(program("run", "--raw", "-p", PROMPT, "-n", 40, "--temp", 0, "--json"))
    answer = llm.generate(PROMPT, max_tokens=40, temperature=0)
    assert answer.tokens == said["tokens"] and len(answer.tokens) == 40
    assert answer.text == said["text"] == str(answer)
    assert answer.finish_reason == said["finish_reason"] == "length"
    assert answer.stats.generated_tokens == 40 and answer.stats.tokens_per_second > 0
    assert llm.generate(llm.tokenizer.encode(PROMPT), max_tokens=40, temperature=0).tokens == answer.tokens


def test_a_chat_has_the_tokens_of_the_program(llm, program):
    said = json.loads(program("run", "-p", "Tell me a story about a dog.", "-n", 40, "--seed", 7, "--json"))
    answer = llm.chat("Tell me a story about a dog.", max_tokens=40, seed=7)
    assert answer.tokens == said["tokens"] and answer.seed == said["seed"] == 7
    assert answer.message == forebay.Message(content=said["text"])


def test_several_prompts_come_back_in_order(llm):
    prompts = ["The cat", "The dog ran to the", "A", llm.tokenizer.encode("One day, a little")]
    alone = [llm.generate(prompt, max_tokens=12, temperature=0).tokens for prompt in prompts]
    assert [answer.tokens for answer in llm.generate(prompts, max_tokens=12, temperature=0)] == alone


def test_pieces_are_parts_of_the_whole_answer(llm):
    whole = llm.chat("Tell me a story.", max_tokens=30, temperature=0, logprobs=1)
    stream = llm.chat("Tell me a story.", max_tokens=30, temperature=0, logprobs=1, stream=True)
    assert stream.answer is None
    pieces = list(stream)
    assert len(pieces) > 10 and {piece.kind for piece in pieces} == {"content"}
    assert "".join(map(str, pieces)) == whole.text == stream.answer.text
    assert [logprob for piece in pieces for logprob in piece.logprobs] == whole.logprobs == stream.answer.logprobs
    assert stream.progress[0] == stream.progress[1] > 0
    assert list(stream) == [] and stream.whole() == stream.answer


def test_a_model_lives_as_long_as_its_answers():
    stream = forebay.Model(DEMO, device="cpu").generate(PROMPT, max_tokens=30, ignore_eos=True, stream=True)
    assert len(stream.whole().tokens) == 30
    session = forebay.Model(DEMO, device="cpu").session()
    assert session.extend([1, 2, 3]) == (0, 3)


def test_a_conversation_is_not_computed_again(llm):
    messages = [{"role": "user", "content": "Tell me a story about a bear and a fish, please."}]
    messages.append(llm.chat(messages, max_tokens=20).message)
    messages.append({"role": "user", "content": "Go on."})
    stats = llm.chat(messages, max_tokens=4).stats
    assert 20 < stats.reused_tokens < stats.prompt_tokens


def test_probabilities(llm):
    answer = llm.generate(PROMPT, max_tokens=5, temperature=0, logprobs=3)
    assert [scored.token for scored in answer.logprobs] == answer.tokens
    assert all(len(scored.top) == 3 and scored.top[0] == (scored.token, scored.logprob) for scored in answer.logprobs)
    assert llm.generate(PROMPT, max_tokens=5).logprobs == []


def test_a_stop_text_ends_the_answer(llm):
    answer = llm.generate("Once upon a time", temperature=0, stop="girl")
    assert (answer.text, answer.stop, answer.finish_reason) == (", there was a little ", "girl", "stop")


def test_an_answer_has_the_form_that_is_asked_for(llm):
    class Pet(BaseModel):
        name: str
        age: int

    limits = {"temperature": 0, "max_tokens": 200}
    pet = Pet.model_validate_json(llm.chat("Describe a pet.", schema=Pet, **limits).text)
    assert isinstance(pet.age, int)
    assert llm.chat("Yes?", schema={"enum": ["yes", "no"]}, **limits).text in ('"yes"', '"no"')
    assert llm.chat("Yes?", grammar='start: "yes" | "no"', **limits).text in ("yes", "no")
    assert llm.generate("Is it so?", grammar='start: "yes" | "no"', **limits).text in ("yes", "no")
    with pytest.raises(forebay.RequestError, match="leave out one"):
        llm.chat("Yes?", grammar='start: "yes"', schema={})


TOOLS = [
    {
        "type": "function",
        "function": {
            "name": "look",
            "parameters": {"type": "object", "properties": {"at": {"enum": ["cat", "dog"]}}, "required": ["at"]},
        },
    }
]


def test_tools_are_called():
    template = (ROOT / "tools" / "clients" / "tools.jinja").read_text()
    llm = forebay.Model(DEMO, device="cpu", chat_template=template)
    messages = [{"role": "user", "content": "Look at the cat."}]
    options = {"tools": TOOLS, "temperature": 0, "max_tokens": 100}
    answer = llm.chat(messages, tool_choice="required", parallel_tool_calls=False, **options)
    [call] = answer.message.tool_calls
    assert answer.finish_reason == "calls" and call.name == "look"
    assert json.loads(call.arguments)["at"] in ("cat", "dog")
    pieces = list(llm.chat(messages, tool_choice="required", parallel_tool_calls=False, stream=True, **options))
    [first] = [piece for piece in pieces if piece.kind == "call"]
    assert first.text == "look" and first.call_id and str(first) == ""
    assert "".join(piece.text for piece in pieces if piece.kind == "arguments") == call.arguments
    messages += [answer.message, {"role": "tool", "tool_call_id": call.id, "content": "It sits."}]
    assert llm.chat(messages, **options).stats.prompt_tokens > answer.stats.prompt_tokens


def test_bodies_of_openai(llm):
    body = {"messages": [{"role": "user", "content": "Tell me a story."}], "max_tokens": 20, "temperature": 0}
    text = llm.chat("Tell me a story.", max_tokens=20, temperature=0).text
    whole = llm.create_chat_completion(**body, n=2)
    assert [choice["message"]["content"] for choice in whole["choices"]] == [text, text]
    assert whole["object"] == "chat.completion" and whole["usage"]["completion_tokens"] == 40
    chunks = list(llm.create_chat_completion(**body, stream=True, stream_options={"include_usage": True}))
    assert "".join(chunk["choices"][0]["delta"].get("content") or "" for chunk in chunks[:-1]) == text
    assert chunks[-2]["choices"][0]["finish_reason"] == "length"
    assert chunks[-1]["usage"]["completion_tokens"] == 20
    with pytest.raises(forebay.RequestError) as error:
        llm.create_chat_completion(**{**body, "n": 0})
    assert error.value.field == "n"


def test_the_tokenizer(llm):
    tokenizer = llm.tokenizer
    tokens = tokenizer.encode("<|im_end|> Grüße!", special=True)
    assert tokens[0] == tokenizer.find("<|im_end|>") and tokenizer.is_control(tokens[0])
    assert tokenizer.decode(tokens, special=True) == "<|im_end|> Grüße!" and tokenizer.decode(tokens) == " Grüße!"
    assert len(tokenizer.encode("<|im_end|>")) > 1
    assert b"".join(map(tokenizer.token_bytes, tokens[1:])).decode() == " Grüße!"
    assert len(tokenizer) == tokenizer.vocab_size <= llm.vocab_size
    assert tokenizer.eos in tokenizer.end_tokens
