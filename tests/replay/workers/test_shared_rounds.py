"""Workers that share rounds, and what a crash, a bug or a forged row of one of them costs."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence
from dataclasses import asdict, replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest
import torch

from replay.bench.runner import DONE, LOADING, TIMING
from replay.bench.settings import Settings
from replay.kernels.registry import Kernel
from replay.rows.row import Row
from replay.workers.conversation import DISTURBS, MAXIMUM_DEATHS
from replay.workers.environment_options import WorkerError
from replay.workers.environments import Environment, Worker
from replay.workers.judge_process import JudgeProcess
from replay.workers.process import CannotStart, Process
from replay.workers.shared_rounds import NOT_ISOLATED, replay_in_workers
from tests.factories import call_facts, kernel, made_workload, row
from tests.replay.workers.scripted import Scripted, died

MACHINE = {"device": "a GPU"}
CALL = {"call": {"name": "call", "model": "model"}, "machine": MACHINE, "baseline": "torch-default"}
WORKLOAD = made_workload("call", lambda device: pytest.fail("loaded here"))


def sent(name: str, **fields: Any) -> dict[str, Any]:
    usual = {"call": {"name": "call"}, "status": "ok", "machine": MACHINE}
    return {"row": {"kernel": name, **usual, **fields}}


def timed(name: str, *ms: float) -> dict[str, Any]:
    return {"row": asdict(row(name, call_facts(), ms))}


BASELINE = sent("torch-default")
FIRST = [CALL, {"rounds": 0}]
ABC = [kernel(name) for name in "abc"]


def mine(number: int | str = "") -> Kernel:
    return kernel(f"mine{number}", source=f"mine{number}.py")


def worker_of_mine(*scripts: Sequence[Any], number: int | str = "") -> Scripted:
    return Scripted(*scripts, name=f"mine{number}.py")


Replay = Callable[..., list[Row]]


@pytest.fixture
def replay(quick: Settings, monkeypatch: pytest.MonkeyPatch) -> Replay:
    """`replay(kernels, process, …, calls=1)` returns the rows of scripted processes.

    Kernels run in `this`, or a dictionary names their environments.
    """
    believing = SimpleNamespace(confirmed=lambda row: row)
    monkeypatch.setattr("replay.workers.conversation.CallEvidence", lambda *_: believing)

    def run(
        kernels: list[Kernel] | dict[str, list[Kernel]],
        *processes: Scripted,
        calls: int = 1,
        gpu: Any = None,
        **changes: Any,
    ) -> list[Row]:
        judge = SimpleNamespace(shared_file=-1, expect=lambda *_: None)
        judge.probe_ms = None if gpu is None else gpu.probe_ms
        environments: dict[str, Environment] = {}
        for each in processes:
            each.others = [other for other in processes if other is not each]
            process = cast("Process", each)
            own = Environment(each.environment, "python", 5, process)
            own = environments.setdefault(each.environment, own)
            own._workers.setdefault(each.name, Worker(each.environment, each.name, process))
        by_place = kernels if isinstance(kernels, dict) else {"this": kernels}
        used = replace(quick, **changes)
        found = list(
            replay_in_workers(
                [WORKLOAD] * calls, by_place, used, environments, cast("JudgeProcess", judge)
            )
        )
        assert not any(each.scripts for each in processes)
        return found

    return run


def test_crash_costs_one_row_in_its_place(replay: Replay) -> None:
    process = Scripted(
        [{"at": LOADING}, CALL, {"at": "a"}, {"at": "b"}, died("b")],
        [*FIRST, sent("a"), sent("c"), BASELINE],
    )
    rows = replay(ABC, process)
    assert process.kernels() == [["a", "b", "c"], ["a", "c"]]
    assert process.requests[1]["options"]["excluded"] == ("b",)
    found = [(row.kernel, row.status) for row in rows]
    assert found == [("a", "ok"), ("b", "crash"), ("c", "ok"), ("torch-default", "ok")]
    assert (rows[1].reason, rows[1].log) == ("gone", "its last words")
    assert rows[1].call.model == "model"
    assert all(row.machine.device == "a GPU" for row in rows)


@pytest.mark.parametrize(
    ("wrong", "named"),
    [
        ({"status": "fine"}, "status is 'fine'"),
        ({"no_such_field": 1}, "KeyError: 'no_such_field'"),
        ({"time_ms": [1.0]}, "AttributeError"),
        ({}, "AttributeError"),
    ],
    ids=str,
)
def test_unreadable_row_costs_only_itself(
    replay: Replay, wrong: dict[str, Any], named: str
) -> None:
    of_b: dict[str, Any] = sent("b", **wrong) if wrong else {"row": ["b"]}
    rows = replay(ABC, Scripted([*FIRST, sent("a"), of_b, sent("c")]))
    (refused,) = [row for row in rows if row.status == "error"]
    assert len(rows) == 3
    assert refused.reason.startswith("its worker sent an invalid row: ")
    assert named in refused.reason


@pytest.mark.parametrize("stage", [TIMING, ""])
def test_crash_without_a_kernel_costs_the_call(replay: Replay, stage: str) -> None:
    (lost,) = replay(ABC, Scripted([died(stage)]))
    assert (lost.kernel, lost.status) == ("", "crash")
    assert lost.reason == f"call: gone while {stage or 'starting'}"


def test_crash_while_timing_on_a_gpu_is_located_first(replay: Replay) -> None:
    """On a GPU, samples are only enqueued, so the crash may come from a kernel before `c`."""
    process = Scripted(
        [CALL, {"at": TIMING}, {"at": "c"}, died("c")],
        [CALL, {"at": TIMING}, {"at": "b"}, died("b")],
        [*FIRST, sent("a"), sent("c")],
    )
    rows = replay(ABC, process, device=torch.device("cuda"))
    synchronous = [request["options"]["synchronous"] for request in process.requests]
    assert synchronous == [False, True, True]
    assert process.kernels() == [["a", "b", "c"], ["a", "b", "c"], ["a", "c"]]
    assert [row.status for row in rows] == ["ok", "crash", "ok"]


def test_kernel_is_given_up_after_three_crashes(replay: Replay) -> None:
    crash, alive = [CALL, {"at": "b"}, died("b")], [*FIRST, sent("a"), sent("c")]
    process = Scripted(*[crash, alive] * MAXIMUM_DEATHS, alive)
    rows = replay(ABC, process, calls=MAXIMUM_DEATHS + 1)
    assert process.kernels()[-1] == ["a", "c"]
    assert not process.requests[-1]["options"]["synchronous"]
    given_up = "gone; not tried again, because it ended 3 workers"
    reasons = [row.reason for row in rows if row.kernel == "b"]
    assert reasons == ["gone"] * (MAXIMUM_DEATHS - 1) + [given_up] * 2


def test_unreadable_call_is_read_once_in_all_environments(replay: Replay) -> None:
    first = Scripted([{"unreadable": "cut short"}], [*FIRST, sent("a"), BASELINE])
    other = Scripted([*FIRST, sent("a")], environment="that")
    rows = replay({"this": ABC[:1], "that": ABC[:1]}, first, other, calls=2)
    assert [(row.kernel, row.environment) for row in rows] == [
        ("", "this"), ("a", "this"), ("a", "that"), ("torch-default", "this"),
    ]  # fmt: skip
    assert rows[0].reason == "cut short"


def test_crash_during_rounds_makes_all_workers_begin_them_again(replay: Replay) -> None:
    """One user's file crashes; another sampled a round more or less, whatever the order."""
    shared = Scripted([CALL, {"rounds": 4}, sent("a"), BASELINE])
    dying = worker_of_mine([CALL, {"rounds": 4, "dies_at": 1}], [*FIRST])
    slow = worker_of_mine([CALL, {"rounds": 3}, sent("mine1")], number=1)
    rows = replay([ABC[0], mine(), mine(1)], shared, dying, slow, rounds=4)
    assert (dying.turns, shared.turns[-4:], slow.turns[-3:]) == ([0, 1], [0, 1, 2, 3], [0, 1, 2])
    assert dying.requests[1]["options"]["excluded"] == ("mine",)
    assert [row.status for row in rows] == ["ok", "crash", "ok", "ok"]
    assert [row.process for row in rows] == ["", "mine.py", "mine1.py", ""]
    assert len({row.rounds for row in rows}) == 1


