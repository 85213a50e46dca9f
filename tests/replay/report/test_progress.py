"""Finished work and the time left of scripted replays, with a clock that the test sets."""

import itertools
import logging
from collections.abc import Iterator, Mapping

import pytest
from rich.progress import Progress, ProgressColumn

from replay.bench.reported_stages import (
    DONE,
    FIRST_CALLS,
    FIRST_CALLS_DONE,
    LOADING,
    REFERENCE,
    TIMING,
)
from replay.distribution.pace import KernelWork, Pace
from replay.distribution.time_limit import TimeLimit
from replay.report.progress import NowColumn, TimeColumn
from tests.replay.cli.test_time_limit import Clock

Script = list[tuple[float, str, str]]
"""Stages of a replay: seconds, call and stage."""
ROUNDS = 10


def replayed(call: str, seconds: float, first_calls: Mapping[str, float | None]) -> Script:
    """Return the stages of a call; a kernel whose first call is None refuses the call.

    Args:
        seconds: time of the timing; the checks take 0.3 times as long, beside first calls.
    """
    ran = [name for name, first in first_calls.items() if first is not None]
    script = [(0.05 * seconds, call, stage) for stage in (LOADING, REFERENCE)]
    for name, first in first_calls.items():
        script.append((0.0, call, name))
        if first is not None:
            runs = [first, *[0.1 * seconds / len(ran)] * 2]
            script += [(each, call, name) for each in runs]
    script.append((0.0, call, TIMING))
    reports = [(seconds / len(ran) / (ROUNDS + 2), call, name) for name in ran]
    return [*script, *reports * (ROUNDS + 2), (0.0, call, DONE)]


def work(calls: list[str], kernels: str) -> KernelWork:
    """Return the work of kernels with one-letter names; a call's form is its first letter."""
    return KernelWork([*kernels], {call: call[0] for call in calls})


def played(pace: Pace, clock: Clock, script: Script) -> Iterator[float]:
    """Play a script; yield the seconds that remain of it, every tenth of a second."""
    end = clock.now + sum(seconds for seconds, *_ in script)
    for seconds, call, stage in script:
        pace.leave(call) if stage == DONE else pace.enter(call, stage)
        next_stage = clock.now + seconds
        while clock.now + 0.1 < next_stage:
            clock.now += 0.1
            yield end - clock.now
        clock.now = next_stage


ALIKE = [f"a{number}" for number in range(4)]
SIZES = {"a0": 3.0, "b0": 1.0, "b1": 4.0, "b2": 2.0, "a1": 1.0, "c0": 0.1}
EVEN = [replayed(call, 6.0, dict.fromkeys("rst") | {"x": 0.2, "y": 0.2}) for call in ALIKE]
COMPILING = [
    replayed("a0", 2.0, {"x": 30.0, "y": 36.0, "z": 24.0, "w": 28.0}),
    replayed("b0", 2.0, {"x": 30.0, "y": 36.0, "z": 24.0, "w": 28.0}),
    replayed("a1", 2.0, {"x": 0.2, "y": 0.2, "z": 0.2, "w": 0.2}),
]
SLOWNESS = {"a": 3.0, "b": 12.0, "c": 6.0}
"""Ratios of measured to expected seconds, by form."""
UNLIKE = [
    replayed(call, SLOWNESS[call[0]] * size, {"x": 0.1 * size, "y": 0.1})
    for call, size in SIZES.items()
]


@pytest.mark.parametrize(
    ("calls", "expected"),
    [
        (EVEN, dict.fromkeys(ALIKE, 1.0)),
        (COMPILING, {"a0": 1.0, "b0": 1.0, "a1": 1.0}),
        (UNLIKE, SIZES),
    ],
    ids=["even", "compiling", "of different sizes"],
)
def test_time_left_is_right_within_30_percent_after_a_third(
    calls: list[Script], expected: dict[str, float]
) -> None:
    clock, script = Clock(), [*itertools.chain(*calls)]
    kernels = "".join(dict.fromkeys(stage for *_, stage in script if len(stage) == 1))
    # The last kernel is a baseline that was not named.
    pace = Pace(expected, clock=clock, kernels=work([*expected], kernels[:-1]))
    total, begin, done = sum(seconds for seconds, *_ in script), clock.now, 0
    for truth in played(pace, clock, script):
        assert done <= pace.done < pace.total
        done, left = pace.done, pace.left()
        if total / 3 <= clock.now - begin and truth > 0.1 * total:
            assert left == pytest.approx(truth, rel=0.3)
    assert pace.done == pace.total == len(expected) * len(kernels)


