"""Chooses the calls of a recording that a copy keeps.

`N` keeps calls that are spread over layers, steps, phases and shapes, by the sampler of recordings.
`worst:N` and `slowest:N` keep the calls that a kernel is worst at, by the rows of a replay.
"""

from __future__ import annotations

import math
from collections.abc import Hashable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from capture.errors import CaptureError
from capture.recording.sampling import OfferedCall, SpreadSampler
from capture.storage.call_file import FileEntry
from capture.storage.json_data import parsed
from capture.storage.plain_files import possible
from capture.text.counted import counted, human_bytes
from capture.text.printable import quoted

KINDS = {
    "": "spread over layers, steps, phases and shapes",
    "worst": "with the largest error of a kernel, relative to its tolerance",
    "slowest": "with the lowest speed-up of a kernel",
}
"""Kinds of selection, with a clause about the calls that they keep."""

FORM = "N, worst:N or slowest:N"

FAILED = ("error", "crash", "timeout")
"""Status of a row whose kernel has no output on the call, which is worse than any error."""


@dataclass(frozen=True)
class Selection:
    """Number and kind of the calls to keep."""

    kind: str = ""
    count: int | None = None
    """Maximum number of calls; None for all."""

    @classmethod
    def parse(cls, text: str) -> Selection:
        """Read `20`, `worst:20` or `slowest:20`.

        Raises:
            ValueError: the text has another form.
        """
        kind, separator, count = text.rpartition(":")
        is_count = count.isdecimal() and len(count) < 10 and int(count) > 0
        if kind not in KINDS or bool(separator) != bool(kind) or not is_count:
            raise ValueError(f"`keep=` must be {FORM} (N at least 1), not {text!r}")
        return cls(kind, int(count))

    def kept(
        self,
        entries: Sequence[FileEntry],
        rows: str | Path | None,
        max_bytes: int | None,
        address: str,
    ) -> list[FileEntry]:
        """Return the entries to keep, in their order.

        Args:
            rows: file that `replay --json` wrote about this recording.
            max_bytes: maximum total size of the files.
            address: place of the recording, for messages.

        Raises:
            CaptureError: `rows` is needed, cannot be read or is about other calls, or no call fits
                into `max_bytes`.
        """
        if self.kind and rows is None:
            raise CaptureError(
                f"{self.kind} calls are found in the rows of a replay: write them with `replay "
                f"--dir {quoted(address)} --json rows.jsonl`, and name them with `rows=`"
            )
        if self.kind:
            assert rows is not None
            ranked = _ranked(self.kind, entries, Path(rows), address)
        elif rows is not None:
            raise CaptureError("`rows=` is for worst:N and slowest:N: name one with `keep=`")
        else:
            ranked = _spread(entries, self.count or len(entries), max_bytes)
        chosen: list[FileEntry] = []
        left = math.inf if max_bytes is None else max_bytes
        for entry in ranked[: self.count]:
            if entry.nbytes <= left:
                chosen.append(entry)
                left -= entry.nbytes
        if not chosen:
            least = min(entry.nbytes for entry in ranked or entries)
            raise CaptureError(f"the smallest call takes {human_bytes(least)}: raise `max_bytes=`")
        paths = {entry.path for entry in chosen}
        return [entry for entry in entries if entry.path in paths]

    def left_out(self, kept: int, recorded: int) -> str:
        """Return a clause about the calls that a copy lacks; empty if it has all of them."""
        if kept == recorded:
            return ""
        return f"a copy of {kept:,} of {counted(recorded, 'recorded call')}, {KINDS[self.kind]}"


def _spread(entries: Sequence[FileEntry], count: int, max_bytes: int | None) -> list[FileEntry]:
    sampler = SpreadSampler(count, max_bytes)
    for index, entry in enumerate(entries):
        origin = entry.origin
        place = sampler.place(_stratum(entry), origin.module)
        if sampler.wants(place, origin.step):
            sampler.offer(OfferedCall(index, place, origin.step, entry.nbytes))
    return [entries[index] for index in sorted(sampler.calls)]


def _stratum(entry: FileEntry) -> tuple[Hashable, ...]:
    """Return what interchangeable calls share, like `CallSignature.stratum`."""
    header, shape = entry.header, entry.header.shape
    return (
        entry.origin.phase,
        entry.origin.model,
        shape._replace(kv_len=0),  # a growing cache changes the key length at every step
        shape.q_len == shape.kv_len,
        header.dtype,
        header.is_causal,
        "attn_mask" in header.layouts,
        str(header.variant),
        entry.origin.entry_point,
    )


def _ranked(kind: str, entries: Sequence[FileEntry], rows: Path, address: str) -> list[FileEntry]:
    """Return the entries that the rows are about, the worst first."""
    by_name = {entry.path.stem: entry for entry in entries}
    badness: dict[str, float] = {}
    for number, line in enumerate(_lines(rows), start=1):
        try:
            row = parsed(line)
            name = row["call"]["name"]
            if name not in by_name:
                continue
            figure = _error(row) if kind == "worst" else _slowness(row)
        except (ValueError, KeyError, TypeError) as error:
            raise CaptureError(
                f"{rows}, line {number}: not a row of `replay --json`: name another with `rows=`"
            ) from error
        if figure is not None:
            badness[name] = max(figure, badness.get(name, -math.inf))
    if not badness:
        figures = "error" if kind == "worst" else "speed-up"
        raise CaptureError(
            f"{rows} has no {figures} of a kernel on these calls: write such rows with "
            f"`replay --dir {quoted(address)} --json {quoted(rows)}`"
        )
    # Sorting is stable, so equally bad calls stay in the order of the recording.
    names = [name for name in by_name if name in badness]
    return [by_name[name] for name in sorted(names, key=lambda name: -badness[name])]


def _lines(rows: Path) -> list[str]:
    try:
        text = possible(rows).read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        reason = getattr(error, "strerror", None) or "not a text"
        raise CaptureError(
            f"cannot read {rows} ({reason}): name a file of `replay --json` with `rows=`"
        ) from error
    *lines, _ = text.split("\n")  # an interrupted replay may have cut off the last row
    return lines


def _error(row: Any) -> float | None:
    """Return the largest error divided by its limit; None if unknown, as in earlier versions."""
    if row["status"] in FAILED:
        return math.inf
    ratio: float | None = (row["accuracy"] or {}).get("tolerance_ratio")
    return math.inf if ratio is None and row["status"] == "inaccurate" else ratio


def _slowness(row: Any) -> float | None:
    """Return the baseline's speed-up over a kernel; None without a comparison."""
    return None if row["speedup"] is None else 1 / row["speedup"]["ratio"]