def test_worker_without_another_never_calls_before_its_turn(replay: Replay) -> None:
    alone = Scripted([CALL, {"rounds": 3}, sent("a")])
    replay(ABC[:1], alone)
    assert (alone.turns, alone.after_another) == ([0, 1, 2], [False] * 3)
    shared, other = Scripted([CALL, {"rounds": 9}]), worker_of_mine([CALL, {"rounds": 9}])
    replay([ABC[0], mine()], shared, other, rounds=9)
    flags = shared.after_another + other.after_another
    # The very first turn follows no other; a worker may also have the last and the next turn.
    assert 9 < sum(flags) < 18


def test_crash_after_the_rounds_repeats_them(replay: Replay) -> None:
    """The worker whose rows are complete begins again; the worker that waits just goes on."""
    done = [[CALL, {"rounds": 2}, sent("a", reason=each), BASELINE] for each in ("old", "new")]
    shared = Scripted(*done)
    dying = worker_of_mine([CALL, {"rounds": 2}, {"at": "mine"}, died("mine")], [*FIRST])
    waiting = worker_of_mine([CALL, {"rounds": 2}, sent("mine1")], number=1)
    rows = replay([ABC[0], mine(), mine(1)], shared, dying, waiting)
    assert [row.status for row in rows] == ["ok", "crash", "ok", "ok"]
    assert rows[0].reason == "new"
    assert shared.turns == waiting.turns == [0, 1, 0, 1]
    assert [len(each.requests) for each in (shared, dying, waiting)] == [2, 2, 1]


