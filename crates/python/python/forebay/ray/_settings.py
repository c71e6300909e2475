"""Options of a model and of its server, as command lines and the arguments of `serve run` give them."""

from __future__ import annotations

import json
import os
from collections.abc import Iterable, Mapping
from typing import Any

from forebay._asgi import ServerOptions
from forebay._model import LoadOptions


def value_of(text: Any) -> Any:
    """The value of an option: JSON such as 8, true or ["a"]; every other text is the value itself, such as 24G."""
    if not isinstance(text, str):
        return text
    try:
        return json.loads(text)
    except ValueError:
        return text


def pairs(texts: Iterable[str]) -> dict[str, Any]:
    """Options that are written NAME=VALUE."""
    options = {}
    for text in texts:
        name, equals, value = text.partition("=")
        if not equals:
            raise ValueError(f"{text!r} is not an option: write NAME=VALUE, such as memory=24G")
        options[name] = value_of(value)
    return options


def split(options: Mapping[str, Any]) -> tuple[dict[str, Any], dict[str, Any]]:
    """The options of the model, and those of its server."""
    load = {name: value for name, value in options.items() if name in LoadOptions.__annotations__}
    server = {name: value for name, value in options.items() if name in ServerOptions.__annotations__}
    if unknown := options.keys() - load.keys() - server.keys():
        raise ValueError(f"there is no option {min(unknown)!r}; see forebay.LoadOptions and forebay.ServerOptions")
    return load, server


def model_path(model: str | None) -> str | None:
    """Where every machine finds the model: a path here is made absolute, because workers run in other folders."""
    return os.path.abspath(model) if model is not None and os.path.exists(model) else model
