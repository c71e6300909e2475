"""An HTTP/1.1 client that can also misbehave. It records every request in a ledger, which is compared with /metrics."""

import asyncio
import collections
import json
import socket

ROUTES = (
    "/v1/chat/completions", "/v1/completions", "/v1/responses", "/v1/messages", "/v1/messages/count_tokens", "/v1/models",
    "/tokenize", "/detokenize", "/apply-template", "/health", "/ready", "/metrics", "/props", "/openapi.json",
)


class Ledger:
    """The requests and their statuses, by route."""

    def __init__(self):
        self.answered = collections.Counter()
        # Requests whose clients left before they knew the status: the server may have counted them or not.
        self.unknown = collections.Counter()


class Broken(Exception):
    """The server closed the connection, or said something that is not HTTP."""


class Exchange:
    """A request and its response. As a context it closes the connection at the end."""

    def __init__(self, wire, route):
        self.wire, self.route = wire, route
        self.reader = self.writer = None
        self.status, self.headers = None, {}

    async def __aenter__(self):
        return self

    async def __aexit__(self, *_):
        self.leave()

    def leave(self, abruptly=False):
        """Closes the connection, at once and without a word if `abruptly`."""
        if self.writer is None:
            return
        if self.status is None and self.route:
            self.wire.ledger.unknown[self.route] += 1
        if abruptly:
            self.writer.transport.abort()
        else:
            self.writer.close()
        self.writer = None

    async def head(self):
        """Waits for the status and the headers."""
        try:
            text = await self.reader.readuntil(b"\r\n\r\n")
            first, *lines = text.decode("latin-1").split("\r\n")
            self.status = int(first.split()[1])
        except (asyncio.IncompleteReadError, OSError, ValueError, IndexError) as error:
            raise Broken(f"no response: {error!r}") from error
        self.headers = {name.lower(): value.strip() for name, _, value in (line.partition(":") for line in lines if line)}
        if self.route:
            self.wire.ledger.answered[self.route, self.status] += 1
        return self.status

    async def pieces(self, size=65536):
        """The body as it comes."""
        try:
            if self.headers.get("transfer-encoding") == "chunked":
                while length := int(await self.reader.readline(), 16):
                    yield await self.reader.readexactly(length)
                    await self.reader.readexactly(2)
            else:
                rest = int(self.headers.get("content-length", 0))
                while rest:
                    piece = await self.reader.read(min(rest, size))
                    if not piece:
                        raise Broken(f"the body ended {rest} bytes early")
                    rest -= len(piece)
                    yield piece
        except (asyncio.IncompleteReadError, OSError, ValueError) as error:
            raise Broken(f"the body broke off: {error!r}") from error

    async def body(self):
        return b"".join([piece async for piece in self.pieces()])

    async def events(self):
        """Server-sent events as objects; the end mark is `None`. Comments are passed over."""
        rest = b""
        async for piece in self.pieces():
            rest += piece
            *whole, rest = rest.split(b"\n\n")
            for event in whole:
                data = b"".join(line[5:].strip() for line in event.split(b"\n") if line.startswith(b"data:"))
                if data:
                    yield None if data == b"[DONE]" else json.loads(data)


class Wire:
    """Connections to one server."""

    def __init__(self, port):
        self.port = port
        self.ledger = Ledger()

    async def connect(self, source="127.0.0.1", receive_buffer=None):
        """A connection from some loopback address."""
        sock = socket.socket()
        sock.setblocking(False)
        if receive_buffer:
            sock.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, receive_buffer)
        try:
            sock.bind((source, 0))
            await asyncio.get_running_loop().sock_connect(sock, ("127.0.0.1", self.port))
            # A small limit makes a reader that stops reading stop the sender.
            return await asyncio.open_connection(sock=sock, limit=receive_buffer or 1 << 20)
        except OSError as error:
            sock.close()
            raise Broken(f"no connection: {error}") from error

    async def send(self, method, path, body=b"", source="127.0.0.1", receive_buffer=None, trickle=None):
        """Sends a request; `trickle` returns the seconds to wait between pieces of the body."""
        route = path if path in ROUTES else "/v1/models/{*id}" if path.startswith("/v1/models/") else "other"
        exchange = Exchange(self, route)
        exchange.reader, exchange.writer = await self.connect(source, receive_buffer)
        head = (
            f"{method} {path} HTTP/1.1\r\nHost: 127.0.0.1:{self.port}\r\nContent-Type: application/json\r\n"
            f"Content-Length: {len(body)}\r\nConnection: close\r\n\r\n"
        )
        try:
            exchange.writer.write(head.encode())
            if trickle:
                step = max(1, len(body) // 8)
                for start in range(0, len(body), step):
                    await asyncio.sleep(trickle())
                    exchange.writer.write(body[start : start + step])
                    await exchange.writer.drain()
            else:
                exchange.writer.write(body)
                await exchange.writer.drain()
        except OSError:
            pass  # The server may answer before it has read everything. Its answer counts.
        except asyncio.CancelledError:
            exchange.leave()
            raise
        return exchange

    async def get(self, path, **how):
        """Status and body of a GET."""
        async with await self.send("GET", path, **how) as exchange:
            status = await exchange.head()
            return status, (await exchange.body()).decode()

    async def post(self, path, body, **how):
        """Status and body of a POST of JSON."""
        async with await self.send("POST", path, json.dumps(body).encode(), **how) as exchange:
            status = await exchange.head()
            return status, (await exchange.body()).decode()
