"""The comparison of a row's samples with the blocks of calls that another process clocked."""

from __future__ import annotations

from dataclasses import dataclass, field, replace

from replay.isolation.block import BlockVerdict
from replay.rows.row import INTERRUPTED_BLOCKS, UNCONFIRMED, Row
from replay.timing.statistics import TOO_FAST, summarize

BETWEEN_MS = 0.05
"""Time by which a call in a block may be longer, because the work between calls empties processor
caches. A row that needs this allowance is compared by its blocks."""
NEIGHBOUR = 2.0
"""Ratio by which CPU work may differ between two processes and moments. In a virtual machine, a
neighbour on the same core halves its speed, which no process there can see."""
MOST_BLOCKS = 8
"""Maximum number of blocks. Other processes can only make a block longer, so the shortest block
counts."""
MOST_INTERRUPTED = 100
"""Sum of the call times of interrupted blocks, as a multiple of the row's time, above which blocks
end. A block should take about 20 ms, so these blocks took about two seconds."""
LEAST_QUIET = 3
"""Number of blocks without interruptions that are needed to contradict a row."""

LIMITED, BETWEEN_CALLS = "limited by launches", "limited by work between calls"
"""Start of the flag of a user's kernel that is compared by its blocks, on a GPU and on a CPU."""


@dataclass
class Blocks:
    """Blocks of calls of one kernel."""

    ms: list[float] = field(default_factory=list)
    """Time of a call in each block."""
    quiet: int = 0
    """Number of blocks that no other process interrupted."""
    interrupted_ms: float = 0.0
    """Sum of the call times of all interrupted blocks."""
    null_ms: float = 0.0
    """Largest `BlockVerdict.null_ms` of the blocks."""
    other_share: str = ""
    """Sentence about a sparse kernel that chose another share of the keys in a block, or empty."""

    def add(self, seen: BlockVerdict) -> None:
        self.ms.append(seen.call_ms)
        self.null_ms = max(self.null_ms, seen.null_ms)
        self.quiet += not seen.is_interrupted
        self.interrupted_ms += seen.is_interrupted * seen.call_ms

    def settle(self, claimed_ms: float) -> bool:
        """Return whether no further block is needed."""
        return (
            len(self.ms) == MOST_BLOCKS
            or min(self.ms) <= TOO_FAST * claimed_ms
            or self.interrupted_ms > MOST_INTERRUPTED * claimed_ms
        )


def with_blocks(row: Row, blocks: Blocks, overhead_ms: float = 0.0) -> Row:
    """Return a row with the time of its blocks, or with the status `error` if they contradict it.

    On a GPU, blocks include launches and the row's time does not. If launches take longer than a
    kernel, only its blocks can be compared.

    Args:
        overhead_ms: time by which calls of known kernels take longer in blocks than in samples.
    """
    if not blocks.ms:
        return row
    row = replace(row, block_ms=summarize(blocks.ms))
    # Known kernels do not falsify their samples, so noise must not make them errors.
    if not row.process or row.status != "ok" or row.time_ms is None:
        return row
    if blocks.other_share:
        return unconfirmed(row, blocks.other_share)
    times, host = row.time_ms, row.host_ms or 0.0
    shortest, claimed = min(blocks.ms), times.p50
    # A kernel may write inputs faster than the block without a kernel, whose time is subtracted.
    share = (shortest + blocks.null_ms) / max(shortest, claimed) - 1
    share = share if share > TOO_FAST - 1 else 0.0
    if shortest <= TOO_FAST * claimed:
        # A kernel could choose short samples for those rounds that are short for the baseline too.
        samples = [max(each, claimed / TOO_FAST) for each in times.samples]
        return replace(row, time_ms=summarize(samples, times.interrupted, share, times.control))
    row = replace(row, time_ms=replace(times, unconfirmed=share))
    limit = TOO_FAST * max(claimed, host) + BETWEEN_MS + overhead_ms
    if row.host_ms is None:
        limit = max(limit, NEIGHBOUR * (claimed + blocks.null_ms) - blocks.null_ms)
    if shortest <= limit:
        flag = (
            f"{LIMITED if host else BETWEEN_CALLS}: its time and speed-up come from blocks "
            f"({shortest:.3g} ms a call), compared with the baseline's blocks"
        )
    elif blocks.quiet < LEAST_QUIET:
        flag = INTERRUPTED_BLOCKS
    else:
        reason = (
            f"its samples say {max(claimed, host):.3g} ms a call; in blocks with new inputs, which "
            f"another process timed, a call took {shortest:.3g} ms or more"
        )
        return replace(row, status="error", reason=reason)
    return replace(row, flags=(*row.flags, flag))


def is_limited(row: Row) -> bool:
    """Return whether the row is compared by its blocks instead of its samples."""
    return any(flag.startswith((LIMITED, BETWEEN_CALLS)) for flag in row.flags)


def without_doubt(row: Row) -> Row:
    """Return the row without flags that its blocks took longer than its samples."""
    doubts = (LIMITED, BETWEEN_CALLS, INTERRUPTED_BLOCKS)
    return replace(row, flags=tuple(each for each in row.flags if not each.startswith(doubts)))


def unconfirmed(row: Row, why: str) -> Row:
    """Return the row with a flag, so that its time is not compared with others."""
    return replace(row, flags=(*row.flags, f"{UNCONFIRMED}: {why}"))


def overhead_ms(row: Row) -> float:
    """Return the time by which a kernel's call takes longer in blocks than in samples."""
    if row.block_ms is None or row.time_ms is None:
        return 0.0
    return max(row.block_ms.p50 - max(row.time_ms.p50, row.host_ms or 0.0), 0.0)


def rejected(row: Row, reason: str) -> Row:
    """Return an error row instead of a worker's row, with the reason for its rejection."""
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
