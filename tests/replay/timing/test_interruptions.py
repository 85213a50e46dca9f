"""Interruptions of calls, from the times of simulated threads."""

import os
from pathlib import Path

import pytest

from replay.timing import interruptions
from replay.timing.interruptions import Interruptions
from replay.timing.statistics import speedup_between, summarize

MS = 1_000_000
"""Nanoseconds."""


def write(tasks: Path, **times: tuple[int, int]) -> None:
    """Set the milliseconds that each thread has run and waited."""
    for thread, (ran, waited) in times.items():
        (tasks / thread[1:]).mkdir(exist_ok=True)
        (tasks / thread[1:] / "schedstat").write_text(f"{ran * MS} {waited * MS} 7\n")


def test_interrupted_threads_spread_out(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    affinities = {0: {0, 1, 2, 3}, 10: {0, 1, 2, 3}, 11: {0, 1, 2, 3}}
    monkeypatch.setattr(interruptions, "core_siblings", lambda cpus: [[0, 1], [2, 3]])
    monkeypatch.setattr(os, "sched_getaffinity", affinities.__getitem__)
    monkeypatch.setattr(os, "sched_setaffinity", affinities.__setitem__)
    write(tmp_path, t10=(100, 5), t11=(50, 5), t12=(3, 0))
    watch = Interruptions(tmp_path)
    watch.begin_sample()
    watch.begin_call()
    write(tmp_path, t10=(110, 5), t11=(59, 5))
    assert not watch.interrupted(0.010)
    watch.begin_call()
    write(tmp_path, t10=(120, 5), t11=(62, 20))
    assert watch.interrupted(0.030)
    assert affinities == {0: {0, 1, 2, 3}, 10: {0}, 11: {2}}
    assert watch.end_sample() == pytest.approx(1 - 15 / 40)
    assert affinities[10] == affinities[11] == {0, 1, 2, 3}


def test_no_call_is_interrupted_without_proc(tmp_path: Path) -> None:
    watch = Interruptions(tmp_path / "nowhere")
    watch.begin_sample()
    watch.begin_call()
    assert not watch.interrupted(1.0)
    assert watch.end_sample() == 1.0


def test_interrupted_rounds_are_left_out_in_pairs() -> None:
    baseline = summarize([1.0] * 6 + [1.0, 40.0, 1.0], interrupted=[7])
    twice = summarize([2.0] * 6 + [90.0, 2.0, 2.0], interrupted=[6])
    assert (baseline.p90, baseline.n, len(baseline.samples)) == (1.0, 8, 9)
    found = speedup_between((baseline, twice))
    assert (found.ratio, found.low, found.high, found.verdict) == (0.5, 0.5, 0.5, "slow")


@pytest.mark.parametrize(
    ("rounds", "interrupted", "reason"),
    [(9, range(4), "interrupted"), (9, range(9), "interrupted"), (3, (), "too-few-rounds")],
)
def test_few_whole_rounds_are_inconclusive(rounds: int, interrupted: range, reason: str) -> None:
    one, other = (summarize([ms] * rounds, interrupted) for ms in (1.0, 2.0))
    found = speedup_between((one, other))
    assert (found.ratio, found.low, found.verdict, found.reason) == (
        0.5,
        None,
        "inconclusive",
        reason,
    )
