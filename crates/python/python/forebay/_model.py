"""A loaded model."""

from __future__ import annotations

import atexit
import json
import os
import warnings
import weakref
from collections.abc import Coroutine, Iterator, Mapping, Sequence
from operator import index
from types import TracebackType
from typing import TYPE_CHECKING, Any, Literal, TypeAlias, TypedDict, Unpack, cast, overload

from forebay import _native
from forebay._answers import Answer, Message, json_of
from forebay._asgi import SERVER_DEFAULTS, Application, ServerOptions
from forebay._errors import RequestError
from forebay._memory import MemoryUse, Meters, Plan, plan_of
from forebay._native import Session, Tokenizer
from forebay._progress import Progress, ProgressBar, no_progress
from forebay._streams import AsyncStream, Stream

if TYPE_CHECKING:
    from forebay._stages import Transport

Path: TypeAlias = str | os.PathLike[str]
Prompt: TypeAlias = str | Sequence[int]
"""A text, or its tokens."""
Messages: TypeAlias = str | Sequence[Mapping[str, Any] | Message]
"""Messages in the form of OpenAI's API, or the text of one message of the user."""
Schema: TypeAlias = Mapping[str, Any] | type
"""A JSON schema, or a class of Pydantic."""


class LoadOptions(TypedDict, total=False):
    """How a model is loaded. All options have defaults."""

    memory: int | str | None
    """The memory budget of the process, in bytes or as a text such as "24G". By default the free memory less a margin."""
    expert_memory: int | str | None
    """What experts may use of it: "4G", or "30%" of all experts. By default what is left."""
    context: int | None
    """The most tokens of a conversation, with memory reserved for all of them. By default the model's maximum, with memory
    reserved for 8192 tokens."""
    device: str
    """ "auto" (the first GPU if it can take the model, otherwise the CPU), "cpu", "cuda:0", "metal", or
    "vulkan:0" (wheels and macOS; a build from source needs the feature gpu)."""
    vram: int | str | None
    """What the model may use of the GPU's memory. By default the free memory less a margin."""
    cpu_experts: bool
    """Whether the CPU computes experts that are in RAM but not on the GPU. This changes the last bits of results."""
    threads: int | None
    """Compute threads. By default one for each CPU."""
    exact: bool
    """Whether the model computes with dequantised weights in float32: slower, for comparison."""
    io: Literal["auto", "uring", "pool", "mmap"]
    """How experts are read."""
    policy: Literal["lru", "lfu", "forecast"]
    """Which expert leaves memory when another one needs the space."""
    prefetch: bool
    """Whether experts that are probably needed next are read while the drive is idle."""
    heat: bool
    """Whether it is recorded in the user's cache which experts are used most, so that these are loaded first next time."""
    parallel: int
    """The most answers that are computed at once; others wait. By default 32."""
    prefix_cache: bool
    """Whether conversations are kept in memory, so that a prompt that continues one is not computed again."""
    chat_template: str | None
    """The source of a Jinja template that replaces the model's."""


class SamplingOptions(TypedDict, total=False):
    """How an answer is generated. What is not set comes from the model's file, if that says."""

    max_tokens: int | None
    """The most tokens of the answer. By default until the context is full."""
    temperature: float | None
    """0 always picks the likeliest token."""
    top_k: int | None
    top_p: float | None
    min_p: float | None
    repeat_penalty: float | None
    presence_penalty: float | None
    frequency_penalty: float | None
    repeat_last_n: int | None
    """How many of the last tokens penalties apply to."""
    logit_bias: Mapping[int, float] | None
    """Added to the logits of tokens."""
    seed: int | None
    """The same seed gives the same text. By default random; Answer.seed says it."""
    stop: str | Sequence[str] | None
    """Texts that end the answer and are not part of it."""
    ignore_eos: bool | None
    """Whether the answer goes on where the model would end it."""
    logprobs: int | None
    """How many of the likeliest tokens are reported at each place; 0 reports only the chosen token."""


