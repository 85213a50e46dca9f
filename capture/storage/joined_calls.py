"""Joins calls that several ranks recorded in parts, when the calls are loaded."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import overload

import torch

from capture.call.attention_call import AttentionCall, Origin
from capture.call.head_ranges import ranges
from capture.call.joining import JoinError, join
from capture.call.splits import SPLITS
from capture.errors import DatasetError
from capture.storage.call_file import FileEntry


@dataclass(frozen=True)
class JoinedCall:
    """A call of the whole model, in one file per rank that shares the call."""

    entries: tuple[FileEntry, ...]
    """Files in the order of the parts; one file if the call is not shared."""

    @property
    def origin(self) -> Origin:
        """Origin of the first part, as if one process had recorded the whole call."""
        origin = self.entries[0].origin
        if len(self.entries) == 1:
            return origin
        heads = "" if origin.split == "heads" else origin.heads
        return replace(origin, model=model_of(origin), rank=None, split="", heads=heads)

    @property
    def name(self) -> str:
        """Unique name in the dataset."""
        first = self.entries[0].path.stem
        if len(self.entries) == 1:
            return first
        sharing = ranges(tuple(sorted(self.entries[0].origin.split_ranks)))
        return first.replace(f".rank{self.entries[0].origin.rank}", f".ranks{sharing}", 1)

    def load(self, device: str | torch.device = "cpu", *, check: bool = True) -> AttentionCall:
        """Load the parts and join them on `device`.

        Raises:
            DatasetError: a file cannot be read, or the parts do not belong to one call.
        """
        if len(self.entries) == 1:
            return self.entries[0].load(device, check=check)
        parts = [entry.load(device, check=check) for entry in self.entries]
        try:
            whole = join(parts, self.entries[0].origin.split)
        except JoinError as error:
            raise DatasetError(f"{self.name} cannot be joined: {error}") from error
        return replace(whole, origin=self.origin)


class JoinedCalls(Sequence[AttentionCall]):
    """Whole calls of a dataset, joined from their parts when they are loaded."""

    def __init__(self, entries: Sequence[FileEntry], *, check: bool) -> None:
        self._check = check
        self.calls: list[JoinedCall] = []
        """Files of each call, in the order of the first parts in the dataset."""
        self.missing: list[str] = []
        """Sentences about the calls that are omitted because parts are missing, one per call."""
        groups: dict[tuple[object, ...], list[FileEntry]] = {}
        for entry in entries:
            if not is_part(entry.origin):
                self.calls.append(JoinedCall((entry,)))
            elif fault := _fault(entry.origin):
                self.missing.append(f"{entry.path.stem} {fault}")
            else:
                groups.setdefault(_key(entry.origin), []).append(entry)
        for group in groups.values():
            sharing, by_rank = group[0].origin.split_ranks, {e.origin.rank: e for e in group}
            if len(by_rank) < len(group):
                self.missing.append(f"{group[0].path.stem} has several parts of one rank")
            elif lacking := sorted({*sharing} - by_rank.keys()):
                kind = "rank" if len(lacking) == 1 else "ranks"
                named = ranges(tuple(lacking))
                self.missing.append(f"{group[0].path.stem} lacks the part of {kind} {named}")
            else:
                self.calls.append(JoinedCall(tuple(by_rank[rank] for rank in sharing)))
        places = {entry.path: at for at, entry in enumerate(entries)}
        self.calls.sort(key=lambda call: places[call.entries[0].path])

    @property
    def note(self) -> str:
        """Sentence about the omitted calls; empty if no call is omitted."""
        if not self.missing:
            return ""
        count = len(self.missing)
        calls = "1 call is" if count == 1 else f"{count} calls are"
        return f"{calls} left out, because a rank's part is missing: {self.missing[0]}"

    def __len__(self) -> int:
        return len(self.calls)

    @overload
    def __getitem__(self, index: int) -> AttentionCall: ...
    @overload
    def __getitem__(self, index: slice) -> list[AttentionCall]: ...
    def __getitem__(self, index: int | slice) -> AttentionCall | list[AttentionCall]:
        if isinstance(index, slice):
            return [call.load(check=self._check) for call in self.calls[index]]
        return self.calls[index].load(check=self._check)


def is_part(origin: Origin) -> bool:
    """Return whether an origin belongs to one rank's part of a call, not to a whole call."""
    return bool(origin.split)


def model_of(origin: Origin) -> str:
    """Return the name of a part's model, without its rank."""
    return origin.model.removesuffix(f".rank{origin.rank}")


def _fault(origin: Origin) -> str:
    """Return why a part cannot be joined with other parts; empty if it can."""
    sharing = origin.split_ranks
    if origin.split not in SPLITS:
        return f"is split by {origin.split[:40]!r} (only {' and '.join(SPLITS)} can be joined)"
    if origin.rank not in sharing or len(set(sharing)) < len(sharing) or min(sharing) < 0:
        return f"was recorded by rank {origin.rank}, which is not among the sharing ranks"
    return ""


def _key(origin: Origin) -> tuple[object, ...]:
    """Return a key that is the same for all parts of one call and different for other calls."""
    return (
        model_of(origin),
        origin.split,
        *origin.split_ranks,
        origin.module,
        origin.phase,
        origin.step if origin.forward_index is None else origin.forward_index,
        origin.call_in_step,
    )
