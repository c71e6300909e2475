"""Answers, whole and in pieces."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

from forebay._memory import Meters


@dataclass(frozen=True)
class Logprob:
    """The probability of a token.

    >>> import forebay
    >>> answer = forebay.Model().generate("Once upon a", max_tokens=1, temperature=0, logprobs=2)
    >>> [first] = answer.logprobs
    >>> first.logprob > -0.01, first.top[0] == (first.token, first.logprob)
    (True, True)
    """

    token: int
    logprob: float
    top: list[tuple[int, float]]
    """The likeliest tokens at this place with their log probabilities, likeliest first."""


@dataclass(frozen=True)
class ToolCall:
    """A call of a tool."""

    id: str
    """The message with the tool's result must have it as its tool_call_id."""
    name: str
    arguments: str
    """JSON text. It may be incomplete if the answer was cut off."""


@dataclass(frozen=True)
class Message:
    """A message of the model.

    In the list of messages that Model.chat takes, it continues the conversation.

    >>> import forebay
    >>> llm = forebay.Model()
    >>> messages = [{"role": "user", "content": "Tell me a story."}]
    >>> messages.append(llm.chat(messages, max_tokens=8).message)
    >>> messages.append({"role": "user", "content": "Go on."})
    >>> llm.chat(messages, max_tokens=8).finish_reason
    'length'
    """

    content: str
    reasoning: str = ""
    tool_calls: list[ToolCall] = field(default_factory=list)
    role: str = "assistant"

    def as_dict(self) -> dict[str, Any]:
        """The message in the form of OpenAI's API."""
        # A message that only calls tools has no content.
        content = self.content if self.content or not self.tool_calls else None
        message: dict[str, Any] = {"role": self.role, "content": content}
        if self.reasoning:
            message["reasoning_content"] = self.reasoning
        if self.tool_calls:
            message["tool_calls"] = [
                {"id": call.id, "type": "function", "function": {"name": call.name, "arguments": call.arguments}}
                for call in self.tool_calls
            ]
        return message


@dataclass(frozen=True)
class Stats:
    """Measurements of an answer. Times are in seconds."""

    prompt_tokens: int
    reused_tokens: int
    """Tokens of the prompt that were computed for an earlier prompt."""
    prompt_seconds: float
    generated_tokens: int
    reasoning_tokens: int
    decode_steps: int
    """Tokens that were computed after the prompt."""
    decode_seconds: float
    ttft_seconds: float
    """The time to the first token."""
    prompt_experts: Meters
    """What the expert store counted meanwhile, for all answers together."""
    experts: Meters

    @property
    def tokens_per_second(self) -> float:
        """The speed of generation, after the first token."""
        return self.decode_steps / self.decode_seconds if self.decode_seconds > 0 else 0.0


@dataclass(frozen=True)
class Answer:
    """A finished answer."""

    text: str
    """The text. In a chat it has neither reasoning nor calls; see message."""
    tokens: list[int]
    """All tokens that were generated, without the one that ends the answer."""
    finish_reason: Literal["stop", "calls", "length", "cancelled"]
    """"stop" if the model ended the answer or a stop text occurred, "calls" if it called tools, "length" if the answer
    reached its limit or the context is full, "cancelled" if it was cancelled."""
    stats: Stats
    logprobs: list[Logprob] = field(repr=False)
    """The probabilities of the tokens, if they were asked for."""
    message: Message = field(repr=False)
    """The same as a message."""
    seed: int = field(repr=False)
    """The seed that repeats the answer."""
    stop: str | None = None
    """The stop text that ended the answer."""

    def __str__(self) -> str:
        return self.text


@dataclass(frozen=True)
class Piece:
    """A piece of an answer in progress. str(piece) is its text, unless it belongs to a tool call."""

    kind: Literal["reasoning", "content", "call", "arguments"]
    """What it is a piece of: the model's reasoning, its text, or a tool call, which begins with "call" and goes on with pieces
    of its arguments."""
    text: str
    """The text. Of a "call" it is the name of the tool."""
    call_id: str = ""
    logprobs: list[Logprob] = field(default_factory=list, repr=False)
    """The probabilities of the tokens, if they were asked for."""

    def __str__(self) -> str:
        return self.text if self.kind in ("reasoning", "content") else ""


def logprobs_of(scores: list[tuple[int, float, list[tuple[int, float]]]]) -> list[Logprob]:
    """From the compiled module's tuples."""
    return [Logprob(token, logprob, top) for token, logprob, top in scores]


def piece_of(event: tuple[Any, ...]) -> Piece:
    """From the compiled module's tuple."""
    kind, text, call_id, scores = event
    return Piece(kind, text, call_id, logprobs_of(scores))


def answer_of(fields: dict[str, Any]) -> Answer:
    """From the compiled module's dictionary."""
    stats = dict(fields["stats"])
    for name in ("experts", "prompt_experts"):
        stats[name] = Meters(**stats[name])
    message = Message(fields["content"], fields["reasoning"], [ToolCall(*call) for call in fields["calls"]])
    return Answer(
        text=fields["content"],
        tokens=fields["tokens"],
        finish_reason=fields["finish_reason"],
        stats=Stats(**stats),
        logprobs=logprobs_of(fields["logprobs"]),
        message=message,
        seed=fields["seed"],
        stop=fields["stop"],
    )


def json_of(value: object) -> str:
    """JSON text, with messages as they are sent."""

    def default(value: object) -> object:
        if isinstance(value, Message):
            return value.as_dict()
        if isinstance(value, Mapping):
            return dict(value)
        raise TypeError(f"{type(value).__name__} has no form in JSON: {value!r}")

    return json.dumps(value, default=default, allow_nan=False)
