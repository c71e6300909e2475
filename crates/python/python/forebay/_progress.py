"""The progress of loading and downloading."""

from __future__ import annotations

import sys
from collections.abc import Callable
from types import TracebackType
from typing import Any

Progress = Callable[[str, int, int], object]
"""Called with what is done ("downloading" or "loading"), how many bytes are done, and how many there are."""


class ProgressBar:
    """Shows progress with tqdm, if that is installed and standard error is a terminal."""

    def __init__(self) -> None:
        self._doing = ""
        self._bar: Any = None
        self._tqdm: Any = None
        if sys.stderr is not None and sys.stderr.isatty():
            try:
                from tqdm import tqdm

                self._tqdm = tqdm
            except ImportError:
                pass

    def __call__(self, doing: str, done: int, total: int) -> None:
        """Shows that so many bytes are done."""
        if self._tqdm is None:
            return
        if doing != self._doing:
            self.close()
            self._doing = doing
            # What is quick needs no bar.
            self._bar = self._tqdm(
                desc=doing, total=total, initial=done, unit="B", unit_scale=True, unit_divisor=1024, leave=False, delay=0.5
            )
        self._bar.total = total
        self._bar.update(done - self._bar.n)

    def close(self) -> None:
        """Removes the bar."""
        if self._bar is not None:
            self._bar.close()
            self._bar = None

    def __enter__(self) -> ProgressBar:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()


def no_progress(doing: str, done: int, total: int) -> None:
    """Shows nothing."""
