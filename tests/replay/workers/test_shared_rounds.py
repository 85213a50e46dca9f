"""Workers that share rounds, and what a crash, a bug or a forged row of one of them costs."""

import itertools
from collections.abc import Callable, Sequence
from dataclasses import asdict, replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest
import torch

from replay.bench.reported_stages import DONE, LOADING, TIMING
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
ABC = [kernel(name) for name in "abc"]
GPU = torch.device("cuda")


def sent(name: str, **fields: Any) -> dict[str, Any]:
    usual = {"call": {"name": "call"}, "status": "ok", "machine": MACHINE}
    return {"row": {"kernel": name, **usual, **fields}}


BASELINE = sent("torch-default")


def rounds(number: int, *messages: Any) -> list[Any]:
    return [CALL, {"rounds": number}, *messages]


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
    kept: dict[tuple[int, int], tuple[set[str], object]] = {}

    def believing(*given: Any) -> Any:
        """A worker that begins a call again keeps its wrong kernels."""
        _, _, _, worker, null_s, _, wrong = given
        assert kept.setdefault((id(worker), id(null_s)), (wrong, null_s))[0] is wrong
        return SimpleNamespace(confirmed=lambda row: row)

    monkeypatch.setattr("replay.workers.conversation.CallEvidence", believing)

    def run(
        kernels: list[Kernel] | dict[str, list[Kernel]],
        *processes: Scripted,
        calls: int = 1,
        probe_ms: Callable[[Settings], float] | None = None,
        **changes: Any,
    ) -> list[Row]:
        judge = SimpleNamespace(shared_file=-1, expect=lambda *_: None, probe_ms=probe_ms)
        environments: dict[str, Environment] = {}
        for each in processes:
            each.others = [other for other in processes if other is not each]
            process, name = cast("Process", each), each.environment
            own = environments.setdefault(name, Environment(name, "python", 5, process))
            own._workers.setdefault(each.name, Worker(name, each.name, process))
        by_place = kernels if isinstance(kernels, dict) else {"this": kernels}
        used, asked = replace(quick, **changes), cast("JudgeProcess", judge)
        found = list(replay_in_workers([WORKLOAD] * calls, by_place, used, environments, asked))
        assert not any(each.scripts for each in processes)
        return found

    return run


def test_crash_costs_one_row_in_its_place(replay: Replay) -> None:
    process = Scripted(
        [{"at": LOADING}, CALL, {"at": "a"}, {"at": "b"}, died("b")],
        rounds(0, sent("a"), sent("c"), BASELINE),
    )
    rows = replay(ABC, process)
    assert process.kernels() == [["a", "b", "c"], ["a", "c"]]
    assert process.requests[1]["options"]["excluded"] == ("b",)
    found = [(row.kernel, row.status) for row in rows]
    assert found == [("a", "ok"), ("b", "crash"), ("c", "ok"), ("torch-default", "ok")]
    assert (rows[1].reason, rows[1].log) == ("gone", "its last words")
    assert (rows[1].call.model, rows[1].machine.device) == ("model", "a GPU")


@pytest.mark.parametrize(
    ("of_b", "named"),
    [
        (sent("b", status="fine"), "status is 'fine'"),
        (sent("b", no_such_field=1), "KeyError: 'no_such_field'"),
        (sent("b", time_ms=[1.0]), "AttributeError"),
        ({"row": ["b"]}, "AttributeError"),
        ({"row": asdict(row("b", call_facts(), [1.0, 1.0, 1.0]))}, "more samples than turns"),
    ],
    ids=["status", "field", "time", "row", "samples"],
)
def test_invalid_row_costs_only_itself(replay: Replay, of_b: dict[str, Any], named: str) -> None:
    rows = replay(ABC, Scripted(rounds(2, sent("a"), of_b, sent("c"))))
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
        rounds(0, sent("a"), sent("c")),
    )
    rows = replay(ABC, process, device=GPU)
    assert [each["options"]["synchronous"] for each in process.requests] == [False, True, True]
    assert process.kernels() == [["a", "b", "c"], ["a", "b", "c"], ["a", "c"]]
    assert [row.status for row in rows] == ["ok", "crash", "ok"]


def test_kernel_is_given_up_after_three_crashes(replay: Replay) -> None:
    crash, alive = [CALL, {"at": "b"}, died("b")], rounds(0, sent("a"), sent("c"))
    process = Scripted(*[crash, alive] * MAXIMUM_DEATHS, alive)
    rows = replay(ABC, process, calls=MAXIMUM_DEATHS + 1)
    assert process.kernels()[-1] == ["a", "c"]
    given_up = "gone; not tried again, because it ended 3 workers"
    reasons = [row.reason for row in rows if row.kernel == "b"]
    assert reasons == ["gone"] * (MAXIMUM_DEATHS - 1) + [given_up] * 2


