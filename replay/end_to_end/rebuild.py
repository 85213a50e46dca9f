"""From a recording back to the model that was recorded."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch

from attention_replay import Error
from capture.dataset import CaptureRecord
from capture.models_package import import_models


class NotRebuildable(Error):
    """The recording does not say how to build its model: one sentence that names the remedy."""


def load_arguments(capture: CaptureRecord, device: str) -> dict[str, Any]:
    """The arguments of `models.load` that build a recording's model again, on a device.

    A user's function may take no device: it is told one only where that is not the usual one.

    Raises:
        NotRebuildable: `capture` did not build that model, or was of an older version.
    """
    settings = capture.settings
    if "model" not in settings:
        raise NotRebuildable(
            f"{capture.model} was recorded in a script of yours, where only the script can run it: "
            "measure there with `with use_kernel(…)`, or give capture a function that builds it "
            "(--model FILE.py:FUNCTION)"
        )
    if "given" not in settings:
        raise NotRebuildable(
            f"the recording of {capture.model} does not say how its model was built, as those of "
            "this version do: capture it again"
        )
    model, given = settings["model"], settings["given"]
    usual = "cuda" if torch.cuda.is_available() else "cpu"
    if model in import_models().NAMES:
        resolved = ("size", "weights", "checkpoint", "steps", "seed", "dtype")
        given = {**given, **{name: settings[name] for name in resolved}, "device": device}
    elif Path(model).is_dir() or device.partition(":")[0] != usual:
        given = {**given, "device": device}
    return {"seed": settings.get("seed", 0), **given, "model": model}
