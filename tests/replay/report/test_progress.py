"""Estimates of the time left, with a clock that the test sets."""

import logging

import pytest
from rich.progress import Progress
from rich.text import Text

from replay.distribution.pace import Pace
from replay.report.progress import TimeColumn
from tests.replay.cli.test_time_limit import Clock


def pace_of(total: int, clock: Clock, at_a_time: int = 1) -> Pace:
    return Pace({f"call {call}": 1.0 for call in range(total)}, at_a_time, clock=clock)


def at_work(calls: int, total: int, first: float = 10.0, other: float = 4.0) -> tuple[Pace, Clock]:
    """Return a pace at the beginning of the last of `calls` calls, and its clock."""
    clock = Clock()
    pace = pace_of(total, clock)
    clock.now += 3.0  # workers start
    for call in range(calls):
        pace.enter(f"call {call}", "loading the call")
        if call < calls - 1:
            clock.now += first if call == 0 else other
            pace.leave(f"call {call}")
    return pace, clock


def shown(pace: Pace) -> str:
    progress = Progress()
    progress.add_task("")
    found = TimeColumn(pace).render(progress.tasks[0])
    assert isinstance(found, Text)
    return found.plain


def test_nothing_is_said_of_the_time_left_before_a_call_is_finished() -> None:
    pace, clock = at_work(1, total=5)
    clock.now += 60
    assert pace.left() is None
    assert shown(pace) == "0:01:03"


def test_the_first_call_counts_until_there_is_another() -> None:
    assert at_work(2, total=5)[0].left() == pytest.approx(4 * 10.0)
    assert at_work(3, total=5)[0].left() == pytest.approx(3 * 4.0)


def test_the_time_left_runs_down_and_waits_for_a_slow_call() -> None:
    pace, clock = at_work(4, total=6)
    clock.now += 1.5
    assert pace.left() == pytest.approx(2.5 + 2 * 4.0)
    assert shown(pace) == "0:00:10 left"
    clock.now += 1000
    assert pace.left() == pytest.approx(2 * 4.0)
    clock.now += 1000
    assert pace.left() == pytest.approx(2 * 4.0)


def test_calls_take_their_share_of_what_was_expected() -> None:
    clock = Clock()
    pace = Pace({"small": 1.0, "large": 5.0, "huge": 20.0}, clock=clock)
    assert pace.scale is None
    pace.enter("small", "loading the call")
    clock.now += 2
    pace.leave("small")
    assert (pace.left(), pace.is_reliable) == (pytest.approx(2 * 25), False)
    pace.enter("large", "loading the call")
    clock.now += 15
    pace.leave("large")
    assert (pace.scale, pace.left()) == (3.0, pytest.approx(3 * 20))


def test_calls_on_two_devices_are_at_work_together() -> None:
    clock = Clock()
    pace = pace_of(6, clock, at_a_time=2)
    for first, second in ((0, 1), (2, 3)):
        pace.enter(f"call {first}", "torch-math on GPU 0")
        pace.enter(f"call {second}", "torch-math on GPU 1")
        clock.now += 30 if first == 0 else 8
        pace.leave(f"call {second}")
        clock.now += 2
        pace.leave(f"call {first}")
    assert pace.done == 4
    assert pace.scale == pytest.approx(9.0)
    assert pace.left() == pytest.approx(2 * 9.0 / 2)
    pace.enter("call 4", "torch-math on GPU 0")
    clock.now += 6
    assert pace.left() == pytest.approx((3.0 + 9.0) / 2)
    assert pace.stages == {"torch-math on GPU 0": 42.0, "torch-math on GPU 1": 38.0}


def test_stages_of_calls_are_logged_by_time(caplog: pytest.LogCaptureFixture) -> None:
    clock = Clock()
    pace = Pace({"a": 1.0, "b": 1.0}, clock=clock)
    with caplog.at_level(logging.INFO, "replay"):
        for call, stage, seconds in (
            ("a", "loading the call", 0.25),
            ("a", "torch-math", 1.0),
            ("a", "torch-flash", 0.5),
            ("a", "torch-math", 2.0),
            ("b", "torch-math", 5.0),
        ):
            if call == "b" and not pace.done:
                pace.leave("a")
            pace.enter(call, stage)
            clock.now += seconds
        pace.leave("b")
        pace.finish()
    assert caplog.messages == [
        "a took 3.8 s: 3.0 torch-math, 0.5 torch-flash, 0.2 loading the call",
        "b took 5.0 s: 5.0 torch-math",
        "2 calls took 8.8 s: 8.0 torch-math, 0.5 torch-flash, 0.2 loading the call",
    ]
