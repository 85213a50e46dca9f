"""Helpers that read captures and write the record of a finished capture."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

from capture import load
from capture.call.attention_call import AttentionCall
from capture.storage.call_file import PackedCall
from capture.storage.capture_record import CaptureRecord
from capture.storage.dataset import Dataset
from capture.storage.journal import Journal
from capture.storage.target import CaptureTarget

Started = Callable[..., tuple[CaptureTarget, Journal]]
"""Type of the fixture `started`."""


def write_dataset(directory: Path, *calls: AttentionCall) -> Dataset:
    """Write calls without a recording, as files `MODEL-INDEX.safetensors`, and open them."""
    directory.mkdir(parents=True, exist_ok=True)
    entries = [
        PackedCall.of(call).write(
            directory / f"{call.origin.model}-{call.origin.call_index}.safetensors"
        )
        for call in calls
    ]
    captures = [CaptureRecord(model, "random") for model in {e.origin.model for e in entries}]
    Dataset(directory, entries, captures).save_manifest()
    return load(directory)


def ended(model: str, *, complete: bool = True) -> CaptureRecord:
    return CaptureRecord(model, "random", complete=complete)


def calls(directory: Path) -> dict[str, list[int]]:
    found: dict[str, list[int]] = {}
    for entry in load(directory).entries:
        entry.check()
        found.setdefault(entry.origin.model, []).append(entry.origin.call_index)
    return found
