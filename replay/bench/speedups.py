"""The speed-ups of rows over their baseline, from the samples or blocks of the same rounds."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from replay.bench.confirmation import is_limited, unconfirmed, without_doubt
from replay.rows.row import Row, SpeedupOver
from replay.timing.statistics import process_factor, speedup_between, summarize

OWN_CLAIM = "backward not confirmed: only its own process timed it"
"""Flag of a user's kernel with times of a backward pass."""


def with_speedups(rows: Sequence[Row], baseline: str) -> list[Row]:
    """Return the rows of one call, with the speed-ups of correct kernels over the baseline."""
    base = next((row for row in rows if row.kernel == baseline and _is_timed(row)), None)
    if base is not None and not base.process:
        rows = [_with_process_factor(row, base) for row in rows]
        rows = [without_doubt(row) if _claims_to_be_slow(row, base) else row for row in rows]
    rows = [_compared(row, base) if _is_timed(row) else row for row in rows]
    return [_with_training(row, base) if _is_timed(row) else row for row in rows]


def _is_timed(row: Row) -> bool:
    return row.is_ranked and row.time_ms is not None


def _with_process_factor(row: Row, base: Row) -> Row:
    if row.time_ms is None or base.time_ms is None or not row.time_ms.control:
        return row
    factor = process_factor(row.time_ms.control, base.time_ms.samples)
    times: dict[str, Any] = {
        name: replace(found, process_factor=factor)
        for name in ("time_ms", "backward_ms", "both_ms")
        if (found := getattr(row, name)) is not None
    }
    return replace(row, **times)


def _claims_to_be_slow(row: Row, base: Row) -> bool:
    """Return whether a user's kernel is slow by its own samples, which no kernel gains by."""
    if not (row.process and row.is_correct and row.time_ms and base.time_ms):
        return False
    return speedup_between((base.time_ms, row.time_ms)).verdict == "slow"


def _compared(row: Row, base: Row | None) -> Row:
    if row.process and is_limited(row):
        row = _with_time_of_blocks(row, base)
    if base is None or row.kernel == base.kernel or row.is_unconfirmed:
        return row
    times, base_times = row.time_ms, base.time_ms
    assert times is not None
    assert base_times is not None
    if row.process and not base.process:
        # Compute these figures here, because the process of a user's kernel could falsify them.
        faster = base_times.p50 / times.p50
        row = replace(
            row,
            tflops=base.tflops and base.tflops * faster,
            gb_per_s=base.gb_per_s and base.gb_per_s * faster,
            roof_share=base.roof_share and base.roof_share * faster,
        )
    found = speedup_between((base_times, times))
    bare = speedup_between((base_times, replace(times, unconfirmed=0.0)))
    if found.low is not None and bare.low is not None and found.low < bare.low:
        flag = f"speed-up confirmed only up to {found.low:.2g}×: writing block inputs takes long"
        row = replace(row, flags=(*row.flags, flag))
    return replace(row, speedup=SpeedupOver(**vars(found), vs=base.kernel))


def _with_training(row: Row, base: Row | None) -> Row:
    """Return a row with the speed-ups of its backward pass, and of forward and backward together.

    Blocks confirm the forward pass alone, so these times of a user's kernel are a claim, as the
    time of a core is.
    """
    if base is None or row.kernel == base.kernel or row.is_unconfirmed:
        return row
    found: dict[str, Any] = {}
    for name in ("backward", "both"):
        before, after = getattr(base, f"{name}_ms"), getattr(row, f"{name}_ms")
        if before is not None and after is not None:
            speedup = speedup_between((before, after))
            found[f"{name}_speedup"] = SpeedupOver(**vars(speedup), vs=base.kernel)
    if found and row.process:
        found["flags"] = (*row.flags, OWN_CLAIM)
    return replace(row, **found)


def _with_time_of_blocks(row: Row, base: Row | None) -> Row:
    """Return a row whose time is the baseline's time, times the ratio of the kernels' blocks.

    Its own samples are only a claim, and its blocks include launches.
    """
    if base is None or base.block_ms is None or (base.process and is_limited(base)):
        return unconfirmed(row, "no baseline with a confirmed time to compare its blocks with")
    assert row.block_ms is not None
    assert row.time_ms is not None
    assert base.time_ms is not None
    all_three = zip(base.time_ms.samples, row.block_ms.samples, base.block_ms.samples, strict=False)
    samples = [each * own / of for each, own, of in all_three]
    of_blocks = summarize(samples, (), row.time_ms.unconfirmed, row.time_ms.control)
    return replace(row, time_ms=replace(of_blocks, process_factor=row.time_ms.process_factor))