class AnswerOptions(SamplingOptions, total=False):
    """How a text is continued."""

    schema: Schema | None
    """What the answer must be: JSON of this schema."""
    grammar: str | None
    """What the answer must be: text of this Lark grammar."""


class ChatOptions(AnswerOptions, total=False):
    """How a message is answered."""

    tools: Sequence[Mapping[str, Any]] | None
    """The tools that the model may call, in the form of OpenAI's API."""
    tool_choice: str | Mapping[str, Any] | None
    """ "auto", "none", "required", or {"type": "function", "function": {"name": …}}."""
    parallel_tool_calls: bool | None
    """Whether the model may call several tools at once."""
    think: bool | None
    """Whether the model reasons first, if its chat template supports that. By default as the template says."""
    thinking_budget: int | None
    """The most tokens of reasoning. After that, the model must answer."""
    chat_template_kwargs: Mapping[str, Any] | None
    """Further variables for the chat template."""


_LOAD_DEFAULTS: LoadOptions = {
    "memory": None,
    "expert_memory": None,
    "context": None,
    "device": "auto",
    "vram": None,
    "cpu_experts": False,
    "threads": None,
    "exact": False,
    "io": "auto",
    "policy": "forecast",
    "prefetch": True,
    "heat": True,
    "parallel": 32,
    "prefix_cache": True,
    "chat_template": None,
}


