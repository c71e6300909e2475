"""Sends a conversation to the replica that holds its beginning, so that only what is new has to be computed."""

from __future__ import annotations

import json
import random
from collections import OrderedDict
from collections.abc import Sequence
from hashlib import blake2b
from typing import Any

from ray.serve.request_router import PendingRequest, ReplicaID, RequestRouter, RunningReplica

BLOCK = 512
"""Characters of a text that are compared at once."""

MOST_PREFIXES = 200_000
"""How many beginnings a router remembers."""


def prefixes(body: bytes) -> list[bytes]:
    """Names of the beginnings of a conversation, the longest first.

    Two requests share a name if their conversations begin alike. Instructions alone are no beginning: all conversations of a
    program may have the same. This only looks for what is alike; what a request means is the replica's affair.

    >>> first = prefixes(b'{"messages": [{"role": "user", "content": "Hello"}]}')
    >>> turns = b'{"content": "Hello", "role": "user"}, {"role": "assistant", "content": "Hi"}'
    >>> second = prefixes(b'{"stream": true, "messages": [' + turns + b"]}")
    >>> len(second), first[0] == second[-1]
    (2, True)
    """
    try:
        fields = json.loads(body)
    except ValueError:
        return []
    if not isinstance(fields, dict):
        return []
    names = []
    hasher = blake2b(_bytes([fields.get(name) for name in ("system", "instructions", "tools")]), digest_size=16)
    for part in _parts(fields):
        hasher.update(_bytes(part))
        if not (isinstance(part, dict) and part.get("role") in ("system", "developer")):
            names.append(hasher.digest())
    return names[::-1]


def _parts(fields: dict[str, Any]) -> Sequence[Any]:
    """The messages of a conversation, or the pieces of a text."""
    parts: Any = next((fields[name] for name in ("messages", "input", "prompt") if fields.get(name)), [])
    if isinstance(parts, str):
        return [parts[at : at + BLOCK] for at in range(0, len(parts), BLOCK)]
    return parts if isinstance(parts, list) else []


def _bytes(value: Any) -> bytes:
    return json.dumps(value, sort_keys=True).encode()


class PrefixRouter(RequestRouter):
    """Chooses the replica that has answered the longest beginning of a conversation.

    A new conversation goes to the less busy one of two random replicas, and so does one whose replica has left, has no room,
    or is much busier than another one.
    """

    def initialize_state(self, ahead: int = 16) -> None:
        """How many more requests than the least busy replica the conversation's own one may have."""
        self._ahead = ahead
        self._homes: OrderedDict[bytes, ReplicaID] = OrderedDict()

    async def choose_replicas(
        self, candidate_replicas: list[RunningReplica], pending_request: PendingRequest | None = None
    ) -> list[list[RunningReplica]]:
        """Ranks of replicas, the best first."""
        two = random.sample(candidate_replicas, min(2, len(candidate_replicas)))
        if pending_request is None:
            return [two]
        # If no replica has room, Ray waits before it asks again.
        pending_request.routing_context.should_backoff = True
        home = self._home(candidate_replicas, pending_request.kwargs.get("prefixes", ()))
        return [two] if home is None else [[home], two]

    def on_request_routed(self, pending_request: PendingRequest, replica_id: ReplicaID, result: Any) -> None:
        """Remembers which replica holds the conversation from now on."""
        for prefix in pending_request.kwargs.get("prefixes", ()):
            self._homes[prefix] = replica_id
            self._homes.move_to_end(prefix)
        while len(self._homes) > MOST_PREFIXES:
            self._homes.popitem(last=False)

    def _home(self, candidates: list[RunningReplica], names: Sequence[bytes]) -> RunningReplica | None:
        present = {replica.replica_id: replica for replica in candidates}
        home = next((home for name in names if (home := self._homes.get(name)) in present), None)
        if home is None:
            return None
        # What is not known is probably idle.
        lengths = {replica: self.replica_queue_len_cache.get(replica) or 0 for replica in present}
        return present[home] if lengths[home] - min(lengths.values()) <= self._ahead else None
