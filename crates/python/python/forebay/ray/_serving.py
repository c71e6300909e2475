"""A Ray Serve application: one address, and replicas of a model behind it, at most one on each machine."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from typing import Any

from ray import serve
from ray.exceptions import RayActorError
from ray.serve.config import RequestRouterConfig
from ray.serve.handle import DeploymentHandle, DeploymentResponseGenerator

import forebay
from forebay._asgi import Headers, Receive, Scope, Send, live, target_of
from forebay.ray._routing import PrefixRouter, prefixes
from forebay.ray._settings import model_path, split, value_of

REPLICA = b"x-forebay-replica"
"""The header that says which replica has answered."""

MAX_BODY = 16 << 20
QUEUE = 64
PARALLEL = 32

TRIES = 3
"""How many replicas may be lost before a request is given up that has had no answer yet."""


def app(arguments: dict[str, Any]) -> serve.Application:
    """The application, for `serve run forebay.ray:app model=… replicas=4` and for Serve's configuration files.

    The arguments are the model (without one it is the demo model), the number of replicas, a custom resource of which each
    replica takes 1, and all options of forebay.LoadOptions and forebay.ServerOptions.
    """
    options = {name: value_of(value) for name, value in arguments.items()}
    model, replicas = options.pop("model", None), options.pop("replicas", 1)
    resource = options.pop("resource", None)
    load, server = split(options)
    max_body = server.setdefault("max_body", MAX_BODY)
    if not isinstance(max_body, int):
        raise ValueError(f"max_body={max_body}: write it as a number of bytes")
    # Ray sends a replica no more than it accepts.
    places = load.setdefault("parallel", PARALLEL) + server.setdefault("queue", QUEUE)
    engines = Engine.options(  # type: ignore[attr-defined]
        num_replicas=replicas,
        max_ongoing_requests=places,
        ray_actor_options={"resources": {resource: 1}} if resource else {},
    )
    return Ingress.options(max_ongoing_requests=max(100, replicas * places)).bind(  # type: ignore[attr-defined]
        engines.bind(model_path(model), load, server), max_body
    )


@serve.deployment(
    # An engine uses all CPUs of its machine, and its memory.
    max_replicas_per_node=1,
    request_router_config=RequestRouterConfig(request_router_class=PrefixRouter),
    graceful_shutdown_timeout_s=60,
)
class Engine:
    """A replica: a model with its server."""

    def __init__(self, model: str | None, load: forebay.LoadOptions, server: forebay.ServerOptions) -> None:
        self._llm = forebay.Model(model, progress=False, **load)
        self._server = self._llm.asgi(**server)
        self._replica = serve.get_replica_context().replica_id.unique_id.encode()

    async def __call__(
        self,
        method: str,
        target: str,
        headers: Headers,
        body: bytes,
        *,
        peer: tuple[str, int] | None,
        prefixes: list[bytes],
    ) -> AsyncIterator[Any]:
        """Answers a request: first the status with the headers, then pieces of the body. The prefixes are for the router."""
        parts = self._server.stream(method, target, body, headers, peer=peer, trusted=False)
        try:
            status, sent = await anext(parts)
            yield status, [*sent, (REPLICA, self._replica)]
            async for part in parts:
                yield part
        finally:
            # The client may have left.
            await parts.aclose()  # type: ignore[attr-defined]

    async def check_health(self) -> None:
        """Ray replaces a replica that cannot answer any more, for example after the loss of its GPU."""
        ready = await self._server.request("GET", "/ready")
        if ready.status != 200:
            raise RuntimeError(ready.body.decode(errors="replace"))


@serve.deployment(ray_actor_options={"num_cpus": 0})
@serve.ingress()
class Ingress:
    """Takes requests from Ray's proxies, and passes them on to the replicas."""

    def __init__(self, engines: DeploymentHandle, max_body: int) -> None:
        self._engines = engines.options(stream=True)
        self._max_body = max_body

    def __serve_build_asgi_app__(self) -> Any:
        # Ray takes a bound method for an application of ASGI 2.
        async def answer(scope: Scope, receive: Receive, send: Send) -> None:
            await self._receive(scope, receive, send)

        return answer

    async def _receive(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "lifespan":
            return await live(receive, send)
        if scope["type"] != "http":
            raise ValueError(f"an application for HTTP cannot answer the ASGI scope {scope['type']!r}")
        body = await self._body(receive)
        if body is None:
            return
        peer = scope.get("client")
        request = (scope["method"], target_of(scope), [(bytes(name), bytes(value)) for name, value in scope["headers"]], body)
        names = prefixes(body)
        for tries in range(1, TRIES + 1):
            parts = self._engines.remote(*request, peer=tuple(peer) if peer else None, prefixes=names)
            has_begun = asyncio.Event()
            try:
                return await self._pass_on(parts, send, has_begun)
            except RayActorError:
                # The replica is gone. Another one can answer as long as the client has had nothing.
                if has_begun.is_set() or tries == TRIES:
                    raise

    async def _body(self, receive: Receive) -> bytes | None:
        """The body of a request, but not much more than is accepted: the replica says what is too large. None if the client
        leaves."""
        body = bytearray()
        while len(body) <= self._max_body:
            message = await receive()
            if message["type"] != "http.request":
                return None
            body += message.get("body", b"")
            if not message.get("more_body", False):
                break
        return bytes(body)

    async def _pass_on(
        self, parts: DeploymentResponseGenerator[Any], send: Send, has_begun: asyncio.Event
    ) -> None:
        try:
            async for part in parts:
                if has_begun.is_set():
                    await send({"type": "http.response.body", "body": part, "more_body": True})
                else:
                    status, headers = part
                    has_begun.set()
                    await send({"type": "http.response.start", "status": status, "headers": headers})
            await send({"type": "http.response.body", "body": b""})
        finally:
            # Ray cancels this task when the client leaves.
            parts.cancel()
