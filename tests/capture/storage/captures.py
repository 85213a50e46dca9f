"""Helpers that write and read captures."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

from capture import load
from capture.call.attention_call import AttentionCall
from capture.storage.call_file import PackedCall
from capture.storage.capture_record import CaptureRecord
from capture.storage.dataset import Dataset
from capture.storage.journal import Journal
from capture.storage.names import MANIFEST
from capture.storage.target import CaptureTarget
from tests.factories import random_call


def write_dataset(directory: Path, *calls: AttentionCall) -> Dataset:
    """Write calls as files `MODEL-INDEX.safetensors`, without a recording, and open them."""
    directory.mkdir(parents=True, exist_ok=True)
    entries = [
        PackedCall.of(call).write(
            directory / f"{call.origin.model}-{call.origin.call_index}.safetensors"
        )
        for call in calls
    ]
    models = dict.fromkeys(call.origin.model for call in calls)
    captures = [CaptureRecord(model, "random") for model in models]
    Dataset(directory, entries, captures).save_manifest()
    return load(directory)


def edit_manifest(directory: Path, change: Callable[[Any], object]) -> None:
    """Change the data of a manifest in place."""
    path = directory / MANIFEST
    data = json.loads(path.read_text())
    change(data)
    path.write_text(json.dumps(data))


def alter(path: Path) -> None:
    """Change a bit of a file's last tensor."""
    content = bytearray(path.read_bytes())
    content[-7] ^= 1
    path.write_bytes(content)


def copies(cache: Path) -> list[str]:
    return sorted(path.name for path in cache.rglob("*.safetensors"))


def started(
    directory: Path, model: str, indices: range, *, overwrite: bool = False, began: str = ""
) -> tuple[CaptureTarget, Journal]:
    """Start a capture that contains these calls."""
    target = CaptureTarget.check(directory, model, overwrite=overwrite)
    journal = target.begin(CaptureRecord(model, "random", started=began))
    for index in indices:
        call = random_call(origin={"model": model, "call_index": index})
        path = directory / f"{journal.stem}-{index:06d}.safetensors"
        journal.append(sampled=index)
        journal.append(**PackedCall.of(call).write(path).to_json())
    return target, journal


def ended(model: str, *, complete: bool = True) -> CaptureRecord:
    return CaptureRecord(model, "random", complete=complete)


def calls(directory: Path) -> dict[str, list[int]]:
    found: dict[str, list[int]] = {}
    for entry in load(directory).entries:
        entry.check()
        found.setdefault(entry.origin.model, []).append(entry.origin.call_index)
    return found
