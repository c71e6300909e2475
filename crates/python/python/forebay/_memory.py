"""Where memory goes, and what the expert store counts."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True)
class Meters:
    """What the expert store has counted.

    >>> import forebay
    >>> llm = forebay.Model()
    >>> _ = llm.generate("Once upon a time", max_tokens=4)
    >>> llm.meters().hit_rate  # all experts of this small model are in memory
    1.0
    """

    hits: int
    """Requested experts that were in memory."""
    device_hits: int
    """Hits in the GPU's memory."""
    computed_in_memory: int
    """Hits in RAM that the CPU computed while a GPU computed the others."""
    misses: int
    """Requested experts that were not in memory."""
    bytes_used: int
    """Bytes of the requested experts."""
    bytes_read: int
    """Bytes of experts read from the drive."""
    bytes_uploaded: int
    """Bytes of experts uploaded to the GPU."""
    sent_ahead: int
    """Experts uploaded before a layer requested them."""
    sent_ahead_used: int
    """Those of them that were requested next."""
    prefetches: int
    """Experts read from the drive before a layer requested them."""
    prefetches_used: int
    """Those of them that were requested in time."""
    expert_seconds: float
    """Time from each request for experts to the end of computing with them."""
    read_seconds: float
    """Time in which at least one read was under way."""
    wait_seconds: float
    """Time in which the computation waited for reads."""
    copy_wait_seconds: float
    """Time in which the computation waited for uploads."""

    @property
    def hit_rate(self) -> float | None:
        """The share of requested experts that were in memory; None if none was requested."""
        requested = self.hits + self.misses
        return self.hits / requested if requested else None


@dataclass(frozen=True)
class MemoryUse:
    """Memory in use."""

    tier: str
    """ "computer" is RAM, "device" the memory of the GPU that computes."""
    purpose: str
    bytes: int


@dataclass(frozen=True)
class DevicePlan:
    """How the memory of the GPU is divided, in bytes."""

    budget: int
    total: int
    dense: int
    kv: int
    scratch: int
    slots: int
    """The number of expert slots."""
    slot_bytes: int


@dataclass(frozen=True)
class Plan:
    """How memory is divided, in bytes."""

    budget: int
    """What the process may use."""
    total: int
    """What it will use."""
    dense: int
    """The weights that every token uses."""
    kv: int
    """The KV cache of one conversation of as many tokens as memory is reserved for."""
    scratch: int
    """Buffers for the computation."""
    requests: int
    """Requests and grammars, where a GPU computes."""
    process: int
    """The rest of the process."""
    slots: int
    """The number of expert slots."""
    slot_bytes: int
    """All expert slots."""
    experts: int
    """The number of experts."""
    expert_bytes: int
    """What slots for all experts would take."""
    chunk: int
    """Tokens of a prompt that are computed together."""
    context: int
    """The most tokens of a conversation."""
    reserved: int
    """Tokens of a conversation that memory is reserved for."""
    streams: bool
    """Whether experts are read from the drive while the model computes."""
    device: DevicePlan | None
    """The memory of the GPU, if one computes."""
    least_memory: int | None = None
    """The smallest budget with which the model runs; None for a loaded model."""
    memory_for_all: int | None = None
    """The smallest budget with which no expert is read from the drive; None for a loaded model."""


def plan_of(fields: dict[str, Any], least_memory: int | None = None, memory_for_all: int | None = None) -> Plan:
    """From the compiled module's dictionary."""
    device = fields["device"] and DevicePlan(**fields["device"])
    return Plan(**{**fields, "device": device}, least_memory=least_memory, memory_for_all=memory_for_all)
