"""Rebuild the model of a recording."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch

from attention_replay import Error
from capture.capture_record import CaptureRecord
from capture.models_package import import_models


class NotRebuildable(Error):
    """The recording does not say how to build its model; the message names the remedy."""


def load_arguments(capture: CaptureRecord, device: str) -> dict[str, Any]:
    """Return the arguments of `models.load` that rebuild a recording's model on a device.

    A user's function may take no device, so it is given one only if that is not the default.

    Raises:
        NotRebuildable: `capture` did not build that model, or an older version did.
    """
    settings = capture.settings
    if "model" not in settings:
        raise NotRebuildable(
            f"{capture.model} was recorded in your own script, and only that can run it: measure "
            "there with `with use_kernel(…)`, or give capture a function that builds it "
            "(--model FILE.py:FUNCTION)"
        )
    if "given" not in settings:
        raise NotRebuildable(
            f"the recording of {capture.model} is of an older version and does not say how its "
            "model was built: capture it again"
        )
    model, given = settings["model"], settings["given"]
    default = "cuda" if torch.cuda.is_available() else "cpu"
    if model in import_models().NAMES:
        resolved = ("size", "weights", "checkpoint", "steps", "seed", "dtype")
        given = {**given, **{name: settings[name] for name in resolved}, "device": device}
    elif Path(model).is_dir() or device.partition(":")[0] != default:
        given = {**given, "device": device}
    return {"seed": settings.get("seed", 0), **given, "model": model}
