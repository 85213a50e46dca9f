"""The on-disk format: a directory of safetensors files with a JSON manifest.

    captured_inputs/
        manifest.json                    what was captured, the census, a checksum per file
        cogvideo-000012.safetensors      one self-contained call per file

A call's file contains its tensors and, as JSON under the key `attention-replay` of the safetensors
header, everything else (`Header`). Expanded dimensions are stored once, strides in the header.
Files are written under a temporary name and renamed; nothing is pickled. A directory without a
manifest is read from its files.
"""

from __future__ import annotations

import json
import os
from collections.abc import Iterator, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import overload

from capture.call import AttentionCall
from capture.call_file import FORMAT, FileEntry
from capture.capture_record import CaptureRecord
from capture.errors import DatasetError

_FIRST_FORMAT = "attention-replay/1"
"""Readable still: its checksums are of whole files."""
MANIFEST = "manifest.json"


class Dataset(Sequence[AttentionCall]):
    """The recorded calls of a directory, in the order they were made, model by model.

    Indexing and iterating load tensors to the CPU; `entries` gives everything else without loading.
    """

    def __init__(
        self,
        directory: Path,
        entries: list[FileEntry],
        captures: list[CaptureRecord],
        note: str = "",
    ) -> None:
        self.directory = directory
        self.entries = entries
        self.captures = captures
        self.note = note
        """A warning about how the directory was read; usually empty."""

    @classmethod
    def open(cls, directory: str | Path) -> Dataset:
        """Read a directory's manifest, or its files if it has none.

        Raises:
            DatasetError: the directory is missing, contains no recorded calls, or its manifest has
                another format.
        """
        directory = Path(directory)
        if not directory.is_dir():
            raise DatasetError(
                f"{directory}: no such directory; record into it with "
                f"`capture --model NAME --out {directory}`"
            )
        dataset = cls.open_or_new(directory)
        if not dataset.entries:
            raise DatasetError(
                f"{directory}: holds no recorded calls{dataset.note and f' ({dataset.note})'}; "
                f"record some with `capture --model NAME --out {directory}`"
            )
        return dataset

    @classmethod
    def open_or_new(cls, directory: Path) -> Dataset:
        """Like `open`, but accept a directory without recorded calls, for writing."""
        manifest = directory / MANIFEST
        if not manifest.is_file():
            missing = f"{manifest} is missing: read the files instead, without a census"
            return cls._rebuilt(directory, missing)
        try:
            data = json.loads(manifest.read_text())
            if data.get("format") not in (FORMAT, _FIRST_FORMAT):
                raise DatasetError(
                    f"{manifest}: format {data.get('format')!r}, but this version reads {FORMAT!r}"
                )
            entries = [FileEntry.from_json(directory, item) for item in data["files"]]
            captures = [CaptureRecord(**capture) for capture in data["captures"]]
        except (ValueError, KeyError, TypeError, AttributeError) as error:
            damaged = f"{manifest} is damaged ({error}): read the files instead, without a census"
            return cls._rebuilt(directory, damaged)
        return cls(directory, entries, captures)

    @classmethod
    def _rebuilt(cls, directory: Path, note: str) -> Dataset:
        entries, damaged = [], []
        for path in sorted(directory.glob("*.safetensors")):
            try:
                entries.append(FileEntry.read(path))
            except DatasetError as error:
                damaged.append(str(error))
        entries.sort(key=lambda entry: (entry.origin.model, entry.origin.call_index))
        models = {entry.origin.model: entry for entry in entries}
        captures = [
            CaptureRecord(
                model=model,
                weights=entry.origin.weights,
                device=entry.origin.device,
                versions=entry.origin.versions,
            )
            for model, entry in models.items()
        ]
        return cls(directory, entries, captures, "; ".join([note, *damaged] if models else damaged))

    @property
    def nbytes(self) -> int:
        return sum(entry.nbytes for entry in self.entries)

    def save_manifest(self) -> None:
        """Write the manifest atomically."""
        data = {
            "format": FORMAT,
            "captures": [asdict(capture) for capture in self.captures],
            "files": [entry.to_json() for entry in self.entries],
        }
        temporary = self.directory / f".{MANIFEST}.tmp"
        temporary.write_text(json.dumps(data, indent=1))
        os.replace(temporary, self.directory / MANIFEST)

    def __len__(self) -> int:
        return len(self.entries)

    @overload
    def __getitem__(self, index: int) -> AttentionCall: ...
    @overload
    def __getitem__(self, index: slice) -> list[AttentionCall]: ...
    def __getitem__(self, index: int | slice) -> AttentionCall | list[AttentionCall]:
        if isinstance(index, slice):
            return [entry.load() for entry in self.entries[index]]
        return self.entries[index].load()

    def __iter__(self) -> Iterator[AttentionCall]:
        return (entry.load() for entry in self.entries)


def load(directory: str | Path) -> Dataset:
    """Open a directory that `record` or the `capture` command wrote.

    Example:
        >>> for call in load("captured_inputs"):
        ...     print(call.origin.module, call.shape)

    Raises:
        DatasetError: the directory is missing or contains no recorded calls.
    """
    return Dataset.open(directory)
