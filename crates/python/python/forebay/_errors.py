"""The exceptions of this package."""

from __future__ import annotations

__all__ = ["BudgetError", "Cancelled", "ContextError", "FileError", "ForebayError", "RequestError"]


class ForebayError(Exception):
    """The base of all exceptions of this package.

    The message says what happened, where, and what to do next.
    """

    __module__ = "forebay"


class BudgetError(ForebayError):
    """Memory does not suffice.

    >>> import forebay
    >>> try:
    ...     forebay.Model(memory="2M")
    ... except forebay.BudgetError as error:
    ...     print(error.need > error.have)
    True
    """

    __module__ = "forebay"

    need: int
    """Bytes needed."""
    have: int
    """Bytes available."""

    def __init__(self, message: str, need: int = 0, have: int = 0) -> None:
        super().__init__(message)
        self.need = need
        self.have = have


class ContextError(ForebayError, ValueError):
    """The tokens do not fit the context."""

    __module__ = "forebay"

    tokens: int
    """Tokens that the call needs."""
    limit: int
    """Tokens that fit."""

    def __init__(self, message: str, tokens: int = 0, limit: int = 0) -> None:
        super().__init__(message)
        self.tokens = tokens
        self.limit = limit


class FileError(ForebayError):
    """A file cannot be read or written, or is damaged.

    >>> import forebay
    >>> forebay.Model("/nowhere/model.gguf")
    Traceback (most recent call last):
    ...
    forebay.FileError: /nowhere/model.gguf: cannot open: No such file or directory (os error 2)
    """

    __module__ = "forebay"

    path: str
    """The file."""

    def __init__(self, message: str, path: str = "") -> None:
        super().__init__(message)
        self.path = path


class RequestError(ForebayError, ValueError):
    """An argument has a value that is not possible."""

    __module__ = "forebay"

    field: str | None
    """The argument, if the error is about one."""

    def __init__(self, message: str, field: str | None = None) -> None:
        super().__init__(message)
        self.field = field


class Cancelled(ForebayError):
    """The answer was cancelled, or its model was closed, before there was a result."""

    __module__ = "forebay"
