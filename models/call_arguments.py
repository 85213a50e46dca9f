"""Reads arguments of a pipeline or of ``generate`` from text such as ``height=256``."""

from __future__ import annotations

import contextlib
import difflib
import inspect
import json
import types
import typing
from collections.abc import Callable, Collection, Mapping
from typing import Any

from .errors import ModelError

_OPTIONS = {
    "prompt": "--prompt",
    "num_inference_steps": "--steps",
    "max_new_tokens": "--steps",
    "min_new_tokens": "--steps",
    "generator": "--seed",
}
"""Arguments that have an option of their own."""
_PLAIN = (type(None), bool, int, float, str, list, tuple, dict)
"""Types that can be written as text."""


def for_call(given: Mapping[str, str], call: Callable[..., Any], model: str) -> dict[str, Any]:
    """Return arguments for ``call``, converted to the types that its signature declares.

    Args:
        given: Text of each argument, by name.
        model: Name of the model, for messages.

    Raises:
        ModelError: An argument is unknown, or its text has another type.
    """
    parameters = inspect.signature(call).parameters
    hints: dict[str, Any] = {}
    with contextlib.suppress(Exception):  # annotations may name types that are not imported
        hints = typing.get_type_hints(call)
    _check_names(given, parameters, model)
    return {
        name: _value(name, text, _types(hints.get(name, Any), parameters[name].default))
        for name, text in given.items()
    }


def for_generate(given: Mapping[str, str], model: str) -> dict[str, Any]:
    """Return arguments for transformers' ``generate``: fields of its configuration.

    Raises:
        ModelError: An argument is unknown, or its text has another type.
    """
    from transformers import GenerationConfig

    defaults = {k: v for k, v in vars(GenerationConfig()).items() if not k.startswith("_")}
    _check_names(given, defaults, model)
    return {name: _value(name, text, _types(Any, defaults[name])) for name, text in given.items()}


def refuse(given: Mapping[str, str], model: str) -> None:
    """Raise ModelError if there are arguments for a model that takes none."""
    if given:
        raise ModelError(
            f"--set has no effect on {model}: only pipelines and models that generate text take "
            "arguments"
        )


def _check_names(given: Mapping[str, str], known: Collection[str], model: str) -> None:
    for name in given:
        if option := _OPTIONS.get(name):
            raise ModelError(f"use {option} instead of --set {name}")
        if name not in known:
            near = difflib.get_close_matches(name, known, n=1)
            hint = f": did you mean {near[0]}?" if near else f": leave out --set {name}"
            raise ModelError(f"{model} takes no argument {name}{hint}")


def _types(hint: Any, default: Any) -> set[Any]:
    """Return the types that a parameter accepts; empty for any type."""
    if hint is Any:
        is_known = default is not None and default is not inspect.Parameter.empty
        return {type(default)} if is_known else set()
    if typing.get_origin(hint) in (typing.Union, types.UnionType):
        return set().union(*(_types(each, None) for each in typing.get_args(hint)))
    return {typing.get_origin(hint) or hint}


def _value(name: str, text: str, kinds: set[Any]) -> Any:
    value: Any = text
    with contextlib.suppress(ValueError):
        value = json.loads(text.lower() if text in ("True", "False") else text)
    if kinds and not kinds & {*_PLAIN[1:]}:
        raise ModelError(f"{name} cannot be given as text: call the model in your own function")
    if not kinds or type(value) in kinds:
        return value
    if type(value) is int and float in kinds:
        return float(value)
    if type(value) is list and tuple in kinds:
        return tuple(value)
    if str in kinds:
        return text
    names = {bool: "true or false", type(None): "null"}
    allowed = [names.get(kind, kind.__name__) for kind in _PLAIN[::-1] if kind in kinds]
    raise ModelError(f"--set {name}={text!r} must be {' or '.join(allowed)}")
