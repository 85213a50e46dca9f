"""The removal of speed-ups over baselines that cannot be trusted."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import replace

from replay.rows.row import Row

DISTURBED = 1.5
"""Largest allowed ratio of a baseline's time in the kernel's worker to its time elsewhere."""


def without_rejected_baseline(row: Row, rejected: Collection[str]) -> Row:
    """Remove a row's speed-up if the row of its baseline was rejected."""
    if row.speedup is None or row.speedup.vs not in rejected:
        return row
    return _without_speedup(row, f"the row of {row.speedup.vs} was rejected")


def without_slowed_baseline(row: Row, beside: Sequence[Row], clean: Sequence[Row]) -> Row:
    """Remove a speed-up if the kernel slowed down the baseline that it is compared with.

    Args:
        beside: rows from the kernel's worker.
        clean: rows from a worker without the kernel.
    """
    if row.speedup is None:
        return row
    baseline = row.speedup.vs
    beside_ms, clean_ms = (_typical_ms(rows, baseline) for rows in (beside, clean))
    if beside_ms is None or clean_ms is None or beside_ms <= DISTURBED * clean_ms:
        return row
    times = beside_ms / clean_ms
    return _without_speedup(row, f"{baseline} takes {times:.1f} times as long in the same process")


def _without_speedup(row: Row, reason: str) -> Row:
    return replace(row, speedup=None, flags=(*row.flags, f"no speed-up: {reason}"))


def _typical_ms(rows: Sequence[Row], kernel: str) -> float | None:
    times = (row.time_ms for row in rows if row.kernel == kernel)
    return next((time.p50 for time in times if time is not None), None)
