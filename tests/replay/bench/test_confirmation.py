"""Rows are compared with the blocks of calls that confirm them, and with their baseline."""

from dataclasses import replace

import pytest

from replay.bench.confirmation import BETWEEN_CALLS, LIMITED, MOST_BLOCKS, Blocks, with_blocks
from replay.bench.speedups import with_speedups
from replay.isolation.block import BlockVerdict
from replay.rows.row import Row
from replay.timing.statistics import summarize
from tests.factories import row


def blocks_of(*ms: float, interrupted: int = 0, null_ms: float = 0.0) -> Blocks:
    """Return blocks; the first `interrupted` blocks were interrupted."""
    blocks = Blocks()
    for number, each in enumerate(ms):
        blocks.add(BlockVerdict(each, number < interrupted, "", null_ms))
    return blocks


@pytest.mark.parametrize(
    ("claimed", "host", "blocks", "process", "found"),
    [
        (1.0, None, blocks_of(1.3, 9.0), "mine.py", ""),
        (1.0, None, blocks_of(*[1.9] * 4), "mine.py", BETWEEN_CALLS),
        (1.0, None, blocks_of(*[2.1] * 4), "mine.py", "error"),
        # The whole block may be twice as slow, with the work between calls.
        (1.0, None, blocks_of(*[2.4] * 4, null_ms=0.5), "mine.py", BETWEEN_CALLS),
        (1.0, 0.1, blocks_of(*[1.36] * 4), "mine.py", "error"),
        (0.001, None, blocks_of(*[0.4] * 4), "mine.py", "error"),
        # Samples of known kernels are believed.
        (0.001, None, blocks_of(*[0.4] * 4), "", ""),
        # Interruptions only make blocks longer, so one short block is enough.
        (1.0, None, blocks_of(9.0, 9.0, 1.2, interrupted=2), "mine.py", ""),
        (1.0, None, blocks_of(9.0, 9.0, 2.2, interrupted=2), "mine.py", "unconfirmed"),
        (1.0, None, blocks_of(9.0, *[2.2] * 4, interrupted=1), "mine.py", "error"),
        # A short call is limited by launches.
        (0.01, 0.2, blocks_of(0.25), "mine.py", LIMITED),
        (0.01, 0.2, blocks_of(0.25), "", ""),
        (0.01, None, blocks_of(0.05), "mine.py", BETWEEN_CALLS),
        (0.01, 0.2, blocks_of(*[0.4] * 4), "mine.py", "error"),
    ],
    ids=str,
)
def test_row_is_compared_with_its_shortest_block(
    claimed: float, host: float | None, blocks: Blocks, process: str, found: str
) -> None:
    row_of = row(ms=claimed, host_ms=host, process=process)
    confirmed = with_blocks(row_of, blocks)
    assert confirmed.block_ms == summarize(blocks.ms)
    if found == "error":
        says, took = max(claimed, host or 0.0), min(blocks.ms)
        assert confirmed.status == "error"
        assert confirmed.reason.startswith(f"its samples say {says:.3g} ms a call; ")
        assert f" a call took {took:.3g} ms or more" in confirmed.reason
    else:
        assert confirmed.status == "ok"
        assert [flag.partition(":")[0] for flag in confirmed.flags] == [found] * bool(found)
    assert confirmed.is_unconfirmed == (found == "unconfirmed")


def test_no_sample_claims_what_the_median_may_not() -> None:
    """The median of ratios could be that of tiny samples, although the median sample is true."""
    found = with_blocks(row(ms=[0.01, 0.01, 2.6, 3.0, 3.0], process="mine.py"), blocks_of(1.3))
    assert found.time_ms.samples == (2.0, 2.0, 2.6, 3.0, 3.0)


def test_row_that_is_wrong_or_not_timed_keeps_its_status() -> None:
    for each in (row(status="inaccurate", ms=0.001), row(status="not-timed")):
        found = with_blocks(each, blocks_of(5.0, 5.0))
        assert (found.status, found.flags) == (each.status, ())
    assert with_blocks(row(ms=1.0), Blocks()) == row(ms=1.0)


def test_blocks_run_until_they_decide() -> None:
    assert blocks_of(9.0, 1.3).settle(1.0)
    assert not blocks_of(*[9.0] * (MOST_BLOCKS - 1)).settle(1.0)
    assert blocks_of(*[9.0] * MOST_BLOCKS).settle(1.0)
    # On a busy machine a block may take seconds; if nothing interrupted it, it is an error.
    assert blocks_of(90.0, 90.0, interrupted=2).settle(1.0)
    assert not blocks_of(90.0, 90.0, interrupted=1).settle(1.0)


BASELINE = row("base", ms=[2.0] * 10)


