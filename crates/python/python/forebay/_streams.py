"""Answers in progress."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from functools import partial
from types import TracebackType
from typing import Any

from forebay import _native
from forebay._answers import Answer, Piece, answer_of, piece_of
from forebay._errors import Cancelled


def _told(event: tuple[Any, ...]) -> Piece | Answer | None:
    """What an event of the compiled module means: a piece, the whole answer at its end, and None after that."""
    match event:
        case ("end", fields):
            return answer_of(fields)
        case ("closed",):
            return None
        case _:
            return piece_of(event)


class Stream:
    """An answer in progress: an iterator over its pieces.

    The answer is cancelled when the stream is closed, when the with statement ends, or when nobody refers to the stream any
    more, as after a break.

    >>> import forebay
    >>> llm = forebay.Model()
    >>> for piece in llm.chat("Tell me a story about a cat.", stream=True, temperature=0):
    ...     print(piece, end="|")
    ...     if "girl" in str(piece):
    ...         break
    One| day|,| a| little| girl|
    """

    def __init__(self, native: _native.Stream) -> None:
        self._native = native
        self._answer: Answer | None = None

    @property
    def answer(self) -> Answer | None:
        """The whole answer, after its last piece."""
        return self._answer

    @property
    def progress(self) -> tuple[float, int] | None:
        """How many tokens of the prompt are processed, and how many there are to process; None before that begins.

        Another thread may read it while this one waits for the first piece.
        """
        return self._native.progress

    def whole(self) -> Answer:
        """Waits for the end of the answer, and returns the whole answer."""
        for _ in self:
            pass
        if self._answer is None:
            raise Cancelled("the answer was cancelled")
        return self._answer

    def close(self) -> None:
        """Cancels the answer, unless it has ended. Any thread may call this."""
        self._native.close()

    def __iter__(self) -> Stream:
        return self

    def __next__(self) -> Piece:
        match _told(self._native.next()):
            case Piece() as piece:
                return piece
            case Answer() as answer:
                self._answer = answer
        raise StopIteration

    def __enter__(self) -> Stream:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()


class AsyncStream:
    """An answer in progress: an asynchronous iterator over its pieces.

    The request is sent with the first piece that is waited for. The answer is cancelled when the stream is closed, when the
    async with statement ends, or when nobody refers to the stream any more, as after a break.

    >>> import asyncio, forebay
    >>> async def story(llm):
    ...     async for piece in llm.achat("Tell me a story about a cat.", stream=True, temperature=0, max_tokens=4):
    ...         print(piece, end="|")
    >>> asyncio.run(story(forebay.Model()))
    One| day|,| a|
    """

    def __init__(self, ask: Callable[[], _native.Stream]) -> None:
        self._ask: Callable[[], _native.Stream] | None = ask
        self._native: _native.Stream | None = None
        self._ready = asyncio.Event()
        self._answer: Answer | None = None

    @property
    def answer(self) -> Answer | None:
        """The whole answer, after its last piece."""
        return self._answer

    @property
    def progress(self) -> tuple[float, int] | None:
        """How many tokens of the prompt are processed, and how many there are to process; None before that begins."""
        return self._native and self._native.progress

    async def whole(self) -> Answer:
        """Waits for the end of the answer, and returns the whole answer."""
        try:
            async for _ in self:
                pass
        finally:
            # The caller's task may have been cancelled, and keep a reference to this.
            self.close()
        if self._answer is None:
            raise Cancelled("the answer was cancelled")
        return self._answer

    def close(self) -> None:
        """Cancels the answer, unless it has ended. Any thread may call this."""
        self._ask = None
        if self._native is not None:
            self._native.close()

    async def aclose(self) -> None:
        """The same as close, for contextlib.aclosing."""
        self.close()

    def __aiter__(self) -> AsyncStream:
        return self

    async def __anext__(self) -> Piece:
        match _told(await self._event()):
            case Piece() as piece:
                return piece
            case Answer() as answer:
                self._answer = answer
        raise StopAsyncIteration

    async def _event(self) -> tuple[Any, ...]:
        if self._native is None:
            if (ask := self._ask) is None:
                return ("closed",)
            self._ask = None
            # A long prompt takes a while to encode.
            self._native = await asyncio.to_thread(ask)
            self._native.wake(partial(asyncio.get_running_loop().call_soon_threadsafe, self._ready.set))
        while True:
            self._ready.clear()
            if (event := self._native.poll()) is not None:
                return event
            await self._ready.wait()

    async def __aenter__(self) -> AsyncStream:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()
