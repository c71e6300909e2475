"""A model as an ASGI application."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable, Iterable, MutableMapping, Sequence
from functools import partial
from typing import Any, NamedTuple, TypeAlias, TypedDict
from urllib.parse import quote

from forebay import _native

Scope: TypeAlias = MutableMapping[str, Any]
Receive: TypeAlias = Callable[[], Awaitable[MutableMapping[str, Any]]]
Send: TypeAlias = Callable[[MutableMapping[str, Any]], Awaitable[None]]
Headers: TypeAlias = Sequence[tuple[bytes, bytes]]


class ServerOptions(TypedDict, total=False):
    """How an application answers. All options have defaults, which are those of `forebay serve`."""

    name: str
    """What the model is called in answers. By default Model.name."""
    queue: int
    """Requests that may wait in addition to those that are answered; more are refused. By default 64."""
    max_body: int | str
    """The most bytes of a request. By default 16M."""
    max_tokens: int | None
    """The most tokens of an answer, even if a request asks for more."""
    max_reasoning: int | None
    """The most tokens of reasoning, even if a request asks for more."""
    timeout: float | None
    """The most seconds from a request to the end of its answer."""
    keys: Sequence[str]
    """API keys, of which every request needs one. Without keys, everybody may send requests."""
    origins: Sequence[str]
    """Sites whose pages may send requests, such as "https://example.org", or "*" for all."""


SERVER_DEFAULTS: ServerOptions = {
    "queue": 64,
    "max_body": "16M",
    "max_tokens": None,
    "max_reasoning": None,
    "timeout": None,
    "keys": (),
    "origins": (),
}


class Response(NamedTuple):
    """A whole response."""

    status: int
    headers: Headers
    body: bytes


class Application:
    """A model as an ASGI application: the server that `forebay serve` runs, for a program that accepts the connections.

    It answers the APIs of OpenAI and Anthropic, and streams. An answer is cancelled when its client leaves. Model.asgi makes
    one, and any ASGI server runs it.

    A request of the program itself needs no connection and no key:

    >>> import asyncio, forebay
    >>> llm = forebay.Model()
    >>> app = llm.asgi()
    >>> body = b'{"prompt": "Once upon a time", "max_tokens": 4, "temperature": 0}'
    >>> response = asyncio.run(app.request("POST", "/v1/completions", body))
    >>> response.status, b'there was' in response.body
    (200, True)
    """

    def __init__(self, native: _native.Server) -> None:
        self._native = native

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        match scope["type"]:
            case "http":
                await self._answer(scope, receive, send)
            case "lifespan":
                await live(receive, send)
            case "websocket":
                await receive()
                await send({"type": "websocket.close", "code": 1003, "reason": "there are no web sockets here"})
            case other:
                raise ValueError(f"an application for HTTP cannot answer the ASGI scope {other!r}")

    async def request(self, method: str, target: str, body: bytes = b"", headers: Headers = ()) -> Response:
        """Answers a request of the program itself, which needs no key. The target is a path, perhaps with a query."""
        parts = self.stream(method, target, body, headers)
        status, sent = await anext(parts)
        return Response(status, sent, b"".join([part async for part in parts]))

    async def stream(
        self,
        method: str,
        target: str,
        body: bytes = b"",
        headers: Headers = (),
        *,
        peer: tuple[str, int] | None = None,
        trusted: bool = True,
    ) -> AsyncIterator[Any]:
        """Like request, in parts: first the status with the headers, then pieces of the body as they come.

        If it is not trusted, the request is that of a client at the address of a peer, and has to pass all checks. Closing the
        iterator cancels the request.
        """
        exchange = Exchange(self._native, method, target, headers, peer=peer, trusted=trusted)
        upload = asyncio.create_task(exchange.upload(body, more=False))
        try:
            async for kind, *part in exchange:
                match kind:
                    case "start":
                        yield tuple(part)
                    case "body":
                        yield part[0]
        finally:
            upload.cancel()
            exchange.close()

    async def _answer(self, scope: Scope, receive: Receive, send: Send) -> None:
        peer = scope.get("client")
        address = tuple(peer) if peer else None
        exchange = Exchange(
            self._native, scope["method"], target_of(scope), scope["headers"], peer=address, trusted=False
        )
        upload = asyncio.create_task(_upload(exchange, receive))
        try:
            async for kind, *part in exchange:
                match kind:
                    case "start":
                        status, headers = part
                        await send({"type": "http.response.start", "status": status, "headers": headers})
                    case "body":
                        await send({"type": "http.response.body", "body": part[0], "more_body": True})
                    case "end":
                        await send({"type": "http.response.body", "body": b""})
        except OSError:
            # Some servers say so that the client has left.
            pass
        finally:
            upload.cancel()
            exchange.close()


class Exchange:
    """A request, and the parts of its response."""

    def __init__(
        self,
        server: _native.Server,
        method: str,
        target: str,
        headers: Iterable[tuple[bytes, bytes]],
        *,
        peer: tuple[str, int] | None,
        trusted: bool,
    ) -> None:
        self._loop = asyncio.get_running_loop()
        self._changed = asyncio.Event()
        self._room = asyncio.Event()
        ready = partial(self._loop.call_soon_threadsafe, self._wake)
        self._native = server.request(method, target, list(headers), peer=peer, trusted=trusted, ready=ready)

    async def upload(self, data: bytes, more: bool) -> None:
        """Passes a piece of the request's body on, when there is room for it."""
        while True:
            self._room.clear()
            if self._native.feed(data, more):
                return
            await self._room.wait()

    async def __aiter__(self) -> AsyncIterator[tuple[Any, ...]]:
        while True:
            self._changed.clear()
            event = self._native.poll()
            if event is None:
                await self._changed.wait()
                continue
            yield event
            if event[0] in ("end", "closed"):
                return

    def close(self) -> None:
        """Cancels the request."""
        self._native.close()

    def _wake(self) -> None:
        self._changed.set()
        self._room.set()


async def _upload(exchange: Exchange, receive: Receive) -> None:
    """Passes the request's body on, and cancels the request when its client leaves."""
    while True:
        message = await receive()
        if message["type"] != "http.request":
            exchange.close()
            return
        await exchange.upload(message.get("body", b""), message.get("more_body", False))


async def live(receive: Receive, send: Send) -> None:
    """The model is loaded before its application is made, and whoever loaded it closes it."""
    while True:
        message = await receive()
        await send({"type": message["type"] + ".complete"})
        if message["type"] == "lifespan.shutdown":
            return


def target_of(scope: Scope) -> str:
    """The path of a request below the application's, with the query."""
    path: str = scope["path"]
    root: str = scope.get("root_path", "").rstrip("/")
    if root and path.startswith(root + "/"):
        path = path[len(root) :]
    # The path is decoded, and the application decodes it again.
    target = quote(path, safe="/:@!$&'()*+,;=~")
    query: bytes = scope.get("query_string", b"")
    return f"{target}?{query.decode('latin-1')}" if query else target
