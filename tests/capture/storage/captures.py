"""Helpers that read captures and write the record of a finished capture."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

from capture import load
from capture.storage.capture_record import CaptureRecord
from capture.storage.journal import Journal
from capture.storage.target import CaptureTarget

Started = Callable[..., tuple[CaptureTarget, Journal]]
"""Type of the fixture `started`."""


def ended(model: str, *, complete: bool = True) -> CaptureRecord:
    return CaptureRecord(model, "random", complete=complete)


def calls(directory: Path) -> dict[str, list[int]]:
    found: dict[str, list[int]] = {}
    for entry in load(directory).entries:
        entry.check()
        found.setdefault(entry.origin.model, []).append(entry.origin.call_index)
    return found
