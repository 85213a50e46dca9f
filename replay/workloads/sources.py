"""Sources of calls: a recorded file, joined parts, random values, or a damaged file."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, NamedTuple

import torch

from capture.call.attention_call import AttentionCall, Origin
from capture.call.shape import Shape
from capture.errors import DatasetError
from capture.storage.call_file import FileEntry
from capture.storage.header import dtype_name
from capture.storage.joined_calls import JoinedCall
from replay.rows.row import CallFacts
from replay.workloads.random_calls import Spec, random_weights
from replay.workloads.synthetic_counterparts import counterpart

ALIGNMENT = 16
"""Lengths that are multiples of this number are compiled separately from other lengths."""


class CallMetadata(NamedTuple):
    """Facts about a call that are known before its tensors are read."""

    form: tuple[object, ...]
    """Values that are equal for two calls if most kernels compile once for both of them."""
    shape: Shape | None = None
    """Shape of the call; None if it is unknown until the tensors are loaded."""
    is_causal: bool = False
    model: str = ""
    phase: str = ""
    module: str = ""


class Source(ABC):
    """Source of one call, with absolute paths, as kernels may change the current directory."""

    is_counterpart = False
    """True if the call has random values in place of the recorded ones."""

    @property
    @abstractmethod
    def name(self) -> str:
        """Name of the call, as rows store it."""

    @abstractmethod
    def load(self, device: torch.device) -> AttentionCall:
        """Load the call to a device, into memory that only the caller uses.

        Raises:
            DatasetError: the call cannot be read.
        """

    @abstractmethod
    def to_json(self) -> dict[str, Any]:
        """Return data for `source_from_json` to make this source in another process."""

    def metadata(self) -> CallMetadata:
        """Return the facts that are known before the call is loaded."""
        return CallMetadata((self.name,))

    def files(self) -> tuple[Path, ...]:
        """Return the files to load, which share one directory."""
        return ()

    def moved_to(self, directory: Path) -> Source:
        """Return this source with its files in another directory."""
        return self

    def is_about(self, facts: CallFacts) -> bool:
        """Return True if a row's call comes from this source, not from another of the same name."""
        return True


@dataclass(frozen=True)
class RecordedSource(Source):
    """File of one recorded call, whose checksum is verified during loading."""

    entry: FileEntry

    @property
    def name(self) -> str:
        return self.entry.path.stem

    def load(self, device: torch.device) -> AttentionCall:
        return self.entry.load(device)

    def to_json(self) -> dict[str, Any]:
        directory = str(self.entry.path.parent)
        return {"kind": "recorded", "directory": directory, "entry": self.entry.to_json()}

    def metadata(self) -> CallMetadata:
        header, origin = self.entry.header, self.entry.origin
        form = (
            *sorted(header.dtypes.items()),
            header.is_causal,
            header.mask_structure,
            *sorted(header.variant.arguments().items()),
            *_length_classes(header.shape),
        )
        shape, is_causal = header.shape, header.is_causal
        return CallMetadata(form, shape, is_causal, origin.model, origin.phase, origin.module)

    def files(self) -> tuple[Path, ...]:
        return (self.entry.path,)

    def moved_to(self, directory: Path) -> RecordedSource:
        return RecordedSource(_moved(self.entry, directory))

    def is_about(self, facts: CallFacts) -> bool:
        header = self.entry.header
        sizes = (facts.shape, facts.dtype) == (header.shape, header.dtype)
        return sizes and _is_at(header.origin, facts)


@dataclass(frozen=True)
class JoinedSource(Source):
    """Files with the parts of one call from several ranks, which are joined during loading."""

    call: JoinedCall

    @property
    def name(self) -> str:
        return self.call.name

    def load(self, device: torch.device) -> AttentionCall:
        return self.call.load(device)

    def to_json(self) -> dict[str, Any]:
        directory = str(self.call.entries[0].path.parent)
        entries = [entry.to_json() for entry in self.call.entries]
        return {"kind": "joined", "directory": directory, "entries": entries}

    def metadata(self) -> CallMetadata:
        part, count = RecordedSource(self.call.entries[0]).metadata(), len(self.call.entries)
        assert part.shape is not None
        # All parts have equal sizes, so the whole call has `count` times the work of one part.
        shape = part.shape._replace(q_heads=part.shape.q_heads * count)
        return part._replace(form=(*part.form, count), shape=shape)

    def files(self) -> tuple[Path, ...]:
        return tuple(entry.path for entry in self.call.entries)

    def moved_to(self, directory: Path) -> JoinedSource:
        return JoinedSource(JoinedCall(tuple(_moved(e, directory) for e in self.call.entries)))

    def is_about(self, facts: CallFacts) -> bool:
        return _is_at(self.call.origin, facts)


