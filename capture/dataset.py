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
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, overload

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from capture import checksums
from capture.call import AttentionCall, Origin
from capture.errors import DatasetError
from capture.header import Header, dtype_name
from capture.strides import pack, unpack
from capture.tensor_file import write_safetensors

FORMAT = "attention-replay/2"
_FIRST_FORMAT = "attention-replay/1"
"""Readable still: its checksums are of whole files."""
MANIFEST = "manifest.json"
_HEADER_KEY = "attention-replay"


@dataclass(frozen=True)
class PackedCall:
    """A call ready to be written: header and contiguous CPU tensors."""

    header: Header
    values: dict[str, Tensor]

    @classmethod
    def of(cls, call: AttentionCall) -> PackedCall:
        """Copy `call`'s tensors to the CPU, so that later changes do not affect the file."""
        packed = {name: pack(tensor) for name, tensor in call.tensors().items()}
        return cls(
            Header(
                origin=call.origin,
                is_causal=call.is_causal,
                scale=call.scale,
                enable_gqa=call.enable_gqa,
                dropout_p=call.dropout_p,
                dtypes={name: dtype_name(values.dtype) for name, (values, _) in packed.items()},
                layouts={name: layout for name, (_, layout) in packed.items()},
                mask_is_noop="attn_mask" in packed and _masks_nothing(packed["attn_mask"][0]),
            ),
            {name: values for name, (values, _) in packed.items()},
        )

    def write(self, path: Path) -> FileEntry:
        """Write the file atomically and return its manifest entry."""
        header = json.dumps(asdict(self.header))
        temporary = path.with_name(f".{path.name}.tmp")
        metadata = {_HEADER_KEY: header, "format": FORMAT}
        checksum = write_safetensors(temporary, self.values, metadata)
        nbytes = temporary.stat().st_size
        os.replace(temporary, path)
        return FileEntry(path, self.header, nbytes, checksum)


@dataclass(frozen=True)
class FileEntry:
    """One recorded call on disk; `load` reads its tensors."""

    path: Path
    header: Header
    nbytes: int
    checksum: str | None
    """From the manifest (`capture.checksums`); None if the manifest does not list the file."""

    @property
    def origin(self) -> Origin:
        return self.header.origin

    @classmethod
    def read(cls, path: Path) -> FileEntry:
        """Create the entry of a file that no manifest lists.

        Raises:
            DatasetError: the file is damaged or is not a recorded call.
        """
        with _open(path) as file:
            metadata = file.metadata() or {}
        if _HEADER_KEY not in metadata:
            raise DatasetError(f"{path}: not a call recorded by attention-replay")
        try:
            header = Header.from_json(json.loads(metadata[_HEADER_KEY]))
        except (ValueError, KeyError, TypeError, AttributeError) as error:
            raise DatasetError(f"{path}: its header is damaged ({error})") from error
        return cls(path, header, path.stat().st_size, None)

    def check(self) -> None:
        """Compare the file with its recorded size and checksum.

        Raises:
            DatasetError: the file is missing, truncated or altered.
        """
        if not self.path.is_file():
            raise DatasetError(f"{self.path}: missing")
        nbytes = self.path.stat().st_size
        if nbytes != self.nbytes:
            raise DatasetError(f"{self.path}: {nbytes} bytes, but {self.nbytes} were recorded")
        if self.checksum is not None and not checksums.matches(self.path, self.checksum):
            raise DatasetError(f"{self.path}: altered since it was recorded (checksum differs)")

    def load(self, device: str | torch.device = "cpu") -> AttentionCall:
        """Load the call to `device`, with shapes, dtypes and strides as recorded.

        Raises:
            DatasetError: the file is missing, damaged, or does not match its header.
        """
        with _open(self.path) as file:
            stored = set(file.keys())
            if stored != set(self.header.layouts):
                raise DatasetError(f"{self.path}: tensors {sorted(stored)} do not match its header")
            tensors = {}
            for name, layout in self.header.layouts.items():
                values = file.get_tensor(name)
                if dtype_name(values.dtype) != self.header.dtypes[name]:
                    raise DatasetError(f"{self.path}: {name} is {values.dtype}, not as recorded")
                try:
                    tensors[name] = unpack(values, layout, device)
                except ValueError as error:
                    raise DatasetError(f"{self.path}: {name} has {error}") from error
        return AttentionCall(
            query=tensors["query"],
            key=tensors["key"],
            value=tensors["value"],
            attn_mask=tensors.get("attn_mask"),
            output=tensors.get("output"),
            is_causal=self.header.is_causal,
            scale=self.header.scale,
            enable_gqa=self.header.enable_gqa,
            dropout_p=self.header.dropout_p,
            origin=self.origin,
        )


@dataclass
class CaptureRecord:
    """One capture of one model, as the manifest describes it."""

    model: str
    weights: str
    settings: dict[str, Any] = field(default_factory=dict)
    """What is needed to rebuild the run: size, checkpoint, prompt, steps, seed, dtype, device …"""
    device: str = ""
    versions: dict[str, str] = field(default_factory=dict)
    started: str = ""
    """UTC, ISO 8601."""
    complete: bool = False
    """False during the run, and afterwards if it was interrupted or failed."""
    sample: str = ""
    modules: str = ""
    """Glob of the module paths whose calls could be stored."""
    calls_seen: int = 0
    census: dict[str, Any] = field(default_factory=dict)
    """Counts of all calls, stored or not: see `capture.census`. Empty after a rebuild."""


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
            entries = [
                FileEntry(
                    directory / Path(item["file"]).name,
                    Header.from_json(item["call"]),
                    item["bytes"],
                    _recorded_checksum(item),
                )
                for item in data["files"]
            ]
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
            "files": [
                {
                    "file": entry.path.name,
                    "bytes": entry.nbytes,
                    "checksum": entry.checksum,
                    "call": asdict(entry.header),
                }
                for entry in self.entries
            ],
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


def _recorded_checksum(item: dict[str, Any]) -> str | None:
    """The checksum in a manifest's entry of a file."""
    if "sha256" not in item:
        return item["checksum"]
    return item["sha256"] and f"{checksums.WHOLE}:{item['sha256']}"


def _open(path: Path) -> Any:
    try:
        return safe_open(path, framework="pt")
    except FileNotFoundError as error:
        raise DatasetError(f"{path}: missing") from error
    except (SafetensorError, OSError) as error:
        raise DatasetError(f"{path}: not a readable safetensors file ({error})") from error


def _masks_nothing(mask: Tensor) -> bool:
    return bool(mask.all()) if mask.dtype == torch.bool else not bool(mask.any())