def speedup_of(*rows: Row, baseline: str = "base") -> tuple[str, float] | None:
    """Return the speed-up of the first row: the kernel that it is over, and the ratio."""
    found = with_speedups(rows, baseline)
    assert [each.kernel for each in found] == [each.kernel for each in rows]
    speedup = found[0].speedup
    return None if speedup is None else (speedup.vs, round(speedup.ratio, 6))


def confirmed(
    ms: float, blocks: list[float], file: str = "mine.py", name: str = "mine", interrupted: int = 0
) -> Row:
    made = row(name, ms=[ms] * 10, host_ms=1.0, process=file)
    return with_blocks(made, blocks_of(*blocks, interrupted=interrupted))


def test_speed_up_is_over_the_baseline() -> None:
    assert speedup_of(row(ms=[1.0] * 10, environment="that"), BASELINE) == ("base", 2.0)
    assert speedup_of(BASELINE, row(ms=1.0)) is None


@pytest.mark.parametrize(
    "baseline",
    [
        replace(BASELINE, kernel="another"),
        replace(BASELINE, status="error"),
        replace(BASELINE, flags=("unconfirmed: …",)),
        row("base", status="not-timed"),
    ],
    ids=str,
)
def test_speed_up_needs_a_confirmed_baseline(baseline: Row) -> None:
    assert speedup_of(row(ms=1.0), baseline) is None


def test_interrupted_row_has_no_speed_up() -> None:
    interrupted = confirmed(0.1, [9.0] * 6, interrupted=6)
    assert speedup_of(interrupted, BASELINE) is None


def test_short_kernel_of_a_user_is_compared_by_its_blocks() -> None:
    """Its samples are a claim, which blocks cannot confirm."""
    base = replace(with_blocks(BASELINE, blocks_of(*[4.0] * 8)), tflops=3.0)
    limited = replace(confirmed(0.1, [1.0] * 8), tflops=900.0)
    assert speedup_of(limited, base) == ("base", 4.0)
    found, _ = with_speedups([limited, base], "base")
    assert (found.time_ms.p50, found.tflops) == (0.5, 12.0)
    assert found.speedup.verdict == "fast"
    # A known kernel's samples are believed.
    assert speedup_of(confirmed(0.1, [1.0], "", "known"), base) == ("base", 20.0)


@pytest.mark.parametrize(("blocks", "interrupted"), [([9.0] * 8, 0), ([30.0] * 6, 6)], ids=str)
@pytest.mark.parametrize("ms", [4.0, 1.0])
def test_slow_claim_needs_no_confirmation(ms: float, blocks: list[float], interrupted: int) -> None:
    mine = row("mine", ms=[ms] * 10, process="mine.py")
    doubted = with_blocks(mine, blocks_of(*blocks, interrupted=interrupted), overhead_ms=8.0)
    assert len(doubted.flags) == 1
    (found, _) = with_speedups([doubted, with_blocks(BASELINE, blocks_of(*[4.0] * 8))], "base")
    is_slow = ms > 2.0
    assert found.is_unconfirmed == (interrupted > 0 and not is_slow)
    assert (found.flags == ()) == is_slow
    if is_slow:
        assert (found.speedup.ratio, found.speedup.verdict) == (0.5, "slow")


@pytest.mark.parametrize(
    ("null_ms", "ms", "low"),
    [
        (0.25, [1.0] * 10, 2.0),
        (0.4, [1.0] * 10, 2.0 / 1.4),
        (2.0, [1.0] * 10, 1.3),  # a row's time may always be 1.3 times too short
        (2.0, [2.5] * 10, 0.8),
    ],
    ids=str,
)
def test_interval_includes_what_may_be_hidden(null_ms: float, ms: list[float], low: float) -> None:
    """A kernel can write its inputs faster than the block without a kernel."""
    mine = with_blocks(row("mine", ms=ms, process="mine.py"), blocks_of(1.0, null_ms=null_ms))
    compared, _ = with_speedups([mine, BASELINE], "base")
    found, flags = compared.speedup, compared.flags
    assert (found.low, found.high) == pytest.approx((low, 2.0 / ms[0]))
    assert bool(flags) == (low < 2.0 / ms[0])


@pytest.mark.parametrize(
    "baseline",
    [
        replace(BASELINE, kernel="another"),
        BASELINE,  # without blocks
        confirmed(0.1, [0.8] * 8, "other.py", "base"),
    ],
    ids=["none", "no blocks", "a claim"],
)
def test_limited_kernel_is_unconfirmed_without_a_baselines_blocks(baseline: Row) -> None:
    limited = confirmed(0.1, [0.8] * 8)
    assert speedup_of(limited, baseline) is None
    assert with_speedups([limited, baseline], "base")[0].is_unconfirmed


def test_few_blocks_give_no_verdict() -> None:
    base = with_blocks(BASELINE, blocks_of(*[4.0] * 8))
    (found, _) = with_speedups([confirmed(0.1, [0.8] * 2), base], "base")
    assert found.speedup.verdict == "inconclusive"