@dataclass(frozen=True)
class DamagedSource(Source):
    """File that contains no readable call; a replay writes an error row for it."""

    path: Path
    reason: str

    @property
    def name(self) -> str:
        return self.path.name

    def load(self, device: torch.device) -> AttentionCall:
        raise DatasetError(self.reason)

    def to_json(self) -> dict[str, Any]:
        return {"kind": "damaged", "path": str(self.path), "reason": self.reason}


@dataclass(frozen=True)
class RandomSource(Source):
    """Synthetic call; on one device, a seed always gives the same values."""

    given_name: str
    model: str
    """Name of the suite, or `random`."""
    spec: Spec
    seed: int

    @property
    def name(self) -> str:
        return self.given_name

    def load(self, device: torch.device) -> AttentionCall:
        return self.spec.call(device, torch.Generator(device).manual_seed(self.seed), self.model)

    def to_json(self) -> dict[str, Any]:
        described = {"name": self.name, "model": self.model, "seed": self.seed}
        return {"kind": "synthetic", **described, "spec": self.spec.to_json()}

    def metadata(self) -> CallMetadata:
        spec, shape = self.spec, self.spec.shape
        form = (dtype_name(spec.dtype), spec.is_causal, spec.mask, *_length_classes(shape))
        return CallMetadata(form, shape, spec.is_causal, self.model)

    def is_about(self, facts: CallFacts) -> bool:
        spec = self.spec
        dtype, is_unmasked = dtype_name(spec.dtype), spec.mask == "none"
        expected = (self.model, spec.shape, dtype, spec.is_causal, is_unmasked)
        shown = (facts.model, facts.shape, facts.dtype, facts.is_causal, facts.mask is None)
        return expected == shown and facts.weights == random_weights(spec.distribution)


@dataclass(frozen=True)
class CounterpartSource(Source):
    """Recorded call with random values of one of `synthetic_counterparts.KINDS`."""

    recorded: Source
    values: str
    seed: int

    is_counterpart = True

    @property
    def name(self) -> str:
        return f"{self.recorded.name}-{self.values}"

    def load(self, device: torch.device) -> AttentionCall:
        return counterpart(self.recorded.load(device), self.values, self.seed)

    def to_json(self) -> dict[str, Any]:
        recorded = self.recorded.to_json()
        return {"kind": "twin", "of": recorded, "values": self.values, "seed": self.seed}

    def metadata(self) -> CallMetadata:
        return self.recorded.metadata()

    def files(self) -> tuple[Path, ...]:
        return self.recorded.files()

    def moved_to(self, directory: Path) -> CounterpartSource:
        return replace(self, recorded=self.recorded.moved_to(directory))


def source_from_json(data: Mapping[str, Any]) -> Source:
    """Make the source that `Source.to_json` described; do not read the call."""
    match data["kind"]:
        case "recorded":
            entry = FileEntry.from_json(Path(data["directory"]), data["entry"])
            return RecordedSource(entry)
        case "joined":
            directory = Path(data["directory"])
            entries = [FileEntry.from_json(directory, entry) for entry in data["entries"]]
            return JoinedSource(JoinedCall(tuple(entries)))
        case "damaged":
            return DamagedSource(Path(data["path"]), data["reason"])
        case "twin":
            recorded = source_from_json(data["of"])
            return CounterpartSource(recorded, data["values"], data["seed"])
        case "synthetic":
            spec = Spec.from_json(data["spec"])
            return RandomSource(data["name"], data["model"], spec, data["seed"])
        case kind:
            raise ValueError(f"unknown kind of source: {kind!r}")


def resolved(entry: FileEntry) -> FileEntry:
    """Return an entry with an absolute directory; if the file is a link, keep the link."""
    return _moved(entry, entry.path.parent.resolve())


def _length_classes(shape: Shape) -> tuple[object, ...]:
    """Return a shape's part of a form, with only the bit length and alignment of the lengths."""
    lengths = shape.q_len, shape.kv_len
    classes = [(length.bit_length(), length % ALIGNMENT == 0) for length in lengths]
    return (*shape._replace(q_len=0, kv_len=0), *classes)


def _moved(entry: FileEntry, directory: Path) -> FileEntry:
    return replace(entry, path=directory / entry.path.name)


def _is_at(origin: Origin, facts: CallFacts) -> bool:
    place = (origin.model, origin.module, origin.step, origin.call_index)
    return place == (facts.model, facts.module, facts.step, facts.call_index)