class Model:
    """A loaded model.

    The model is a GGUF file, a folder with safetensors files, or OWNER/NAME:QUANT of the Hugging Face hub, which is downloaded
    if it is not here. Without an argument it is the demo model, which is part of the package. LoadOptions lists the options.

    While it loads, progress is called with "downloading" or "loading", the bytes that are done, and all. By default a tqdm bar
    shows that, if tqdm is installed and standard error is a terminal; False shows nothing.

    With stages, it has the layers after those of the stages, which these transports reach; plan, meters and memory are those of
    its own layers. Stage has an example.

    Any thread may call any method. The interpreter's lock is free while the model computes, and Ctrl-C ends a call.

    >>> import forebay as fb
    >>> with fb.Model(memory="256M") as llm:
    ...     llm.chat("Tell me a story.", max_tokens=5, temperature=0).text
    'Once upon a time,'
    >>> llm.closed
    True
    """

    def __init__(
        self,
        model: Path | None = None,
        *,
        stages: Sequence[Transport] | None = None,
        progress: Progress | Literal[False] | None = None,
        **options: Unpack[LoadOptions],
    ) -> None:
        arguments = load_arguments(options)
        with ProgressBar() as bar:
            show: Progress = bar if progress is None else no_progress if progress is False else progress
            self._name, path = _native.locate(path_of(model), lambda done, total: show("downloading", done, total))
            transports = None if stages is None else list(stages)
            self._native = _native.Model(
                path, transports, arguments, lambda done, total: show("loading", done, total), warn
            )
        _open_models.add(self)

    # A text is a sequence of texts, too, but it is one prompt.
    @overload
    def generate(  # type: ignore[overload-overlap]
        self, prompt: Prompt, *, stream: Literal[False] = False, **options: Unpack[AnswerOptions]
    ) -> Answer: ...
    @overload
    def generate(
        self, prompt: Sequence[Prompt], *, stream: Literal[False] = False, **options: Unpack[AnswerOptions]
    ) -> list[Answer]: ...
    @overload
    def generate(self, prompt: Prompt, *, stream: Literal[True], **options: Unpack[AnswerOptions]) -> Stream: ...
    def generate(
        self, prompt: Prompt | Sequence[Prompt], *, stream: bool = False, **options: Unpack[AnswerOptions]
    ) -> Answer | list[Answer] | Stream:
        """Continues a text, without a chat template. Control tokens in the text are control tokens.

        The prompt is a text or its tokens. Several prompts are computed together, and their answers come back in order. With
        stream=True, the answer comes in pieces. AnswerOptions lists the options.

        >>> import forebay as fb
        >>> llm = fb.Model()
        >>> [answer.text for answer in llm.generate(["Once upon", "The cat"], max_tokens=3, temperature=0)]
        [' a time,', ' was very happy']
        >>> llm.generate("The cat", schema={"enum": ["sat", "ran"]}).text in ('"sat"', '"ran"')
        True
        """
        if stream:
            if _is_several(prompt):
                raise RequestError("several prompts cannot be streamed: ask for each stream by itself", "prompt")
            [native] = self._complete(prompt, options)
            return Stream(native)
        streams = [Stream(native) for native in self._complete(prompt, options)]
        try:
            answers = [stream.whole() for stream in streams]
        finally:
            # After Ctrl-C the traceback may refer to them for long.
            for one in streams:
                one.close()
        return answers if _is_several(prompt) else answers[0]

    @overload
    def agenerate(
        self, prompt: Prompt, *, stream: Literal[False] = False, **options: Unpack[AnswerOptions]
    ) -> Coroutine[Any, Any, Answer]: ...
    @overload
    def agenerate(self, prompt: Prompt, *, stream: Literal[True], **options: Unpack[AnswerOptions]) -> AsyncStream: ...
    def agenerate(
        self, prompt: Prompt, *, stream: bool = False, **options: Unpack[AnswerOptions]
    ) -> Coroutine[Any, Any, Answer] | AsyncStream:
        """Like generate, for asyncio: await it, or read its pieces with async for. It takes one prompt.

        >>> import asyncio, forebay as fb
        >>> llm = fb.Model()
        >>> async def both():
        ...     ask = lambda prompt: llm.agenerate(prompt, max_tokens=3, temperature=0)
        ...     return await asyncio.gather(ask("Once upon"), ask("The cat"))
        >>> [answer.text for answer in asyncio.run(both())]
        [' a time,', ' was very happy']
        """
        if _is_several(prompt):
            raise RequestError("agenerate takes one prompt: use asyncio.gather for several", "prompt")
        answer = AsyncStream(lambda: self._complete(prompt, options)[0])
        return answer if stream else answer.whole()

    @overload
    def chat(self, messages: Messages, *, stream: Literal[False] = False, **options: Unpack[ChatOptions]) -> Answer: ...
    @overload
    def chat(self, messages: Messages, *, stream: Literal[True], **options: Unpack[ChatOptions]) -> Stream: ...
    def chat(
        self, messages: Messages, *, stream: bool = False, **options: Unpack[ChatOptions]
    ) -> Answer | Stream:
        """Writes the next message of a conversation.

        The messages have the form of OpenAI's API; one of the user may be a text. With stream=True, the answer comes in pieces.
        ChatOptions lists the options. What was computed for a conversation is kept, so that its next turn takes only the time
        of what is new.

        >>> import forebay as fb
        >>> llm = fb.Model()
        >>> answer = llm.chat([{"role": "user", "content": "Tell me a story."}], max_tokens=5, temperature=0)
        >>> answer.message
        Message(content='Once upon a time,', reasoning='', tool_calls=[], role='assistant')

        An answer that must have a form:

        >>> from pydantic import BaseModel
        >>> class Pet(BaseModel):
        ...     cat: bool
        >>> answer = llm.chat("Name a pet.", schema=Pet, temperature=0)
        >>> type(Pet.model_validate_json(answer.text).cat)
        <class 'bool'>
        """
        answer = Stream(self._chat(messages, options))
        return answer if stream else answer.whole()

    @overload
    def achat(
        self, messages: Messages, *, stream: Literal[False] = False, **options: Unpack[ChatOptions]
    ) -> Coroutine[Any, Any, Answer]: ...
    @overload
    def achat(self, messages: Messages, *, stream: Literal[True], **options: Unpack[ChatOptions]) -> AsyncStream: ...
    def achat(
        self, messages: Messages, *, stream: bool = False, **options: Unpack[ChatOptions]
    ) -> Coroutine[Any, Any, Answer] | AsyncStream:
        """Like chat, for asyncio: await it, or read its pieces with async for."""
        answer = AsyncStream(lambda: self._chat(messages, options))
        return answer if stream else answer.whole()

    @overload
    def create_chat_completion(self, *, stream: Literal[True], **body: Any) -> Iterator[dict[str, Any]]: ...
    @overload
    def create_chat_completion(self, *, stream: Literal[False] | None = None, **body: Any) -> dict[str, Any]: ...
    def create_chat_completion(
        self, *, stream: bool | None = None, **body: Any
    ) -> dict[str, Any] | Iterator[dict[str, Any]]:
        """Answers a body of OpenAI's chat API with the dictionary that `forebay serve` would send, or with an iterator over its
        chunks if stream is true.

        >>> import forebay as fb
        >>> llm = fb.Model()
        >>> body = {"messages": [{"role": "user", "content": "Tell me a story."}], "max_tokens": 5, "temperature": 0}
        >>> llm.create_chat_completion(**body)["choices"][0]["message"]["content"]
        'Once upon a time,'
        >>> chunks = llm.create_chat_completion(**body, stream=True)
        >>> [chunk["choices"][0]["delta"].get("content") for chunk in chunks]
        [None, 'Once', ' upon', ' a', ' time', ',', None]
        """
        answers = self._native.openai(self._name, json_of({**body, "stream": stream}))
        if stream:
            return _objects(answers)
        [answer] = _objects(answers)
        return answer

    def asgi(self, **options: Unpack[ServerOptions]) -> Application:
        """The model as an ASGI application, with the APIs that `forebay serve` has. ServerOptions lists the options.

        Any ASGI server can run it, such as uvicorn: `uvicorn.run(llm.asgi(), port=8080)`. It computes its answers apart from
        those of the model's other methods, with as many at once as the model has, and shares their memory.
        """
        known = {"name": self.name, **SERVER_DEFAULTS}
        if unknown := options.keys() - known.keys():
            raise TypeError(f"there is no option {min(unknown)!r}; see forebay.ServerOptions")
        return Application(self._native.serve({**known, **options}))

    def session(self) -> Session:
        """An empty session: a conversation in tokens, with its logits."""
        return self._native.session()

    def load_session(self, path: Path) -> Session:
        """Reads a session that Session.save has written. A file of another model is refused.

        >>> import forebay, tempfile
        >>> llm = forebay.Model()
        >>> session = llm.session()
        >>> _ = session.extend(llm.tokenizer.encode("Once upon a time"))
        >>> with tempfile.TemporaryDirectory() as folder:
        ...     session.save(f"{folder}/session")
        ...     again = llm.load_session(f"{folder}/session")
        >>> again.tokens == session.tokens
        True
        """
        return self._native.load_session(path)

    @property
    def tokenizer(self) -> Tokenizer:
        """Converts text to tokens and back."""
        return self._native.tokenizer

    @property
    def name(self) -> str:
        """What the model is called."""
        return self._name

    @property
    def context(self) -> int:
        """The most tokens of a conversation."""
        return self._native.context

    @property
    def vocab_size(self) -> int:
        """The number of logits. The tokenizer may have fewer tokens."""
        return self._native.vocab_size

    @property
    def backend(self) -> str:
        """What computes, in words."""
        return self._native.backend

    @property
    def plan(self) -> Plan:
        """How memory is divided."""
        return plan_of(self._native.plan)

    def meters(self) -> Meters:
        """What the expert store has counted since the model was loaded."""
        return Meters(**self._native.meters())

    def memory(self) -> list[MemoryUse]:
        """The memory in use."""
        return [MemoryUse(*use) for use in self._native.memory()]

    @property
    def closed(self) -> bool:
        """Whether the model was closed."""
        return self._native.closed

    def close(self) -> None:
        """Cancels all answers, closes all sessions, and gives the memory back."""
        self._native.close()

    def __enter__(self) -> Model:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def __repr__(self) -> str:
        return f"<forebay.Model {self._name}{', closed' if self.closed else ''}>"

    def _chat(self, messages: Messages, options: ChatOptions) -> _native.Stream:
        fields: dict[str, Any] = {}
        fields["messages"] = [{"role": "user", "content": messages}] if isinstance(messages, str) else list(messages)
        if (think := options.get("think")) is not None:
            # Templates use either name.
            names = {"enable_thinking": think, "thinking": think}
            fields["chat_template_kwargs"] = {**names, **(options.get("chat_template_kwargs") or {})}
        if (logprobs := options.get("logprobs")) is not None:
            fields.update(logprobs=True, top_logprobs=logprobs)
        return self._native.chat(*_request(ChatOptions, options, fields))

    def _complete(self, prompt: Prompt | Sequence[Prompt], options: AnswerOptions) -> list[_native.Stream]:
        prompts: list[Any] = [part if isinstance(part, str) else list(map(index, part)) for part in _prompts(prompt)]
        if len({type(part) for part in prompts}) > 1:
            # A request has texts or tokens.
            encode = self.tokenizer.encode
            prompts = [encode(part, special=True) if isinstance(part, str) else part for part in prompts]
        return self._native.complete(*_request(AnswerOptions, options, {"prompt": prompts}))


