"""Ties between two kernels over several calls, by their paired rounds."""

from __future__ import annotations

from collections.abc import Iterable

from replay.rows.row import Row
from replay.timing.statistics import MedianInterval, speed_verdict, speedup_between


def is_tie(rows: Iterable[tuple[Row | None, Row | None]]) -> bool:
    """Return True if the rounds of the calls show no relevant difference between two kernels.

    Args:
        rows: rows of two kernels on each call.
    """
    paired = []
    unpaired: list[bool] = []
    for old, new in rows:
        if old is None or new is None or old.time_ms is None or new.time_ms is None:
            continue
        if not old.shares_rounds(new):
            unpaired.append(_is_faster(new, old))
            continue
        paired.append((old.time_ms, new.time_ms))
    # A single call without a clear difference is enough for a tie.
    if not all(unpaired):
        return True
    return not speedup_between(*paired).differs if paired else not unpaired


def _is_faster(one: Row, other: Row) -> bool:
    """Compare, by speed-up over the baseline, rows of two processes, whose rounds are unpaired."""
    mine, others = _interval(one), _interval(other)
    if mine is None or others is None:
        return False
    verdict, _ = speed_verdict(mine.low / others.high, mine.high / others.low)
    return verdict == "fast"


def _interval(row: Row) -> MedianInterval | None:
    """Return the interval of a row's speed-up, which is exactly 1 for the baseline's own row."""
    if row.speedup is None:
        return MedianInterval(1.0, 1.0)
    if row.speedup.low is None or row.speedup.high is None:
        return None
    return MedianInterval(row.speedup.low, row.speedup.high)
