"""The comparison of a row's claimed time with the blocks of calls that another process clocked."""

from __future__ import annotations

from dataclasses import dataclass, field, replace

from replay.isolation.block import BlockVerdict
from replay.rows.row import INTERRUPTED_BLOCKS, UNCONFIRMED, Row
from replay.timing.statistics import summarize

TOO_FAST = 1.3
"""Largest ratio of a call's time in a block to its claimed time."""
BETWEEN_MS = 0.05
"""Time by which a call in a block may be longer, because work between the calls has emptied
processor caches. A row that needs this allowance is compared by its blocks."""
MOST_BLOCKS = 8
"""Maximum number of blocks. Other processes can only make a block longer, so the shortest block
counts."""
LEAST_QUIET = 3
"""Minimum number of blocks without interruptions that contradict a row."""

LIMITED, BUSY = "limited by launches", "limited by other work"
"""Beginnings of the flag of a user's kernel that is compared by its blocks, on a GPU and a CPU."""


@dataclass
class Blocks:
    """Blocks of calls of one kernel."""

    ms: list[float] = field(default_factory=list)
    """Time of a call in each block."""
    quiet: int = 0
    """Number of blocks that no other process interrupted."""

    def add(self, seen: BlockVerdict) -> None:
        self.ms.append(seen.call_ms)
        self.quiet += not seen.is_interrupted

    def settle(self, claimed_ms: float) -> bool:
        """Return whether no further block is needed."""
        return len(self.ms) == MOST_BLOCKS or min(self.ms) <= TOO_FAST * claimed_ms


def with_blocks(row: Row, blocks: Blocks, overhead_ms: float = 0.0) -> Row:
    """Return a row with the time of its blocks, or with the status `error` if they contradict it.

    The row's time excludes launches on a GPU, but a block cannot: a short call is limited by
    launches there, and only the blocks can be compared.

    Args:
        overhead_ms: time by which known kernels take longer in a block of this call.
    """
    if not blocks.ms:
        return row
    row = replace(row, block_ms=summarize(blocks.ms))
    # Known kernels do not falsify their samples, and noise must not accuse them.
    if not row.process or row.status != "ok" or row.time_ms is None:
        return row
    shortest, claimed, host = min(blocks.ms), row.time_ms.p50, row.host_ms or 0.0
    if shortest <= TOO_FAST * claimed:
        # No single sample may claim what the median may not: speed-ups are medians of ratios.
        samples = [max(each, shortest / TOO_FAST) for each in row.time_ms.samples]
        return replace(row, time_ms=summarize(samples, row.time_ms.interrupted))
    if shortest - overhead_ms <= TOO_FAST * max(claimed, host) + BETWEEN_MS:
        flag = (
            f"{LIMITED if host else BUSY}: {shortest:.3g} ms a call in a block; its time is the "
            "baseline's, multiplied by the ratio of their blocks"
        )
    elif blocks.quiet < LEAST_QUIET:
        flag = INTERRUPTED_BLOCKS
    else:
        reason = (
            f"its samples say {max(claimed, host):.3g} ms a call; on inputs that another process "
            f"drew, a call took {shortest:.3g} ms by that process's clock"
        )
        return replace(row, status="error", reason=reason)
    return replace(row, flags=(*row.flags, flag))


def is_limited(row: Row) -> bool:
    """Return whether the row is compared by its blocks, which are longer than its samples."""
    return any(flag.startswith((LIMITED, BUSY)) for flag in row.flags)


def unconfirmed(row: Row, why: str) -> Row:
    """Return a row that may not be compared with others."""
    return replace(row, flags=(*row.flags, f"{UNCONFIRMED}: {why}"))


def overhead_ms(row: Row) -> float:
    """Return the time by which a kernel takes longer in a block than in its samples."""
    if row.block_ms is None or row.time_ms is None:
        return 0.0
    return max(row.block_ms.p50 - max(row.time_ms.p50, row.host_ms or 0.0), 0.0)


def rejected(row: Row, reason: str) -> Row:
    """Return a row that says only why the row that a worker sent is not believed."""
    return Row(
        row.kernel,
        row.call,
        "error",
        reason,
        environment=row.environment,
        process=row.process,
        rounds=row.rounds,
        machine=row.machine,
    )
