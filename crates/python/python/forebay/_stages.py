"""Models that are split by layers over several machines."""

from __future__ import annotations

from types import TracebackType
from typing import Literal, Protocol, Unpack

from forebay import _native
from forebay._memory import Meters, Plan, plan_of
from forebay._model import LoadOptions, Path, load_arguments, path_of, warn
from forebay._progress import Progress, ProgressBar, no_progress


class Transport(Protocol):
    """Carries messages to a stage, wherever it runs.

    The other end gives each message to Stage.handle, which returns the reply. Both ends trust each other: messages are checked,
    but not authenticated. The methods are called on threads of the model, for one message at a time.

    If call raises an exception, the stage is lost: the model calls restart, computes again what the stage has forgotten, and the
    answer goes on. If restart raises one, the answer fails with its text. KeyboardInterrupt and SystemExit end the answer at once.
    """

    def call(self, message: bytes, /) -> bytes:
        """Gives a message to the stage, and returns the reply."""

    def restart(self) -> object:
        """Starts the stage again, with the same model, layers and options. Its conversations may be gone."""


class Stage:
    """Some layers of a model: from the first number to before the second one. The last layer cannot be among them.

    It holds and streams only the weights of these layers, and keeps only their part of each conversation. Model(stages=…) has the
    layers after those of the stages, and is used like any other model. All stages and the model need the same options exact and
    context; parallel, prefix_cache and chat_template have no effect here. Path, options and progress are as for Model.

    >>> import forebay as fb
    >>> class Here:
    ...     def __init__(self, layers):
    ...         self.layers = layers
    ...         self.restart()
    ...     def restart(self):
    ...         self.stage = fb.Stage(layers=self.layers)
    ...     def call(self, message):
    ...         return self.stage.handle(message)
    >>> fb.split_layers(stages=3)
    [(0, 3), (3, 6), (6, 8)]
    >>> with fb.Model(stages=[Here((0, 3)), Here((3, 6))]) as llm:
    ...     llm.generate("Once upon a time", max_tokens=7, temperature=0).text
    ', there was a little girl named'
    """

    def __init__(
        self,
        model: Path | None = None,
        *,
        layers: tuple[int, int],
        progress: Progress | Literal[False] | None = None,
        **options: Unpack[LoadOptions],
    ) -> None:
        arguments = load_arguments(options)
        first, end = layers
        with ProgressBar() as bar:
            show: Progress = bar if progress is None else no_progress if progress is False else progress
            self._name, path = _native.locate(path_of(model), lambda done, total: show("downloading", done, total))
            self._native = _native.Stage(
                path, (first, end), arguments, lambda done, total: show("loading", done, total), warn
            )

    def handle(self, message: bytes) -> bytes:
        """Does what a message of the model asks for, and returns the reply. Any thread may call it. Messages are handled one after
        the other."""
        return self._native.handle(message)

    @property
    def layers(self) -> tuple[int, int]:
        """The first layer, and the one after the last."""
        return self._native.layers

    @property
    def model_layers(self) -> int:
        """The number of layers of the model."""
        return self._native.model_layers

    @property
    def plan(self) -> Plan:
        """How memory is divided."""
        return plan_of(self._native.plan)

    def meters(self) -> Meters:
        """What the expert store has counted since the stage was loaded."""
        return Meters(**self._native.meters())

    @property
    def closed(self) -> bool:
        """Whether the stage was closed."""
        return self._native.closed

    def close(self) -> None:
        """Waits for the message that is being handled, and gives the memory back."""
        self._native.close()

    def __enter__(self) -> Stage:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def __repr__(self) -> str:
        if self.closed:
            return f"<forebay.Stage {self._name}, closed>"
        first, end = self.layers
        return f"<forebay.Stage {self._name}, layers {first} to {end - 1} of {self.model_layers}>"


def split_layers(model: Path | None = None, *, stages: int) -> list[tuple[int, int]]:
    """The layers of each of so many stages, whose weights take about the same memory. `forebay plan --stages` splits a model like
    this. Of a model of the hub that is not here, only the header is downloaded.

    >>> import forebay as fb
    >>> fb.split_layers(stages=2)
    [(0, 4), (4, 8)]
    """
    return _native.split(path_of(model), stages)
