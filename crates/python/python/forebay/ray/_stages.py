"""A model that is split by layers over the machines of a cluster."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import ray

import forebay
from forebay.ray._settings import model_path

RESTART = 600.0
"""Seconds in which a stage that was lost must be loaded again."""


def staged(
    model: str | None = None,
    stages: int | Sequence[tuple[int, int]] = 2,
    *,
    resource: str | None = None,
    restart: float = RESTART,
    **options: Any,
) -> forebay.Model:
    """A model whose layers are in several processes. The last stage is in this one; each of the others is an actor of Ray.

    stages is their number, this one included: their weights take about the same memory. Or it is the layers of each actor, such as
    [(0, 20), (20, 40)]; this process has those after them. Each actor takes 1 of the custom resource, so that it gets a machine for
    itself. All machines have to find the model at the same path. Every stage gets the same options: those of forebay.LoadOptions.

    The result is used like any other model. Its actors end when it is closed. An actor that is lost is started again, within so
    many seconds, and the answers go on.
    """
    path = model_path(model)
    ranges = forebay.split_layers(path, stages=stages)[:-1] if isinstance(stages, int) else list(stages)
    actor = StageActor.options(resources={resource: 1} if resource else {})  # type: ignore[attr-defined]
    links = [ActorTransport(partial(actor.remote, path, layers, options), restart) for layers in ranges]
    # They load at the same time.
    for link in links:
        link.wait()
    return forebay.Model(path, stages=links, progress=False, **options)


@ray.remote
class StageActor:
    """Some layers of a model."""

    def __init__(self, model: str | None, layers: tuple[int, int], options: Any) -> None:
        self._stage = forebay.Stage(model, layers=layers, progress=False, **options)

    def layers(self) -> tuple[int, int]:
        """The layers that are loaded."""
        return self._stage.layers

    def handle(self, message: bytes) -> bytes:
        """Does what a message of the model asks for, and returns the reply."""
        return self._stage.handle(message)


class ActorTransport:
    """Carries messages to an actor, and starts another one in its place if it is lost."""

    def __init__(self, start: Callable[[], Any], restart: float) -> None:
        self._start, self._restart = start, restart
        self._actor = start()

    @property
    def actor(self) -> Any:
        """The actor that has the stage now."""
        return self._actor

    def wait(self, seconds: float | None = None) -> None:
        """Waits until the stage is loaded. Raises what was raised in loading it."""
        ray.get(self._actor.layers.remote(), timeout=seconds)

    def call(self, message: bytes) -> bytes:
        """Gives a message to the stage, and returns the reply."""
        reply: bytes = ray.get(self._actor.handle.remote(message))
        return reply

    def restart(self) -> None:
        """Loads the stage again, in another actor."""
        if not ray.is_initialized():
            # Otherwise the next call would start Ray.
            raise RuntimeError("this process has left the Ray cluster")
        # It may still run and hold its machine, without being reached.
        ray.kill(self._actor)
        self._actor = self._start()
        self.wait(self._restart)