def plan(model: Path | None = None, **options: Unpack[LoadOptions]) -> Plan:
    """How memory would be divided, before a model is loaded.

    Of a model of the hub that is not here, only the header is downloaded.

    >>> import forebay as fb
    >>> plan = fb.plan(memory="1G")
    >>> plan.streams, plan.least_memory < plan.memory_for_all < 1 << 30
    (False, True)
    """
    fields, least, everything = _native.plan(path_of(model), load_arguments(options))
    return plan_of(fields, least, everything)


_open_models: weakref.WeakSet[Model] = weakref.WeakSet()


@atexit.register
def _close_models() -> None:
    """Ends the threads that compute while there still is an interpreter."""
    for model in list(_open_models):
        model.close()


def warn(note: str) -> None:
    warnings.warn(note, RuntimeWarning, stacklevel=3)


def path_of(model: Path | None) -> str | None:
    return None if model is None else os.fspath(model)


def load_arguments(options: LoadOptions) -> LoadOptions:
    if unknown := options.keys() - _LOAD_DEFAULTS.keys():
        raise TypeError(f"there is no option {min(unknown)!r}; see forebay.LoadOptions")
    return {**_LOAD_DEFAULTS, **options}


def _is_several(prompt: Prompt | Sequence[Prompt]) -> bool:
    """Whether it is a list of prompts."""
    return not isinstance(prompt, str) and any(not hasattr(part, "__index__") for part in prompt)


def _prompts(prompt: Prompt | Sequence[Prompt]) -> Sequence[Prompt]:
    return cast(Sequence[Prompt], prompt if _is_several(prompt) else [prompt])


def _request(kind: type, options: Mapping[str, Any], fields: Mapping[str, Any]) -> tuple[str, str | None]:
    """The body of a request with these options, some of which are replaced by fields; and the grammar of the answer."""
    if unknown := options.keys() - kind.__annotations__.keys():
        raise TypeError(f"there is no option {min(unknown)!r}; see forebay.{kind.__name__}")
    body = {name: value for name, value in options.items() if value is not None}
    grammar, schema = body.pop("grammar", None), body.pop("schema", None)
    body.pop("think", None)
    if schema is not None:
        if grammar is not None:
            raise RequestError("an answer has a schema or a grammar: leave out one of them", "grammar")
        body["json_schema"] = schema.model_json_schema() if hasattr(schema, "model_json_schema") else schema
    return json_of({**body, **fields}), grammar


def _objects(answers: _native.OpenAi) -> Iterator[dict[str, Any]]:
    while (text := answers.next()) is not None:
        yield json.loads(text)