def test_unreadable_call_is_read_once_in_all_environments(replay: Replay) -> None:
    first = Scripted([{"unreadable": "cut short"}], rounds(0, sent("a"), BASELINE))
    other = Scripted(rounds(0, sent("a")), environment="that")
    rows = replay({"this": ABC[:1], "that": ABC[:1]}, first, other, calls=2)
    assert [(row.kernel, row.environment, row.reason) for row in rows] == [
        ("", "this", "cut short"), ("a", "this", ""), ("a", "that", ""),
        ("torch-default", "this", ""),
    ]  # fmt: skip


def test_crash_during_rounds_makes_all_workers_begin_them_again(replay: Replay) -> None:
    """One user's file crashes; another sampled a round more or less, whatever the order."""
    shared = Scripted(rounds(4, sent("a"), BASELINE))
    dying = worker_of_mine([CALL, {"rounds": 4, "dies_at": 1}], rounds(0))
    slow = worker_of_mine(rounds(3, sent("mine1")), number=1)
    rows = replay([ABC[0], mine(), mine(1)], shared, dying, slow, rounds=4)
    assert (dying.turns, shared.turns[-4:], slow.turns[-3:]) == ([0, 1], [0, 1, 2, 3], [0, 1, 2])
    assert dying.requests[1]["options"]["excluded"] == ("mine",)
    assert [(row.status, row.process) for row in rows] == [
        ("ok", ""), ("crash", "mine.py"), ("ok", "mine1.py"), ("ok", ""),
    ]  # fmt: skip
    assert len({row.rounds for row in rows}) == 1


def test_worker_without_another_never_calls_before_its_turn(replay: Replay) -> None:
    alone = Scripted(rounds(3, sent("a")))
    replay(ABC[:1], alone)
    assert (alone.turns, alone.after_another) == ([0, 1, 2], [False] * 3)
    shared, other = Scripted(rounds(9)), worker_of_mine(rounds(9))
    replay([ABC[0], mine()], shared, other, rounds=9)
    # The very first turn follows no other; a worker may also have the last and the next turn.
    assert 9 < sum(shared.after_another + other.after_another) < 18


def test_crash_after_the_rounds_repeats_them(replay: Replay) -> None:
    """The worker whose rows are complete begins again; the worker that waits just goes on."""
    shared = Scripted(*(rounds(2, sent("a", reason=each), BASELINE) for each in ("old", "new")))
    dying = worker_of_mine(rounds(2, {"at": "mine"}, died("mine")), rounds(0))
    waiting = worker_of_mine(rounds(2, sent("mine1")), number=1)
    rows = replay([ABC[0], mine(), mine(1)], shared, dying, waiting)
    assert [row.status for row in rows] == ["ok", "crash", "ok", "ok"]
    assert rows[0].reason == "new"
    assert shared.turns == waiting.turns == [0, 1, 0, 1]
    assert [len(each.requests) for each in (shared, dying, waiting)] == [2, 2, 1]


@pytest.mark.parametrize("stage", ["", DONE])
def test_worker_that_dies_in_no_kernel_gets_no_further_turn(replay: Replay, stage: str) -> None:
    shared = Scripted(rounds(3, BASELINE))
    at_a_turn = worker_of_mine([CALL, {"rounds": 3, "dies_at": 1, "at": stage}])
    at_the_end = worker_of_mine(rounds(3, died(stage)), number=1)
    rows = replay([mine(), mine(1)], shared, at_a_turn, at_the_end)
    assert at_a_turn.turns == [0, 1]
    assert shared.turns == at_the_end.turns == [0, 1, 2]
    assert [row.status for row in rows] == ["crash", "crash", "ok"]


