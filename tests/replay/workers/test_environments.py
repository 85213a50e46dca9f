"""Kernels of several Python environments share a table, but each environment has its own
packages."""

from __future__ import annotations

import json
import re
import statistics
import sys
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import pytest
import torch

import replay as replay_package
from replay.bench.runner import LOADING, TIMING
from replay.bench.settings import Settings
from replay.rows.row import Row
from replay.workers.environment_options import WorkerError, interpreters
from replay.workers.environments import (
    MAXIMUM_DEATHS,
    Environment,
    ProbeResult,
    assign,
    replay_in_workers,
)
from replay.workers.process import CannotStart, Died
from tests.factories import call_facts, kernel, made_workload, row, speedup_over, unreadable

REPOSITORY = Path(replay_package.__file__).resolve().parent.parent
QUICK = ("--rounds", "3", "--device", "cpu")

RunCli = Callable[..., tuple[int, str, str]]
Answers = list[Any]

STAND_IN = '''
import importlib.util
from torch.nn.functional import scaled_dot_product_attention
from replay.kernels.registry import register_kernel

def unavailable(device):
    return None if importlib.util.find_spec("stand_in_library") else "not installed"

@register_kernel("stand_in_kernel", unavailable=unavailable, library="stand-in",
                 install="pip install stand-in")
def attention(query, key, value, *others, **options):
    """Attention of a library that only one environment has."""
    import stand_in_library
    return scaled_dot_product_attention(query, key, value, *others, **options)
'''
SPY = """
import json, sys
import clash
from replay.kernels.registry import register_kernel

def tell(call):
    return json.dumps({"clash": clash.WHOSE, "path": sys.path, "rich": "rich" in sys.modules})

@register_kernel("spy", unsupported=tell)
def attention(query, key, value, *others, **options): ...
"""


