"""Workloads: named calls, recorded or not, loaded one at a time."""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch

from capture.call import AttentionCall, Origin
from capture.call_file import FileEntry
from capture.dataset import Dataset
from capture.errors import DatasetError


@dataclass(frozen=True)
class Workload:
    """A call that can be loaded into memory."""

    name: str
    load: Callable[[torch.device], AttentionCall]
    """Raises `DatasetError` when the call cannot be read."""
    source: dict[str, Any] = field(default_factory=dict)
    """What a worker process needs to load the same call, as JSON (`replay.workers.kernel_server`
    reads it); empty for calls that exist only in this process."""


def from_directory(directory: str | Path) -> tuple[list[Workload], str]:
    """Return the calls recorded in a directory, and a note on how it was read (usually empty).

    Directories of the older `*_input_N.pt` files can be read too.

    Raises:
        DatasetError: the directory is missing or contains no recorded call.
    """
    directory = Path(directory)
    pickled = _numbered(directory.glob("*_input_*.pt")) if directory.is_dir() else []
    if pickled and not any(directory.glob("*.safetensors")):
        return [pickled_call(path) for path in pickled], ""
    dataset = Dataset.open(directory)
    return [recorded_call(entry) for entry in dataset.entries], dataset.note


def recorded_call(entry: FileEntry) -> Workload:
    """Make a workload of a call that `capture` wrote; loading it verifies its checksum first."""

    def load(device: torch.device) -> AttentionCall:
        entry.check()
        return entry.load(device)

    path = str(entry.path.resolve())
    source = {"kind": "recorded", "path": path, "nbytes": entry.nbytes, "checksum": entry.checksum}
    return Workload(entry.path.stem, load, source)


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
        data = torch.load(path, map_location="cpu", weights_only=True)
        tensors = [data[name] for name in ("q", "k", "v")]
        options = dict(data.get("kwargs") or {})
        index = int(data.get("call_idx", 0))
    except Exception as error:  # torch.load raises many kinds of exceptions for a damaged file
        reason = str(error).partition("\n")[0]
        raise DatasetError(f"{path}: not a readable recording ({reason})") from error
    query, key, value = tensors
    if not all(isinstance(tensor, torch.Tensor) and tensor.ndim == 4 for tensor in tensors):
        raise DatasetError(f"{path}: q, k and v must be tensors (B, H, S, D)")
    return AttentionCall(
        query,
        key,
        value,
        attn_mask=options.get("attn_mask"),
        is_causal=bool(options.get("is_causal", False)),
        scale=options.get("scale"),
        dropout_p=float(options.get("dropout_p", 0.0)),
        enable_gqa=query.shape[1] != key.shape[1],
        origin=Origin(
            model=path.stem[: path.stem.rindex("_input_")],
            weights="not stated",
            call_index=index,
            phase="unknown",
        ),
    )
