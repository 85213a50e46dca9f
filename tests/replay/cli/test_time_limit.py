"""Runs with `--max-time`, on a clock that the test sets."""

import argparse
import contextlib
import json
import threading
from pathlib import Path
from typing import Any

import pytest

from replay.cli.shared_options import duration
from replay.distribution.pace import Pace
from replay.distribution.time_limit import TimeLimit
from tests.in_this_process import RunCli

QUICK = ("--rounds", "3", "--device", "cpu")


class Clock:
    now = 100.0

    def __call__(self) -> float:
        return self.now


@pytest.mark.parametrize(
    ("given", "seconds"), [("10m", 600), ("1h30m", 5400), ("1h5s", 3605), ("45", 45)]
)
def test_duration_is_read_in_seconds(given: str, seconds: float) -> None:
    assert duration(given) == seconds


@pytest.mark.parametrize("given", ["", "m", "1.5h", "-3", "0m", "²"])
def test_invalid_duration_is_refused(given: str) -> None:
    with pytest.raises(argparse.ArgumentTypeError, match=r"must be|is empty"):
        duration(given)


def test_work_is_stopped_when_the_time_is_over() -> None:
    clock = Clock()
    late = TimeLimit(60, clock)
    clock.now += 61
    is_first_done = threading.Event()
    with late.watched(is_first_done.is_set):
        assert not late.stopped.wait(0.01)
        is_first_done.set()
        assert late.stopped.wait(60)
    for early in (TimeLimit(60, clock), TimeLimit(None, clock)):
        with early.watched(is_first_done.is_set):
            pass
        assert not early.stopped.is_set()


@pytest.fixture
def without_workers(monkeypatch: pytest.MonkeyPatch) -> None:
    """Run everything in this process, because workers take seconds to start."""
    monkeypatch.setattr("replay.api.session._first_processes", lambda *_: contextlib.nullcontext())


@pytest.fixture
def run_with_a_clock(run_cli: RunCli, monkeypatch: pytest.MonkeyPatch) -> RunCli:
    """`run(12, 5.0, …)` has a limit of 12 seconds, expects five for each call, and takes four."""

    def run(seconds: int, expected: float, *arguments: str) -> tuple[int, str, str]:
        clock = Clock()

        class Limit(TimeLimit):
            def __init__(self, asked: float | None) -> None:
                super().__init__(asked, clock)

        class Throughput(Pace):
            def __init__(self, *arguments: Any, **options: Any) -> None:
                super().__init__(*arguments, **options, clock=clock)

            def leave(self, call: str) -> None:
                clock.now += 4.0
                super().leave(call)

        def estimates(calls: list[object], *_: object) -> dict[str, float]:
            return {call.name: expected for call in calls}  # type: ignore[attr-defined]

        monkeypatch.setattr("replay.api.session.TimeLimit", Limit)
        monkeypatch.setattr("replay.api.session.Pace", Throughput)
        monkeypatch.setattr("replay.distribution.estimate.expected_seconds", estimates)
        return run_cli(*arguments, "--max-time", str(seconds))

    return run


@pytest.mark.usefixtures("without_workers")
def test_representative_calls_come_first_and_resume_completes_them(
    run_with_a_clock: RunCli, run_cli: RunCli, recorded: Path, tmp_path: Path
) -> None:
    rows = tmp_path / "rows.jsonl"
    arguments = ("--dir", str(recorded), *QUICK, "--kernels", "torch-flash", "--json", str(rows))

    def calls() -> list[str]:
        return [json.loads(line)["call"]["name"] for line in rows.read_text().splitlines()]

    code, _, err = run_with_a_clock(9, 4.0, *arguments)
    assert code == 0
    assert "3 calls × 1 kernel on " in err
    assert ": about 12 s (a guess)" in err
    assert "; the most representative calls first, for 9 s\n" in err
    said = "replay: to end within 9 s: 1 of 3 calls left out; the same command with"
    assert f"{said} --resume completes {rows}" in err
    assert calls() == ["model-000000"] * 2 + ["model-000002"] * 2
    before = rows.read_text().splitlines()
    code, _, err = run_cli(*arguments, "--resume")
    assert code == 0
    assert "replay: 2 calls are kept as measured before, with the rounds, seconds," in err
    assert "; 1 to go\n" in err
    assert "left out" not in err
    assert calls() == [f"model-{index:06d}" for index in range(3) for _ in range(2)]
    after = rows.read_text().splitlines()
    assert [*after[:2], *after[4:]] == before
    assert "; 0 to go\n" in run_cli(*arguments, "--resume")[2]
    assert rows.read_text().splitlines() == after


@pytest.mark.usefixtures("without_workers")
@pytest.mark.parametrize(("seconds", "names"), [(1, ["000000"]), (9, ["000000", "000002"])])
def test_wrong_estimate_leaves_out_no_call(
    run_with_a_clock: RunCli, recorded: Path, tmp_path: Path, seconds: int, names: list[str]
) -> None:
    rows = tmp_path / "rows.jsonl"
    arguments = ("--dir", str(recorded), *QUICK, "--kernels", "torch-math", "--json", str(rows))
    code, _, err = run_with_a_clock(seconds, 1e6, *arguments)
    assert code == 0
    first = f"the first call took 4 s, longer than the limit of {seconds} s: 2 of 3 calls left out"
    assert (first in err) == (seconds < 4)
    found = [json.loads(line)["call"]["name"] for line in rows.read_text().splitlines()]
    assert found == [f"model-{name}" for name in names]


@pytest.mark.parametrize("seconds", [0.0, 1e9])
def test_long_replay_is_announced_on_a_terminal(
    run_cli: RunCli, monkeypatch: pytest.MonkeyPatch, seconds: float
) -> None:
    shape = ("random", "-hq", "2", "-sq", "64", "-d", "32", "--dtype", "float32")
    arguments = (*shape, *QUICK, "--kernels", "torch-math", "--in-process")
    monkeypatch.setattr("replay.api.session.LONG_SECONDS", seconds)
    monkeypatch.setattr("sys.stderr.isatty", lambda: True)
    err = run_cli(*arguments)[2]
    assert ("replay random: 1 call × 1 kernel on " in err) == (seconds == 0.0)
    assert "took" not in err
