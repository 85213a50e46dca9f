"""Workloads: named calls, recorded or not, loaded one at a time."""

from __future__ import annotations

import difflib
import fnmatch
import os
import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch

from capture.call import AttentionCall, Origin
from capture.errors import DatasetError
from capture.storage import plain_files
from capture.storage.call_file import FileEntry
from capture.storage.dataset import DamagedFile, Dataset
from capture.storage.header import Header
from capture.storage.joined_calls import JoinedCall, is_part


@dataclass(frozen=True)
class Workload:
    """A call that can be loaded into memory."""

    name: str
    load: Callable[[torch.device], AttentionCall]
    """Raises `DatasetError` when the call cannot be read."""
    source: dict[str, Any] = field(default_factory=dict)
    """What a worker process needs to load the same call, as JSON (`replay.workers.kernel_server`
    reads it); empty for calls that exist only in this process."""


def from_directory(
    directory: str | Path, *, join_ranks: bool = False
) -> tuple[list[Workload], str]:
    """Return the calls recorded in a directory, and a note on how it was read (usually empty).

    A damaged file is a workload too, whose loading says what is wrong with it. Directories of the
    older `*_input_N.pt` files can be read too.

    Args:
        join_ranks: of calls that several ranks share, the whole ones, not their parts.

    Raises:
        DatasetError: the directory is missing or contains no recorded call, or none to join.
    """
    directory = Path(directory)
    pickled = _numbered(directory.glob("*_input_*.pt")) if directory.is_dir() else []
    if pickled and not join_ranks and not any(directory.glob("*.safetensors")):
        return [pickled_call(path) for path in pickled], ""
    dataset = Dataset.open(directory)
    damaged = map(damaged_file, dataset.damaged)
    has_parts = any(is_part(entry.origin) for entry in dataset.entries)
    if not join_ranks:
        calls = [recorded_call(entry) for entry in dataset.entries]
        parts = "these calls are parts that ranks share: --join-ranks replays whole calls"
        return [*calls, *damaged], _notes(dataset.note, parts if has_parts else "")
    if not has_parts:
        raise DatasetError(
            f"{directory}: every call is whole, none is shared by ranks: leave out --join-ranks"
        )
    joined = dataset.joined()
    if not joined.calls:
        raise DatasetError(
            f"{directory}: {joined.note}; leave out --join-ranks to replay the parts"
        )
    return [*map(joined_call, joined.calls), *damaged], _notes(dataset.note, joined.note)


def _notes(*notes: str) -> str:
    return "; ".join(filter(None, notes))


def chosen(workloads: Sequence[Workload], patterns: str) -> list[Workload]:
    """Return the calls that any of some comma-separated names or globs matches, in their order.

    Raises:
        DatasetError: a pattern matches none.
    """
    names = [workload.name for workload in workloads]
    found: set[str] = set()
    for pattern in [patterns] if patterns in names else patterns.split(","):
        matching = [name for name in names if fnmatch.fnmatchcase(name, pattern.strip())]
        if not matching:
            near = difflib.get_close_matches(pattern, names, n=1)
            hint = f"did you mean {near[0]}?" if near else f"the first is {names[0]}"
            raise DatasetError(f"no call {pattern.strip()!r} was recorded: {hint}")
        found.update(matching)
    return [workload for workload in workloads if workload.name in found]


def recorded_call(entry: FileEntry) -> Workload:
    """Make a workload of a call that `capture` wrote; loading it verifies its checksum."""

    def load(device: torch.device) -> AttentionCall:
        return entry.load(device)

    directory = str(entry.path.parent.resolve())
    source = {"kind": "recorded", "directory": directory, "entry": entry.to_json()}
    return Workload(entry.path.stem, load, source)


def joined_call(call: JoinedCall) -> Workload:
    """Make a workload of a call that ranks recorded in parts; loading it verifies checksums."""
    directory = str(call.entries[0].path.parent.resolve())
    entries = [entry.to_json() for entry in call.entries]
    source = {"kind": "joined", "directory": directory, "entries": entries}
    return Workload(call.name, call.load, source)


def damaged_file(damaged: DamagedFile) -> Workload:
    """Make a workload that cannot be loaded, so that the file has its row."""

    def load(device: torch.device) -> AttentionCall:
        raise DatasetError(damaged.reason)

    source = {"path": str(damaged.path), "reason": damaged.reason}
    return Workload(damaged.path.name, load, {"kind": "damaged", **source})


def pickled_call(path: Path) -> Workload:
    """Make a workload of a call from an older recording."""

    def load(device: torch.device) -> AttentionCall:
        return _read_pickled(path).to(device)

    return Workload(path.stem, load, {"kind": "pickled", "path": str(path.resolve())})


def _numbered(paths: object) -> list[Path]:
    """Return the paths that end in a number, sorted by that number."""
    found = []
    for path in paths:  # type: ignore[attr-defined]
        match = re.search(r"_input_(\d+)$", path.stem)
        if match:
            found.append((path.stem[: match.start()], int(match.group(1)), path))
    return [path for _, _, path in sorted(found)]


def _read_pickled(path: Path) -> AttentionCall:
    """Read a file with q, k, v (BHSD), kwargs and call_idx, without executing anything in it."""
    try:
        with plain_files.opened(path) as descriptor, os.fdopen(os.dup(descriptor), "rb") as file:
            data = torch.load(file, map_location="cpu", weights_only=True)
            nbytes = os.fstat(descriptor).st_size
        tensors = [data[name] for name in ("q", "k", "v")]
        options = dict(data.get("kwargs") or {})
        if not all(isinstance(tensor, torch.Tensor) and tensor.ndim == 4 for tensor in tensors):
            raise DatasetError(f"{path}: q, k and v must be tensors (B, H, S, D)")
        query, key, value = tensors
        scale = options.get("scale")
        call = AttentionCall(
            query,
            key,
            value,
            attn_mask=options.get("attn_mask"),
            is_causal=bool(options.get("is_causal", False)),
            scale=None if scale is None else float(scale),
            dropout_p=float(options.get("dropout_p", 0.0)),
            enable_gqa=query.shape[1] != key.shape[1],
            origin=Origin(
                model=path.stem[: path.stem.rindex("_input_")],
                weights="not stated",
                call_index=int(data.get("call_idx", 0)),
                phase="unknown",
            ),
        )
        if any(tensor.layout != torch.strided for tensor in call.tensors().values()):
            raise DatasetError(f"{path}: its tensors are sparse")
        header = Header.of(call)
        if fault := header.fault() or header.excess(nbytes):
            raise DatasetError(f"{path}: {fault}")
    except DatasetError:
        raise
    except Exception as error:  # torch.load raises many kinds of exceptions for a damaged file
        reason = str(error).partition("\n")[0]
        raise DatasetError(f"{path}: not a readable recording ({reason})") from error
    return call
