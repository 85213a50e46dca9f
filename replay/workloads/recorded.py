"""Workloads: named calls, recorded or not, loaded one at a time."""

from __future__ import annotations

import os
import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch

from capture.call.attention_call import AttentionCall, Origin
from capture.errors import DatasetError
from capture.storage import plain_files
from capture.storage.call_file import FileEntry
from capture.storage.dataset import DamagedFile, Dataset
from capture.storage.header import Header
from capture.storage.joined_calls import JoinedCall, is_part
from capture.storage.origins import Report, unheard
from replay.workloads.call_names import chosen_names


@dataclass(frozen=True)
class Workload:
    """A call that can be loaded into memory."""

    name: str
    load: Callable[[torch.device], AttentionCall]
    """Raises `DatasetError` when the call cannot be read."""
    source: dict[str, Any] = field(default_factory=dict)
    """What a worker process needs to load the same call, as JSON (`replay.workers.kernel_server`
    reads it); empty for calls that exist only in this process."""
    on: str = ""
    """The type of device to replay it on, where a call is replayed on several."""

    @property
    def label(self) -> str:
        """What tells it from the others of a replay."""
        return f"{self.name} on {self.on}" if self.on else self.name

    def load_to_judge(self, device: torch.device) -> AttentionCall:
        """Load it for kernels whose outputs are to be compared with a reference.

        Raises:
            DatasetError: it cannot be read, or has an empty output, which nothing can be said of.
        """
        call = self.load(device)
        if not call.query.numel():
            sizes = "×".join(map(str, call.query.shape))
            raise DatasetError(f"a query of {sizes} has no output that could be judged", self.name)
        return call


def from_directory(
    where: str | Path,
    patterns: str | None = None,
    *,
    join_ranks: bool = False,
    report: Report = unheard,
) -> tuple[list[Workload], str]:
    """Return the recorded calls of a dataset, and a note on how it was read (usually empty).

    A damaged file is a workload too, whose loading says what is wrong with it. Directories of the
    older `*_input_N.pt` files can be read too.

    Args:
        where: a directory, an archive of one, or an address (see `capture.load`).
        patterns: only the calls that these match (see `chosen`).
        join_ranks: of calls that several ranks share, the whole ones, not their parts.
        report: is told of what is copied from elsewhere.

    Raises:
        DatasetError: the dataset is missing, cannot be reached or contains no such call, or none to
            join.
    """
    if not join_ranks and (pickled := pickled_calls(where)):
        return pickled if patterns is None else chosen(pickled, patterns), ""
    dataset = Dataset.open(where, report=report)
    return from_dataset(dataset, patterns, join_ranks=join_ranks, report=report)


def from_dataset(
    dataset: Dataset,
    patterns: str | None = None,
    *,
    join_ranks: bool = False,
    report: Report = unheard,
) -> tuple[list[Workload], str]:
    """Like `from_directory`, of a dataset that is open.

    The files of the calls are copied here first if they are elsewhere: worker processes read them.
    """
    has_parts = any(is_part(entry.origin) for entry in dataset.entries)
    if not join_ranks:
        calls: list[tuple[Workload, tuple[FileEntry, ...]]]
        calls = [(recorded_call(entry), (entry,)) for entry in dataset.entries]
        hint = "these calls are parts that ranks share: --join-ranks replays whole calls"
        note = hint if has_parts else ""
    elif not has_parts:
        raise DatasetError(
            f"{dataset.address}: every call is whole, none is shared by ranks: leave out "
            "--join-ranks"
        )
    else:
        joined = dataset.joined()
        calls, note = [(joined_call(call), call.entries) for call in joined.calls], joined.note
        if not calls:
            raise DatasetError(
                f"{dataset.address}: {note}; leave out --join-ranks to replay the parts"
            )
    workloads = [*(call for call, _ in calls), *map(damaged_file, dataset.damaged)]
    if patterns is not None:
        workloads = chosen(workloads, patterns)
    names = {workload.name for workload in workloads}
    wanted = [entry for call, entries in calls if call.name in names for entry in entries]
    reasons = {each.path: damaged_file(each) for each in dataset.fetch(wanted, report)}
    lacking = {
        call.name: reasons[entry.path]
        for call, entries in calls
        for entry in entries
        if entry.path in reasons
    }
    found = [lacking.get(workload.name, workload) for workload in workloads]
    return found, "; ".join(filter(None, (dataset.note, note)))


def pickled_calls(where: str | Path) -> list[Workload]:
    """Return the calls of a directory of older recordings; none if it is not one."""
    directory = Path(where)
    pickled = _numbered(directory.glob("*_input_*.pt")) if directory.is_dir() else []
    if any(directory.glob("*.safetensors")):
        return []
    return [pickled_call(path) for path in pickled]


def chosen(workloads: Sequence[Workload], patterns: str) -> list[Workload]:
    """Return the calls that any of some comma-separated names or globs matches, in their order.

    Raises:
        DatasetError: a pattern matches none.
    """
    found = chosen_names([workload.name for workload in workloads], patterns)
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

    reason = str(damaged.error)

    def load(device: torch.device) -> AttentionCall:
        raise DatasetError(reason)

    source = {"path": str(damaged.path), "reason": reason}
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
            raise DatasetError("q, k and v must be tensors (B, H, S, D)", path)
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
            raise DatasetError("its tensors are sparse", path)
        header = Header.of(call)
        if fault := header.fault() or header.excess(nbytes):
            raise DatasetError(fault, path)
    except DatasetError:
        raise
    except Exception as error:  # torch.load raises many kinds of exceptions for a damaged file
        reason = str(error).partition("\n")[0]
        raise DatasetError(f"not a readable recording ({reason})", path) from error
    return call