@pytest.mark.parametrize("stage", ["", DONE])
def test_worker_that_dies_in_no_kernel_gets_no_further_turn(replay: Replay, stage: str) -> None:
    shared = Scripted([CALL, {"rounds": 3}, BASELINE])
    at_a_turn = worker_of_mine([CALL, {"rounds": 3, "dies_at": 1, "at": stage}])
    at_the_end = worker_of_mine([CALL, {"rounds": 3}, died(stage)], number=1)
    rows = replay([mine(), mine(1)], shared, at_a_turn, at_the_end)
    assert at_a_turn.turns == [0, 1]
    assert shared.turns == at_the_end.turns == [0, 1, 2]
    assert [row.status for row in rows] == ["crash", "crash", "ok"]


def test_more_workers_than_fit_share_rounds_in_groups(replay: Replay) -> None:
    first, more = [CALL, {"rounds": 2}, sent("a"), BASELINE], [CALL, {"rounds": 2}, BASELINE]
    shared = Scripted(first, more, more)
    others = [worker_of_mine([CALL, {"rounds": 2}, sent(f"mine{n}")], number=n) for n in range(7)]
    rows = replay([ABC[0], *map(mine, range(7))], shared, *others)
    # Only the baseline is timed in every group; its first row is kept.
    assert shared.kernels() == [["a"], [], []]
    assert [(row.kernel, row.rounds) for row in rows] == [
        ("a", "1"),
        *((f"mine{n}", str(1 + n // 3)) for n in range(7)),
        ("torch-default", "1"),
    ]
    assert not shared.closed_after
    # Workers of other groups keep no copy of the call.
    assert [1 in each.closed_after for each in others] == [True] * 6 + [False]


class Graphics:
    """GPU of scripted workers; a process may leave work there until it is closed."""

    def __init__(self, *busy: Scripted, hidden: int = 0) -> None:
        self.left_by: Scripted | None = None
        self.hidden = 0
        """Number of probes that do not notice the work, because it begins later."""
        for process in busy:
            tell, close = process.tell, process.close

            def leave(process: Scripted = process, tell: Any = tell, **message: Any) -> None:
                tell(**message)
                self.left_by, self.hidden = process, hidden

            def end(close: Any = close) -> None:
                close()
                self.left_by = None

            process.tell, process.close = leave, end  # type: ignore[method-assign]

    def probe_ms(self, _: Settings) -> float:
        self.hidden -= 1
        return 1.0 if self.left_by is None or self.hidden >= 0 else 2.0


GPU = torch.device("cuda")


@pytest.mark.parametrize("on_gpu", [True, False])
def test_worker_whose_work_goes_on_loses_its_rows(replay: Replay, on_gpu: bool) -> None:
    """Its work goes on on the GPU, or its processes although they were stopped."""
    two_rounds = [CALL, {"rounds": 2}]
    shared = Scripted([*two_rounds, sent("a"), BASELINE], [*FIRST, sent("a"), BASELINE])
    honest = worker_of_mine([*two_rounds, sent("mine1")], [*FIRST, sent("mine1")], number=1)
    busy = worker_of_mine(*[two_rounds] * MAXIMUM_DEATHS)
    busy.goes_on = not on_gpu
    device = {"device": GPU, "gpu": Graphics(busy)} if on_gpu else {}
    rows = replay([ABC[0], mine(), mine(1)], shared, busy, honest, calls=2, **device)
    assert [row.status for row in rows] == ["ok", "error", "ok", "ok"] * 2
    assert rows[1].reason == rows[5].reason == DISTURBS
    assert len(busy.requests) == MAXIMUM_DEATHS
    assert shared.turns[-2:] == honest.turns[-2:] == [0, 1]


def test_worker_whose_work_begins_in_anothers_turn_loses_its_rows(replay: Replay) -> None:
    two_rounds = [CALL, {"rounds": 2}]
    shared = Scripted([*two_rounds, sent("a"), BASELINE])
    busy = worker_of_mine(*[two_rounds] * MAXIMUM_DEATHS)
    gpu = Graphics(busy, hidden=1)
    rows = replay([ABC[0], mine()], shared, busy, device=GPU, gpu=gpu)
    assert [row.status for row in rows] == ["ok", "error", "ok"]
    assert rows[1].reason == DISTURBS


def test_busy_gpu_accuses_no_worker(replay: Replay) -> None:
    """Every probe after the first is slow, also when the user's worker has ended."""
    two_rounds = [CALL, {"rounds": 2}]
    shared = Scripted([*two_rounds, sent("a"), BASELINE])
    honest = worker_of_mine(two_rounds, [*two_rounds, sent("mine")])
    times = itertools.chain([1.0], itertools.repeat(2.0))
    gpu = SimpleNamespace(probe_ms=lambda _: next(times))
    rows = replay([ABC[0], mine()], shared, honest, device=GPU, gpu=gpu)
    assert [row.status for row in rows] == ["ok"] * 3
    assert honest.turns[-2:] == [0, 1]


def test_only_rounds_with_a_users_kernel_are_not_isolated(
    replay: Replay, monkeypatch: pytest.MonkeyPatch
) -> None:
    for is_possible, with_mine in ((False, True), (False, False), (True, True)):
        monkeypatch.setattr("replay.isolation.processes.IS_POSSIBLE", is_possible)
        shared, own = Scripted([*FIRST, sent("a")]), worker_of_mine([*FIRST, sent("mine")])
        known = replay(ABC[:1], shared) if not with_mine else []
        rows = known or replay([ABC[0], mine()], shared, own)
        flags = (NOT_ISOLATED,) if with_mine and not is_possible else ()
        assert [row.flags for row in rows] == [flags] * len(rows)


@pytest.mark.parametrize(
    "forged",
    [[{"taken": True, "enough": False}], [{"rounds": 1}, {"rounds": 9}], [{"rounds": True}]],
    ids=str,
)
@pytest.mark.parametrize("where", ["before", "at the end"])
def test_worker_with_forged_turns_loses_its_rows_only(
    replay: Replay, forged: list[dict[str, Any]], where: str
) -> None:
    """It can neither hide its rows nor prolong the rounds."""
    turns = [*forged, {"rounds": 2}] if where == "before" else [{"rounds": 2}, *forged]
    own = worker_of_mine([CALL, *turns, sent("mine")])
    shared = Scripted([CALL, {"rounds": 2}, sent("a"), BASELINE])
    rows = replay([ABC[0], mine()], shared, own, rounds=3)
    assert max(shared.turns) == 1
    assert [row.status for row in rows] == ["ok", "crash", "ok"]


def test_worker_may_want_no_rounds(replay: Replay) -> None:
    own = worker_of_mine([CALL, {"rounds": -5}, sent("mine")])
    rows = replay([mine()], Scripted([CALL, {"rounds": 2}, BASELINE]), own)
    assert own.turns == []
    assert [row.status for row in rows] == ["ok", "ok"]


def test_row_belongs_to_the_worker_that_sent_it(replay: Replay) -> None:
    """A user's code can write any row, but not one of another kernel, process or round."""
    forged = sent("mine", process="", environment="that", rounds="9")
    own = worker_of_mine([*FIRST, sent("torch-default", reason="forged"), forged])
    rows = replay([mine()], Scripted([*FIRST, BASELINE]), own)
    assert [(row.kernel, row.reason) for row in rows] == [("mine", ""), ("torch-default", "")]
    assert (rows[0].process, rows[0].environment, rows[0].rounds) == ("mine.py", "this", "1")


def test_speed_ups_are_over_the_baseline_of_this_environment(replay: Replay) -> None:
    this = Scripted([CALL, {"rounds": 3}, timed("torch-default", 6.0, 8.0, 9.0)])
    that = Scripted([CALL, {"rounds": 3}, timed("a", 3.0, 2.0, 3.0)], environment="that")
    rows = replay({"this": [], "that": ABC[:1]}, this, that)
    assert rows[0].speedup is not None
    assert (rows[0].speedup.vs, rows[0].speedup.ratio) == ("torch-default", 3.0)
    assert rows[1].speedup is None


def test_row_has_no_more_samples_than_turns(replay: Replay) -> None:
    own = worker_of_mine([CALL, {"rounds": 2}, timed("mine", 1.0, 1.0, 1.0)])
    (found, _) = replay([mine()], Scripted([CALL, {"rounds": 2}, BASELINE]), own)
    assert (found.status, "more samples than turns" in found.reason) == ("error", True)


def test_compared_kernel_begins_first(replay: Replay, tmp_path: Path) -> None:
    """The judge needs its output for the errors of all other kernels."""
    file = tmp_path / "compared.py"
    file.write_text("def attention(): ...")
    own = Scripted(FIRST, name=str(file))
    with pytest.raises(WorkerError, match="enough"):
        replay(ABC, Scripted([CannotStart("enough")]), own, errors_against=f"{file}:attention")
    assert own.kernels() == [[]]


@pytest.mark.parametrize(
    ("message", "reason"),
    [
        ({"failed": "OSError: disk full", "traceback": "Traceback …"}, "^OSError: disk full"),
        (CannotStart("no torch"), r"environment this .* does not work: no torch"),
    ],
)
def test_worker_that_fails_without_a_kernel_ends_the_run(
    replay: Replay, message: Any, reason: str
) -> None:
    with pytest.raises(WorkerError, match=reason) as error:
        replay(ABC, Scripted([message]))
    assert str(error.value.__cause__) in ("Traceback …", "no torch")