def shown(column: ProgressColumn) -> str:
    progress = Progress()
    progress.add_task("")
    return str(column.render(progress.tasks[0]))


def test_work_at_hand_is_named() -> None:
    clock = Clock()
    pace = Pace({"a0": 1.0, "a1": 1.0}, clock=clock, kernels=work(["a0", "a1"], "xyz"))
    column = NowColumn(pace, "starting workers")
    seen = [(pace.done, shown(column))]
    for _ in played(pace, clock, replayed("a0", 6.0, {"x": 3.0, "y": None, "z": 0.5})):
        seen.append((pace.done, shown(column)))
    assert [*dict.fromkeys(seen)] == [
        (0, "starting workers"),
        (0, "a0: loading the call"),
        (0, "a0: computing the reference"),
        (0, "x on a0: first call"),
        (0, "x on a0: compiling"),
        (0, "x on a0: checking"),
        (1, "z on a0: first call"),
        (1, "z on a0: checking"),
        (2, "x on a0: timing"),
        (2, "z on a0: timing"),
    ]
    assert (pace.done, shown(column)) == (3, "z on a0: timing")


def test_time_left_is_shown_once_work_is_finished_and_ends_at_the_limit() -> None:
    clock = Clock()

    def ticking() -> float:
        clock.now += 1e-6
        return clock.now

    pace = Pace(dict.fromkeys("abcd", 1.0), clock=ticking, limit=TimeLimit(260, clock))
    for stage in (FIRST_CALLS, FIRST_CALLS_DONE):
        pace.enter("a", stage, "another GPU")
    pace.enter("a", "examining")
    clock.now += 63
    assert shown(TimeColumn(pace)) == "0:01:03"
    pace.leave("a")
    pace.enter("b", "examining")
    clock.now += 9
    assert shown(TimeColumn(pace)) == "0:03:00 left"
    clock.now += 1000
    assert (pace.done, shown(TimeColumn(pace))) == (1, "0:00:00 left")


def test_devices_compile_and_replay_together() -> None:
    clock = Clock()
    pace = Pace(dict.fromkeys(ALIKE, 1.0), 2, clock, work(ALIKE, "xy"))
    for device, kernel in (("GPU 0", "x"), ("GPU 1", "y")):
        for stage in (FIRST_CALLS, kernel, kernel):
            pace.enter("a0", stage, device)
    clock.now += 40
    assert pace.now == "y on a0, GPU 1: compiling"
    for device in ("GPU 0", "GPU 1"):
        pace.enter("a0", FIRST_CALLS_DONE, device)
    assert (pace.done, pace.left()) == (0, None)
    for calls, left in ((ALIKE[:2], 6.5), (ALIKE[2:], None)):
        scripts = [replayed(call, 5.0, {"x": 0, "y": 0}) for call in calls]
        for together in zip(*scripts, strict=True):
            for device, (_, call, stage) in enumerate(together):
                pace.leave(call) if stage == DONE else pace.enter(call, stage, f"GPU {device}")
            clock.now += together[0][0]
        assert pace.left() == (left if left is None else pytest.approx(left))
    assert pace.done == pace.total


def test_stages_of_calls_are_logged_by_time(caplog: pytest.LogCaptureFixture) -> None:
    clock = Clock()
    pace = Pace({"a": 1.0, "b": 1.0}, clock=clock)
    script = [(0.25, "a", LOADING), (1.0, "a", "x"), (0.5, "a", "y"), (2.0, "a", "x")]
    with caplog.at_level(logging.INFO, "replay"):
        list(played(pace, clock, [*script, (0, "a", DONE), (5.0, "b", "x"), (0, "b", DONE)]))
        pace.finish()
    assert caplog.messages == [
        "a took 3.8 s: 3.0 x, 0.5 y, 0.2 loading the call",
        "b took 5.0 s: 5.0 x",
        "2 calls took 8.8 s: 8.0 x, 0.5 y, 0.2 loading the call",
    ]
