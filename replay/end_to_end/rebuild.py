"""Rebuild the model of a recording."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch

from attention_replay.errors import Error
from capture.models_package import import_models
from capture.storage.capture_record import CaptureRecord
from capture.storage.json_data import required, shown, typed


class NotRebuildable(Error):
    """Reason why a recording's model cannot be rebuilt; the message gives the remedy."""


class NotTrusted(Error):
    """Reason why code named by a recording may not run; the message names the code."""


def load_arguments(
    capture: CaptureRecord, device: str, *, trust_code: bool = False
) -> dict[str, Any]:
    """Return the arguments of `models.load` that rebuild a recording's model on a device.

    A user's function receives the device only if the device is not the default, because the
    function may have no such parameter.

    Args:
        trust_code: True if Python files that the recording names may run.

    Raises:
        NotRebuildable: `capture` did not build that model, or its files are gone.
        NotTrusted: building the model runs code named by the recording.
    """
    arguments = _arguments(capture, device)
    if gone := _gone(arguments):
        raise NotRebuildable(
            f"the recording of {capture.model} says that its model is built from {gone}, which "
            f"{missing(gone, 'capture')}, or capture the model again"
        )
    if not trust_code and (file := _code_of(arguments)):
        raise NotTrusted(
            f"the recording of {capture.model} names code that builds its model, {file}: read it, "
            "and allow it to run with --trust-code"
        )
    return arguments


def missing(path: str, command: str) -> str:
    """Return a clause about a missing path that a command stored, with the first remedies."""
    if Path(path).is_absolute():
        return "does not exist: put it there"
    here = f"does not exist in this directory: run this in the directory where `{command}` ran"
    return f"{here}, put it here"


def _gone(arguments: dict[str, Any]) -> str:
    """Return the missing file or directory of the model; empty if nothing is missing.

    A path that may be a name on the Hub does not count as missing.
    """
    model, checkpoint = str(arguments["model"]), str(arguments.get("checkpoint") or "")
    file = model.rpartition(":")[0]
    if file.endswith(".py"):
        return "" if Path(file).expanduser().is_file() else file
    if model not in import_models().NAMES:
        return "" if Path(model).is_dir() else model
    is_path = checkpoint.startswith(("/", "."))
    return checkpoint if is_path and not Path(checkpoint).is_dir() else ""


def _code_of(arguments: dict[str, Any]) -> str:
    """Return the Python code outside installed packages that runs when the model is built."""
    model = arguments["model"]
    if model.rpartition(":")[0].endswith(".py"):
        return str(model)
    for place in (model, arguments.get("checkpoint")):
        # diffusers imports a pipeline's own modules from its directory.
        if place is not None and Path(place).is_dir():
            for file in sorted(Path(place).rglob("*.py")):
                return str(file)
    return ""


def _arguments(capture: CaptureRecord, device: str) -> dict[str, Any]:
    settings = capture.settings
    if "model" not in settings:
        raise NotRebuildable(
            f"{capture.model} was recorded in your own script, and only that can run it: measure "
            "there with `with use_kernel(…)`, or give capture a function that builds it "
            "(--model FILE.py:FUNCTION)"
        )
    try:
        model, given = _checked(settings)
    except ValueError as error:
        raise NotRebuildable(
            f"the recording of {capture.model} is damaged ({error}): capture it again"
        ) from error
    default = "cuda" if torch.cuda.is_available() else "cpu"
    if model in import_models().NAMES:
        resolved = ("size", "weights", "checkpoint", "steps", "seed", "dtype")
        given = {**given, **{name: settings.get(name) for name in resolved}, "device": device}
    elif Path(model).is_dir() or device.partition(":")[0] != default:
        given = {**given, "device": device}
    return {"seed": settings.get("seed", 0), **given, "model": model}


def _checked(settings: dict[str, Any]) -> tuple[str, dict[str, Any]]:
    """Return the recorded model and the options that the user gave with it."""
    texts = ("size", "weights", "checkpoint", "dtype", "prompt")
    given = required(settings, "given", dict[str, Any])
    if unknown := sorted(given.keys() - {"prompt", "steps", "dtype", "arguments"}):
        raise ValueError(f"unknown option {shown(unknown[0])}")
    typed(dict[str, str], given.get("arguments", {}), "arguments")
    for each in (settings, given):
        for name in texts:
            typed(str | None, each.get(name), name)
        typed(int | None, each.get("steps"), "steps")
    typed(int, settings.get("seed", 0), "seed")
    return required(settings, "model", str), given