@pytest.fixture
def ours(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Directory with the packages of the environment `this`."""
    directory = tmp_path / "ours"
    _install_kernel(directory)
    (directory / "clash.py").write_text("WHOSE = 'ours'\n")
    monkeypatch.setenv("PYTHONPATH", str(directory))
    monkeypatch.syspath_prepend(directory)
    return directory


@pytest.fixture
def theirs(tmp_path: Path) -> Path:
    """Interpreter with other packages, a space in its path, and a broken `rich`."""
    directory = tmp_path / "theirs"
    _install_kernel(directory)
    (directory / "clash.py").write_text("WHOSE = 'theirs'\n")
    (directory / "rich").mkdir()
    (directory / "rich" / "__init__.py").write_text("raise ImportError('no rich here')\n")
    (directory / "stand_in_library.py").touch()
    _install(directory, "stand-in", "2.5")
    return _interpreter(tmp_path / "their place", f'PYTHONPATH="{directory}"')


def _install_kernel(directory: Path) -> None:
    directory.mkdir()
    (directory / "stand_in_kernel.py").write_text(STAND_IN)
    points = "[attention_replay.kernels]\nstand-in-kernel = stand_in_kernel:attention\n"
    (_install(directory, "stand-in-kernel", "1.0") / "entry_points.txt").write_text(points)


def _install(directory: Path, name: str, version: str) -> Path:
    information = directory / f"{name.replace('-', '_')}-{version}.dist-info"
    information.mkdir()
    (information / "METADATA").write_text(f"Name: {name}\nVersion: {version}\n")
    return information


def _interpreter(directory: Path, variables: str = "", options: str = "") -> Path:
    """Return a script that runs this interpreter with additional variables and options."""
    directory.mkdir()
    python = directory / "python"
    python.write_text(f'#!/bin/sh\n{variables} exec "{sys.executable}" {options} "$@"\n')
    python.chmod(0o755)
    return python


@pytest.mark.slow
@pytest.mark.usefixtures("ours", "kernels")
def test_library_that_only_the_other_environment_has_is_listed(
    run_cli: RunCli, theirs: Path
) -> None:
    code, out, err = run_cli("kernels", "--device", "cpu", "--env", f"theirs={theirs}")
    assert (code, err) == (0, "")
    text = " ".join(out.split())
    assert (
        "stand-in-kernel from stand_in_kernel:attention "
        "this: not installed: pip install stand-in theirs: available 2.5" in text
    )
    assert f"this: available {torch.__version__} theirs: available {torch.__version__}" in text


@pytest.mark.usefixtures("kernels")
def test_rows_of_two_environments_make_one_table(
    run_cli: RunCli,
    ours: Path,
    theirs: Path,
    recorded: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    spy = tmp_path / "spy.py"
    spy.write_text(SPY)
    toml = tmp_path / "kernels.toml"
    toml.write_text(f"[environments]\ntheirs = '{theirs}'\n")
    truncated = recorded / "model-000000.safetensors"
    truncated.write_bytes(truncated.read_bytes()[:1000])
    (recorded / "model-000002.safetensors").unlink()
    monkeypatch.chdir(REPOSITORY)  # the current directory contains `models` and `tests`
    written = tmp_path / "rows.jsonl"
    code, out, err = run_cli(
        *(
            "--dir",
            str(recorded),
            *QUICK,
            "--kernels",
            f"stand-in-kernel,torch-flash,{spy}:attention",
        ),
        *("--env", str(toml), "--json", str(written)),
    )

    # An unreadable file gives one row, not one per environment, and other calls are replayed.
    assert code == 1
    lines = [line for line in err.splitlines() if line.startswith("replay: ")]
    assert [re.search(r"model-\d+", line).group() for line in lines] == [  # type: ignore[union-attr]
        "model-000000",
        "model-000002",
    ]
    rows = [json.loads(line) for line in written.read_text().splitlines()]
    (first, second) = (row for row in rows if not row["kernel"])
    assert (first["call"]["name"], first["status"]) == ("model-000000", "error")
    assert (second["call"]["name"], second["status"]) == ("model-000002", "error")

    found = {(row["environment"], row["kernel"]): row for row in rows if row["kernel"]}
    attention = f"{spy}:attention"
    assert list(found) == [
        ("this", "torch-flash"),
        ("this", attention),
        ("this", "torch-math"),
        ("theirs", "stand-in-kernel"),
        ("theirs", attention),
        ("theirs", "torch-math"),
    ]
    assert "stand-in-kernel@theirs" in out

    # Speed-ups are paired with the baseline of the same process.
    row, baseline = found["theirs", "stand-in-kernel"], found["theirs", "torch-math"]
    samples = (baseline["time_ms"]["samples"], row["time_ms"]["samples"])
    ratio = statistics.median(before / after for before, after in zip(*samples, strict=True))
    assert (row["speedup"]["vs"], row["speedup"]["ratio"]) == ("torch-math", pytest.approx(ratio))

    # Each interpreter sees its own packages and ours, but nothing else from our directory.
    told = {name: json.loads(found[name, attention]["reason"]) for name in ("this", "theirs")}
    assert told["this"]["clash"] == "ours"
    assert told["theirs"]["clash"] == "theirs"
    assert str(ours) in told["this"]["path"]
    assert str(ours) not in told["theirs"]["path"]
    for each in told.values():
        assert not {"", ".", str(REPOSITORY), str(REPOSITORY.parent)} & set(each["path"])
        assert not each["rich"]

    # Outputs of the two environments do not overwrite each other.


@pytest.mark.slow
def test_interpreter_without_torch_is_refused(run_cli: RunCli, tmp_path: Path) -> None:
    bare = _interpreter(tmp_path / "bare", "PYTHONPATH=", "-S")
    code, out, err = run_cli("kernels", "--device", "cpu", "--env", f"bare={bare}")
    assert (code, out) == (2, "")
    assert err == (
        f"replay kernels: environment bare ({bare}) does not work: the worker exited with code 1: "
        "ModuleNotFoundError: No module named 'torch'; it needs torch and safetensors\n"
    )


def test_program_other_than_python_is_refused(tmp_path: Path) -> None:
    environment = Environment("odd", "/bin/echo", 5)
    with pytest.raises(WorkerError, match=r"environment odd \(/bin/echo\) does not work: .*code 0"):
        environment.probe([kernel("a")], "cpu")


def test_silent_interpreter_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("replay.workers.process.ANSWERING_SECONDS", 0.1)
    silent = tmp_path / "silent"
    silent.write_text("#!/bin/sh\nexec sleep 1000\n")
    silent.chmod(0o755)
    with pytest.raises(WorkerError, match=r"work: no message for 0\.2 s \(--timeout\)"):
        Environment("silent", str(silent), 0.2).probe([kernel("a")], "cpu")
    monkeypatch.setattr("replay.workers.process.ANSWERING_SECONDS", 0.3)
    with pytest.raises(WorkerError, match=r"for 0\.3 s \(what a start may take\)"):
        Environment("silent", str(silent), 0.2).probe([kernel("a")], "cpu")


def test_interpreters_are_read_from_options_and_a_file(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HOME", str(tmp_path))
    mine = _interpreter(tmp_path / "mine")
    toml = tmp_path / "größe.toml"
    toml.write_text('[environments]\na = "~/mine/python"\nb = "/bin/sh"\n', "utf-8")
    assert interpreters([]) == {}
    assert interpreters([f"b={mine}", "c=~/mine/python", str(toml)]) == dict.fromkeys(
        ("a", "b", "c"), str(mine)
    )


@pytest.mark.parametrize(
    ("options", "text", "sentence"),
    [
        (["fa4"], "", "--env fa4: write NAME=PATH/TO/python"),
        (["=python"], "", "write NAME=PATH/TO/python"),
        (["fa4="], "", "write NAME=PATH/TO/python"),
        (["this=/bin/sh"], "", "'this' is the name of this environment"),
        (["a=/bin/sh", "a=/bin/ls"], "", r"--env is used for two Pythons \(a\): choose two names"),
        (["fa4=/no/such/python"], "", "--env fa4: there is no Python at /no/such/python"),
        (["fa4=/tmp"], "", "--env fa4: there is no Python at /tmp"),
        ([], "environments = 3", r"needs \[environments\] with lines"),
        ([], "[environments]\nfa4 = 3", r"needs \[environments\] with lines"),
        ([], "[elsewhere]\nfa4 = 'x'", r"needs \[environments\] with lines"),
        ([], "not TOML", r"kernels.toml is not TOML: "),
        ([], None, r"^cannot read .*kernels.toml \(No such file or directory\): name a TOML file"),
    ],
)
def test_invalid_interpreters_are_refused(
    tmp_path: Path, options: list[str], text: str | None, sentence: str
) -> None:
    file = tmp_path / "kernels.toml"
    if text is not None:
        file.write_text(text)
    with pytest.raises(WorkerError, match=sentence):
        interpreters([*options, *([] if text == "" else [str(file)])])


def test_kernels_run_where_their_library_is() -> None:
    """If most environments have a kernel's library, the first that can run the kernel runs it."""
    runs_in = {
        "torch-math": ["this", "that"],
        "ours": ["that", "bare"],
        "both": ["this", "that"],
        "there": ["that"],
        "nowhere": [],
    }
    libraries = {"torch-math": "torch", "ours": "triton"}
    kernels = [kernel(name, library=libraries.get(name, "")) for name in runs_in]
    found = {
        place: {
            name: ProbeResult(None if place in places else "not installed")
            for name, places in runs_in.items()
        }
        for place in ("this", "that", "bare")
    }
    assigned = {name: [each.name for each in run] for name, run in assign(kernels, found).items()}
    assert assigned == {
        "this": ["torch-math", "both", "nowhere"],
        "that": ["ours", "both", "there"],
        "bare": [],
    }


class FakeProcess:
    """Process with scripted answers; an exception among the answers is raised."""

    python = "python"

    def __init__(self, answers: Sequence[Answers]) -> None:
        self.answers = list(answers)
        self.requests: list[dict[str, Any]] = []
        self.closed_after: list[int] = []
        """Number of requests that were answered before each closing of the process."""

    def close(self) -> None:
        self.closed_after.append(len(self.requests))

    def ask(self, **request: Any) -> Iterator[dict[str, Any]]:
        self.requests.append(request)
        for answer in self.answers.pop(0):
            if isinstance(answer, Exception):
                raise answer
            yield dict(answer)

    def kernels(self) -> list[list[str]]:
        return [request["kernels"] for request in self.requests]


def died(kernel: str) -> Died:
    return Died("crash", "gone", kernel, "its last words")


MACHINE = {"device": "a GPU"}


def row_of(name: str, **fields: Any) -> dict[str, Any]:
    usual = {"call": {"name": "call"}, "status": "ok", "environment": "other", "machine": MACHINE}
    return {"row": {"kernel": name, **usual, **fields}}


ASKED = ("a", "b", "c")
CALL = {"call": {"name": "call", "model": "model"}, "machine": MACHINE}
BASELINE = row_of("torch-default")
CAN_RUN = [{"probed": "b", "reason": None}]
DISTURBS = {"disturbing": ["b"]}
WORKLOAD = made_workload("call", lambda device: pytest.fail("loaded here"))

Ask = Callable[..., tuple[list[Row], FakeProcess, FakeProcess]]


@pytest.fixture
def ask(quick: Settings, monkeypatch: pytest.MonkeyPatch) -> Ask:
    """`ask(answers, …, alone=[answers, …])` returns the rows of the kernels a, b and c on a call.

    It also returns the two fake processes: the shared worker, and the worker that runs only b.
    """
    environment = Environment("other", "python", 5)
    own = environment._worker_of(kernel("b"))
    others = {"b": kernel("b"), "d": replace(kernel("d"), own_process=True)}
    monkeypatch.setattr("replay.workers.environments.catalogue", lambda: others)

    def run(
        *answers: Answers,
        alone: Sequence[Answers] = (),
        library: str = "",
        own_process: bool = False,
        **settings: Any,
    ) -> tuple[list[Row], FakeProcess, FakeProcess]:
        shared, apart = FakeProcess(answers), FakeProcess(alone)
        environment._process, own._process = shared, apart  # type: ignore[assignment]
        kernels = [kernel(name, library=library) for name in ASKED]
        kernels[1] = replace(kernels[1], own_process=own_process)
        rows = environment.replay(WORKLOAD, kernels, replace(quick, **settings), lambda _: None)
        assert shared.answers == apart.answers == []
        assert {row.environment for row in rows} == {"other"}
        return rows, shared, apart

    return run


def test_crash_costs_one_row_in_its_place(ask: Ask) -> None:
    rows, process, _ = ask(
        [{"at": LOADING}, CALL, {"at": "a"}, {"at": "b"}, died("b")],
        [CALL, row_of("a"), row_of("c"), BASELINE],
    )
    assert process.kernels() == [["a", "b", "c"], ["a", "c"]]
    assert process.requests[1]["options"]["excluded"] == ("b",)
    assert [(row.kernel, row.status) for row in rows] == [
        ("a", "ok"),
        ("b", "crash"),
        ("c", "ok"),
        ("torch-default", "ok"),
    ]
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
def test_unreadable_row_costs_only_itself(ask: Ask, wrong: dict[str, Any], named: str) -> None:
    sent: dict[str, Any] = row_of("b", **wrong) if wrong else {"row": ["b"]}
    rows, *_ = ask([{"at": LOADING}, CALL, row_of("a"), sent, row_of("c")])
    (refused,) = [row for row in rows if row.status == "error"]
    assert len(rows) == 3
    assert refused.reason.startswith("its worker sent an invalid row: ")
    assert named in refused.reason


@pytest.mark.parametrize("stage", [TIMING, ""])
def test_crash_without_a_kernel_costs_the_call(ask: Ask, stage: str) -> None:
    rows, *_ = ask([died(stage)])
    assert [(row.kernel, row.status) for row in rows] == [("", "crash")]
    assert rows[0].reason == f"call: gone while {stage or 'starting'}"


def test_crash_while_timing_on_a_gpu_is_located_first(ask: Ask) -> None:
    """On a GPU, samples are only enqueued, so the crash may come from a kernel before `c`."""
    rows, process, _ = ask(
        [CALL, {"at": TIMING}, {"at": "c"}, died("c")],
        [CALL, {"at": TIMING}, {"at": "b"}, died("b")],
        [CALL, row_of("a"), row_of("c")],
        device=torch.device("cuda"),
    )
    synchronous = [request["options"]["synchronous"] for request in process.requests]
    assert synchronous == [False, True, True]
    assert process.kernels() == [["a", "b", "c"], ["a", "b", "c"], ["a", "c"]]
    assert [row.status for row in rows] == ["ok", "crash", "ok"]


def test_kernel_is_given_up_after_three_crashes(ask: Ask) -> None:
    alive = [CALL, row_of("a"), row_of("c")]
    for death in range(1, MAXIMUM_DEATHS + 1):
        rows, *_ = ask([CALL, {"at": "b"}, died("b")], alive)
        assert ("not tried again" in rows[1].reason) == (death == MAXIMUM_DEATHS)
    rows, process, _ = ask(alive)
    assert process.kernels() == [["a", "c"]]
    assert not process.requests[0]["options"]["synchronous"]
    assert rows[1].reason == "gone; not tried again, because it ended 3 workers"


def environment_with(*answers: Answers) -> tuple[Environment, FakeProcess]:
    environment, process = Environment("other", "python", 5), FakeProcess(answers)
    environment._process = process  # type: ignore[assignment]
    return environment, process


def test_first_calls_continue_after_a_crash(quick: Settings) -> None:
    environment, process = environment_with(
        [{"at": "a"}, {"called": "a", "first_call_ms": 5.0}, {"at": "b"}, died("b")],
        [{"at": "c"}, {"called": "c", "first_call_ms": 7.0}, {"disturbing": ["c"]}],
    )
    stages: list[str] = []
    found = environment.first_calls(WORKLOAD, [*map(kernel, ASKED)], quick, stages.append)
    assert found == {"a": 5.0, "c": 7.0}
    assert stages == ["a", "b", "c"]
    assert process.kernels() == [["a", "b", "c"], ["c"]]
    assert process.closed_after == [2]  # no other kernel may run in the process of `c`


def test_first_calls_end_after_a_crash_without_a_kernel(quick: Settings) -> None:
    environment, _ = environment_with([died(LOADING)])
    assert environment.first_calls(WORKLOAD, [kernel("a")], quick, lambda stage: None) == {}


def test_kernel_with_its_own_process_keeps_its_place(ask: Ask) -> None:
    elsewhere = row_of("torch-default", reason="of the other process")
    common = [CALL, row_of("a"), row_of("c"), BASELINE]
    alone = [CALL, row_of("b"), elsewhere]
    rows, first, second = ask(CAN_RUN, common, alone=[alone], own_process=True)
    assert [row.kernel for row in rows] == ["a", "b", "c", "torch-default"]
    assert rows[-1].reason == ""
    assert first.kernels() == [["b"], ["a", "c"]]
    assert second.kernels() == [["b"]]
    assert first.requests[1]["options"]["excluded"] == ()
    assert second.requests[0]["options"]["excluded"] == ("d",)  # "d" may not even be the reference
    _, first, _ = ask(common, alone=[alone], own_process=True)
    assert first.kernels() == [["a", "c"]]  # whether b can run is asked only once


def test_crash_in_an_own_process_is_counted_there(ask: Ask) -> None:
    common = [CALL, row_of("a"), row_of("c"), BASELINE]
    for death in range(1, MAXIMUM_DEATHS + 1):
        asked = [CAN_RUN] if death == 1 else []
        alone = [[CALL, {"at": "b"}, died("b")], [CALL, BASELINE]]
        rows, *_ = ask(*asked, common, alone=alone, own_process=True)
        assert [row.status for row in rows] == ["ok", "crash", "ok", "ok"]
        assert ("not tried again" in rows[1].reason) == (death == MAXIMUM_DEATHS)
    rows, _, second = ask(common, alone=[[CALL, BASELINE]], own_process=True)
    assert second.kernels() == [[]]
    assert rows[1].reason == "gone; not tried again, because it ended 3 workers"


@pytest.mark.parametrize("name", ["baseline", "errors_against"])
def test_kernel_that_every_worker_runs_stays_in_the_shared_one(ask: Ask, name: str) -> None:
    everyone = [CALL, *map(row_of, ASKED), DISTURBS]
    rows, shared, _ = ask(everyone, own_process=True, **{name: "b"})
    assert [row.kernel for row in rows] == [*ASKED]
    assert (shared.kernels(), shared.closed_after) == ([[*ASKED]], [])


def test_own_process_is_not_started_in_vain(ask: Ask) -> None:
    (row,), *_ = ask(CAN_RUN, [{"unreadable": "cut short"}], own_process=True)
    assert (row.kernel, row.reason) == ("", "cut short")


def test_kernel_that_cannot_run_gets_no_process(ask: Ask) -> None:
    cannot = [{"probed": "b", "reason": "not installed"}]
    ask(cannot, [CALL, *map(row_of, ASKED)], own_process=True)


def test_disturbing_kernel_gets_its_own_worker(ask: Ask) -> None:
    first = [CALL, row_of("a", reason="beside b"), row_of("b"), row_of("c"), BASELINE, DISTURBS]
    again = [CALL, row_of("a"), row_of("c"), BASELINE, {"disturbing": []}]
    alone = [CALL, row_of("b"), BASELINE, DISTURBS]
    rows, shared, apart = ask(first, again, alone=[alone])
    assert shared.kernels() == [["a", "b", "c"], ["a", "c"]]
    assert shared.closed_after == [1]
    assert apart.kernels() == [["b"]]
    assert [(row.kernel, row.reason) for row in rows] == [
        *((name, "") for name in ASKED),
        ("torch-default", ""),
    ]
    # On later calls, the disturbing kernel is already known.
    _, shared, apart = ask(again, alone=[alone])
    assert (shared.kernels(), shared.closed_after) == ([["a", "c"]], [])
    assert apart.kernels() == [["b"]]


def test_common_kernels_stay_in_the_shared_worker(ask: Ask) -> None:
    _, shared, _ = ask([CALL, *map(row_of, ASKED), DISTURBS], library="triton")
    assert (shared.kernels(), shared.closed_after) == ([[*ASKED]], [])


@pytest.mark.parametrize(("beside_b", "is_compared"), [(1.4, True), (1.6, False)])
def test_speed_up_is_withheld_when_the_kernel_slows_its_baseline(
    ask: Ask, beside_b: float, is_compared: bool
) -> None:
    def timed(name: str, ms: float = 1.0) -> dict[str, Any]:
        speedup = None if name == "torch-default" else speedup_over("torch-default")
        measured = row(name, call_facts(), ms, environment="other", speedup=speedup)
        return {"row": asdict(measured)}

    together = [CALL, timed("a"), timed("torch-default"), DISTURBS]
    alone = [CALL, timed("b"), timed("torch-default", beside_b)]
    rows, *_ = ask(together, together, alone=[alone])
    speedups = {row.kernel: row.speedup is not None for row in rows}
    assert speedups == {"a": True, "b": is_compared, "torch-default": False}
    flags = {row.kernel: row.flags for row in rows}
    told = ("no speed-up: torch-default takes 1.6 times as long in the same process",)
    assert flags == {"a": (), "b": () if is_compared else told, "torch-default": ()}


def test_bug_in_the_worker_ends_the_run(ask: Ask) -> None:
    with pytest.raises(WorkerError, match="OSError: disk full") as error:
        ask([{"failed": "OSError: disk full", "traceback": "Traceback …"}])
    assert "Traceback …" in str(error.value.__cause__)


def test_worker_that_no_longer_starts_is_reported(ask: Ask) -> None:
    with pytest.raises(WorkerError, match=r"environment other .* does not work: no torch"):
        ask([CannotStart("no torch")])


def test_probe_reports_crashes_and_disturbing_libraries() -> None:
    environment, process = environment_with(
        [{"at": "a"}, {"probed": "a", "reason": None, "version": "1"}, {"at": "b"}, died("b")],
        [{"at": "c"}, {"probed": "c", "reason": "no"}, {"disturbing": ["c"]}],
    )
    assert environment.probe([*map(kernel, ASKED)], "cpu") == {
        "a": ProbeResult(None, "1"),
        "b": ProbeResult("crash during the check: gone"),
        "c": ProbeResult("no"),
    }
    assert process.closed_after == [2]


def test_unreadable_file_is_skipped_in_other_environments(quick: Settings) -> None:
    class Fixed(Environment):
        def __init__(self, name: str, row: Row) -> None:
            super().__init__(name, "python", 5)
            self.row = row

        def replay(self, *_: Any, **__: Any) -> list[Row]:
            return [self.row]

    kernels = {"one": [kernel("a")], "two": [kernel("a")], "three": []}
    ok = row("a")
    for first, count in (
        (unreadable(), 1),
        (replace(unreadable(), status="crash"), 2),
        (replace(unreadable(), status="out-of-memory"), 2),
        (row("a", status="error"), 2),
    ):
        environments = {"one": Fixed("one", first), "two": Fixed("two", ok), "three": Fixed("", ok)}
        rows = list(replay_in_workers([WORKLOAD], kernels, quick, environments))
        assert len(rows) == count
