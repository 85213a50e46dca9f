"""Builds the manifest's description of a run: settings, versions and weights."""

from __future__ import annotations

import json
import platform
import sys
from typing import Any

import torch

from capture.errors import CaptureError
from capture.hooks.attributes import attribute
from capture.storage.capture_record import CaptureRecord
from capture.storage.json_data import parsed, typed


def versions() -> dict[str, str]:
    """Return the versions of Python, torch, CUDA and the imported model libraries."""
    found = {"python": platform.python_version(), "torch": torch.__version__}
    if torch.version.cuda:
        found["cuda"] = torch.version.cuda
    for package in ("diffusers", "transformers"):
        if package in sys.modules:
            found[package] = getattr(sys.modules[package], "__version__", "unknown")
    return found


def name_of_weights(module: Any) -> str:
    """Return a model's `name_or_path` as a description of its weights, or `not stated`."""
    config = attribute(module, "config")
    path = attribute(module, "name_or_path") or attribute(config, "_name_or_path")
    # A model with random weights, built from a checkpoint's config, has the same `name_or_path`.
    return f"{path} (its name_or_path)" if path else "not stated"


def plain_settings(settings: dict[str, Any]) -> dict[str, Any]:
    """Return the settings after converting them to JSON and back."""
    try:
        plain: dict[str, Any] = json.loads(json.dumps(settings, allow_nan=False))
    except (TypeError, ValueError, RecursionError) as error:
        raise CaptureError(f"`settings=` cannot be written as JSON: {error}") from error
    return plain


def checked(capture: CaptureRecord, seed: int | None, rank: int | None) -> CaptureRecord:
    """Check a capture's record, and return the record that a reader will get."""
    try:
        typed(int | None, seed, "`seed=`")
        typed(int | None, rank, "`rank=`")
        typed(str, capture.model, "`name=`")
        typed(str, capture.weights, "`weights=`")
        return CaptureRecord.from_json(parsed(json.dumps(capture.to_json())))
    except (TypeError, ValueError) as error:
        raise CaptureError(f"the recording cannot be described: {error}") from error