def test_more_workers_than_fit_share_rounds_in_groups(replay: Replay) -> None:
    shared = Scripted(rounds(2, sent("a"), BASELINE), *[rounds(2, BASELINE)] * 2)
    others = [worker_of_mine(rounds(2, sent(f"mine{n}")), number=n) for n in range(7)]
    rows = replay([ABC[0], *map(mine, range(7))], shared, *others)
    # Only the baseline is timed in every group; its first row is kept.
    assert shared.kernels() == [["a"], [], []]
    assert [(row.kernel, row.rounds) for row in rows] == [
        ("a", "1"),
        *((f"mine{n}", str(1 + n // 3)) for n in range(7)),
        ("torch-default", "1"),
    ]
    # Workers of other groups keep no copy of the call.
    assert [each.closings for each in (shared, *others)] == [0, *[1] * 6, 0]


@pytest.mark.parametrize("hidden", [None, 0, 1])
def test_worker_whose_work_goes_on_loses_its_rows(replay: Replay, hidden: int | None) -> None:
    """Its processes go on although they were stopped (None), or work on the GPU.

    This work may begin in another's turn, so that the first probe after its own does not notice.
    """
    shared = Scripted(rounds(2, sent("a"), BASELINE), rounds(0, sent("a"), BASELINE))
    honest = worker_of_mine(rounds(2, sent("mine1")), rounds(0, sent("mine1")), number=1)
    busy = worker_of_mine(*[rounds(2)] * MAXIMUM_DEATHS)
    busy.goes_on = hidden is None

    def probe_ms(_: Settings) -> float:
        busy.probes += 1
        return 2.0 if busy.left_work and busy.probes > (hidden or 0) else 1.0

    on_gpu = {} if hidden is None else {"device": GPU, "probe_ms": probe_ms}
    if hidden:  # a third worker would be ended first, as the last that ran
        rows = replay([ABC[0], mine()], shared, busy, calls=2, **on_gpu)
        assert [row.status for row in rows] == ["ok", "error", "ok"] * 2
    else:
        rows = replay([ABC[0], mine(), mine(1)], shared, busy, honest, calls=2, **on_gpu)
        assert [row.status for row in rows] == ["ok", "error", "ok", "ok"] * 2
        assert honest.turns[-2:] == [0, 1]
    assert {row.reason for row in rows if row.kernel == "mine"} == {DISTURBS}
    assert len(busy.requests) == MAXIMUM_DEATHS
    assert shared.turns[-2:] == [0, 1]


def test_busy_gpu_accuses_no_worker(replay: Replay) -> None:
    """Every probe after the first is slow, also when the user's worker has ended."""
    shared = Scripted(rounds(2, sent("a"), BASELINE))
    honest = worker_of_mine(rounds(2), rounds(2, sent("mine")))
    times = itertools.chain([1.0], itertools.repeat(2.0))
    rows = replay([ABC[0], mine()], shared, honest, device=GPU, probe_ms=lambda _: next(times))
    assert [row.status for row in rows] == ["ok"] * 3
    assert honest.turns[-2:] == [0, 1]


@pytest.mark.parametrize("is_possible", [False, True])
def test_only_rounds_with_a_users_kernel_are_not_isolated(
    replay: Replay, monkeypatch: pytest.MonkeyPatch, is_possible: bool
) -> None:
    monkeypatch.setattr("replay.isolation.processes.IS_POSSIBLE", is_possible)
    flags = () if is_possible else (NOT_ISOLATED,)
    known = replay(ABC[:1], Scripted(rounds(0, sent("a"))))
    own = worker_of_mine(rounds(0, sent("mine")))
    rows = replay([ABC[0], mine()], Scripted(rounds(0, sent("a"))), own)
    assert [row.flags for row in known + rows] == [(), flags, flags]


@pytest.mark.parametrize(
    "forged",
    [
        [{"taken": True, "enough": False}],
        [{"rounds": 1}, {"rounds": 9}],
        [sent("torch-default")],
        [{"row": {"kernel": 5}}],
    ],
    ids=str,
)
@pytest.mark.parametrize("where", ["before", "at the end"])
def test_forged_turns_cost_rows(replay: Replay, forged: list[dict[str, Any]], where: str) -> None:
    """It can neither hide its rows nor prolong the rounds."""
    turns = [*forged, {"rounds": 2}] if where == "before" else [{"rounds": 2}, *forged]
    own = worker_of_mine([CALL, *turns, sent("mine")])
    shared = Scripted(rounds(2, sent("a"), BASELINE))
    rows = replay([ABC[0], mine()], shared, own, rounds=3)
    assert max(shared.turns) == 1
    assert [row.status for row in rows] == ["ok", "crash", "ok"]


def test_row_belongs_to_the_worker_that_sent_it(replay: Replay) -> None:
    """A user's code can write any row of its kernel, but not one of another process or round."""
    forged = sent("mine", process="", environment="that", rounds="9")
    own = worker_of_mine(rounds(0, forged))
    rows = replay([mine()], Scripted(rounds(0, BASELINE)), own)
    assert [(row.kernel, row.reason) for row in rows] == [("mine", ""), ("torch-default", "")]
    assert (rows[0].process, rows[0].environment, rows[0].rounds) == ("mine.py", "this", "1")


def test_compared_kernel_begins_first(replay: Replay, tmp_path: Path) -> None:
    """The judge needs its output for the errors of all other kernels."""
    file = tmp_path / "compared.py"
    file.write_text("def attention(): ...")
    own = Scripted(rounds(0), name=str(file))
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
def test_failing_without_a_kernel_ends_the_run(replay: Replay, message: Any, reason: str) -> None:
    with pytest.raises(WorkerError, match=reason) as error:
        replay(ABC, Scripted([message]))
    assert str(error.value.__cause__) in ("Traceback …", "no torch")
