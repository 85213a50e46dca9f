"""A kernel with any fault costs its row, and nothing else, and nothing of it stays behind."""

from __future__ import annotations

import dataclasses
import gc
import json
import os
import re
import signal
import subprocess
import sys
import threading
import time
import uuid
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch

import replay as replay_package
from capture.storage.call_file import PackedCall
from capture.storage.dataset import Dataset
from replay.bench.guard import Guard
from replay.bench.settings import Settings
from replay.kernels.compiling import import_compiler
from replay.kernels.registry import Kernel, catalogue, find
from replay.workers import kernel_server
from replay.workers.environments import Environment
from replay.workers.process import (
    LOG_BYTES,
    CannotStart,
    Died,
    Place,
    Process,
    Stopped,
    first_processes,
    judge_process,
)
from replay.workloads.random_calls import Spec
from replay.workloads.random_calls import workload as synthetic_workload
from tests import factories

REPOSITORY = Path(replay_package.__file__).resolve().parent.parent
BAD = Path(__file__).with_name("bad_kernels.py")
COMMAND = (
    f"import sys; sys.path.insert(0, {str(REPOSITORY)!r}); from replay.cli.main import main; main()"
)
SHAPE = ("--random", "-b", "1", "-hq", "2", "-sq", "64", "-d", "32", "--dtype", "float32")
QUICK = ("--rounds", "3", "--max-seconds", "0.01", "--device", "cpu")

RunCli = Callable[..., tuple[int, str, str]]

pytestmark = pytest.mark.skipif(
    sys.platform != "linux", reason="counts processes in /proc, and limits memory as Linux does"
)


class Surroundings(NamedTuple):
    """What a command gets, so that what it leaves behind can be found."""

    environment: dict[str, str]
    temporary: Path
    mark: str

    @classmethod
    def under(cls, directory: Path) -> Surroundings:
        temporary = directory / "temporary"
        temporary.mkdir()
        mark = uuid.uuid4().hex
        return cls({**os.environ, "TMPDIR": str(temporary), "MARK": mark}, temporary, mark)

    def start(self, *arguments: str) -> subprocess.Popen[str]:
        return subprocess.Popen(
            [sys.executable, "-c", COMMAND, *arguments],
            env=self.environment,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )

    def processes(self) -> list[int]:
        """Those that have the mark in their environment, which children inherit."""
        found = []
        for entry in Path("/proc").glob("[0-9]*"):
            try:
                marked = f"MARK={self.mark}".encode() in (entry / "environ").read_bytes()
                alive = ") Z " not in (entry / "stat").read_text()
            except OSError:
                continue
            if marked and alive:
                found.append(int(entry.name))
        return found

    def left_files(self) -> list[str]:
        """Torch keeps a cache of its own there."""
        names = [path.name for path in self.temporary.iterdir()]
        return [name for name in names if not name.startswith("torchinductor_")]

    def wait_until_nothing_runs(self, seconds: float = 5) -> bool:
        deadline = time.monotonic() + seconds
        while self.processes() and time.monotonic() < deadline:
            time.sleep(0.05)
        return not self.processes()


def wait_for(path: Path) -> None:
    deadline = time.monotonic() + 60
    while not path.exists():
        assert time.monotonic() < deadline, f"{path} does not come"
        time.sleep(0.05)


def rows_of(text: str) -> dict[str, dict[str, Any]]:
    """By the kernel's name, a user's without its file."""
    rows = [json.loads(line) for line in text.splitlines()]
    return {row["kernel"].rpartition(":")[2]: row for row in rows}


NAN = "1 elements are NaN or infinite"
FAULTS: dict[str, tuple[str, str, str]] = {
    "segfault": ("crash", "ended by SIGSEGV", "the last words of segfault"),
    "hang": ("timeout", r"no sign of life for 4 s \(--timeout\)", "the last words of hang"),
    "exit_at_once": ("crash", "exited with code 7", ""),
    "exit_politely": ("error", "SystemExit: 0$", ""),
    # Where SIGINT is ignored, as in a job in the background, Python exits with 1.
    "interrupt": ("crash", "ended by SIGINT|exited with code 1", "KeyboardInterrupt"),
    "fork_and_die": ("crash", "ended by SIGKILL, perhaps by a system out of memory", ""),
    "fork_and_return": ("ok", "is within", ""),
    "stop_waiting": ("ok", "is within", ""),
    "close_pipes": ("crash", "exited with code 1", "Bad file descriptor"),
    "exits_when_imported": ("crash", "exited with code 3", "the last words of an import"),
    "fails_when_imported": ("error", "RuntimeError: built for another PyTorch", ""),
    "segfault_when_timed": ("crash", "ended by SIGSEGV", "in segfault_when_timed"),
    "hang_when_timed": ("timeout", "no sign of life", ""),
    "take_memory": ("out-of-memory", r"needed \d", ""),
    "keep_memory": ("out-of-memory", "all of it is kept; it keeps the memory it took", ""),
    "too_large": ("out-of-memory", r"needed \d", ""),
    "unwritten": ("inaccurate", "are NaN or infinite in the output", ""),
    "one_nan": ("inaccurate", NAN, ""),
    "one_infinity": ("inaccurate", NAN, ""),
    "wrong_shape": ("error", r"returned shape \(1, 64, 2, 32\)", ""),
    "wrong_dtype": ("error", "returned float64 where float32 is right", ""),
    "nothing": ("error", "returned NoneType, not a tensor", ""),
    "wrong_signature": ("error", r"TypeError: wrong_signature\(\) got an unexpected", ""),
    "fail": ("error", "ValueError: no such tile$", ""),
    "fail_at_length": ("error", r"ValueError: größer  \[31m +x{400,500}$", ""),
    "change_key": ("ok", "is within", ""),
    "never_the_same": ("ok", "is within", ""),
    "close_stdout": ("ok", "is within", ""),
    "print_a_megabyte": ("ok", "is within", ""),
    "expects_collection": ("ok", "is within", ""),
}
SLOW = (
    "hang",
    "exit_at_once",
    "interrupt",
    "fork_and_die",
    "close_pipes",
    "segfault_when_timed",
    "exits_when_imported",
    "keep_memory",
)
"""Each ends its worker, and starting another takes seconds."""
FLAGS = {
    "unwritten": r"leaves \d+ output elements unwritten",
    "never_the_same": "not deterministic: calls differ by up to",
}


class Finished(NamedTuple):
    code: int
    rows: dict[str, dict[str, Any]]
    stderr: str
    surroundings: Surroundings


def run_of(directory: Path, names: list[str]) -> Finished:
    """One run of these faults between two good kernels."""
    exits = directory / "exits.py"
    last_words = "import os\nprint('the last words of an import')\nos._exit(3)\n"
    exits.write_text(f"{last_words}def exits_when_imported(): ...\n")
    fails = directory / "fails.py"
    error = "raise RuntimeError('built for another PyTorch')\n"
    fails.write_text(f"{error}def fails_when_imported(): ...\n")
    elsewhere = {"exits_when_imported": exits, "fails_when_imported": fails}
    kernels = [f"{elsewhere.get(name, BAD)}:{name}" for name in names]
    surroundings = Surroundings.under(directory)
    chosen = ",".join([f"{BAD}:good", *kernels, "torch-math"])
    process = surroundings.start(
        *SHAPE, *QUICK, "--timeout", "4", "--kernels", chosen, "--json", "-"
    )
    out, err = process.communicate(timeout=250)
    return Finished(process.returncode, rows_of(out), err, surroundings)


@pytest.fixture(scope="module")
def everything(tmp_path_factory: pytest.TempPathFactory) -> Finished:
    return run_of(tmp_path_factory.mktemp("faults"), [name for name in FAULTS if name not in SLOW])


@pytest.fixture(scope="module")
def more_deaths(tmp_path_factory: pytest.TempPathFactory) -> Finished:
    return run_of(tmp_path_factory.mktemp("deaths"), list(SLOW))


@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=[pytest.mark.slow] * (name in SLOW)) for name in FAULTS]
)
def test_a_fault_is_classified(request: pytest.FixtureRequest, name: str) -> None:
    status, reason, log = FAULTS[name]
    finished: Finished = request.getfixturevalue("more_deaths" if name in SLOW else "everything")
    row = finished.rows[name]
    assert row["status"] == status, row["reason"]
    assert re.search(reason, row["reason"]), row["reason"]
    assert log in row["log"]
    assert len(row["log"].encode()) <= 2 * LOG_BYTES
    # How long a busy machine takes is not the kernel's doing.
    flags = [flag for flag in row["flags"] if not flag.startswith("took longer than")]
    assert [bool(re.match(FLAGS.get(name, "none"), flag)) for flag in flags] == [
        True for _ in range(name in FLAGS)
    ]
    assert row["changed_inputs"] == (["key"] if name == "change_key" else [])
    assert (row["time_ms"] is not None) == (status in ("ok", "inaccurate"))
    assert (row["speedup"] is not None) == (status == "ok")
    assert row["machine"]["torch"]
    assert row["call"]["shape"]["q_len"] == 64


def test_the_other_rows_are_unaffected(everything: Finished) -> None:
    faults = [name for name in FAULTS if name not in SLOW]
    assert list(everything.rows) == ["good", *faults, "torch-math", "torch-default"]
    for name in ("good", "torch-math", "torch-default"):
        row = everything.rows[name]
        assert (row["status"], row["flags"], row["log"]) == ("ok", [], "")
        assert row["time_ms"]["n"] == 3
        assert (row["speedup"] is None) == (name == "torch-default")
    assert everything.code == 0
    assert everything.stderr.strip() == ""


def test_nothing_stays_behind(everything: Finished) -> None:
    assert everything.surroundings.processes() == []
    assert everything.surroundings.left_files() == []


@pytest.mark.slow
def test_nothing_stays_behind_of_more_deaths(more_deaths: Finished) -> None:
    assert list(more_deaths.rows) == ["good", *SLOW, "torch-math", "torch-default"]
    test_nothing_stays_behind(more_deaths)


@pytest.mark.slow
def test_given_up_after_three_workers_and_no_baseline(run_cli: RunCli, recorded: Path) -> None:
    """The baseline crashes on every call: nobody has a speed-up, and the run does not fail.

    It is the reference too, which is needed before any row is begun.
    """
    dataset = Dataset.open(recorded)
    path = recorded / "model-000003.safetensors"
    dataset.entries.append(PackedCall.of(dataset[0]).write(path))
    dataset.save_manifest()
    crashing = f"{BAD}:exit_at_once"
    code, out, err = run_cli(
        *("--dir", str(recorded), *QUICK, "--kernels", "torch-math", "--json", "-"),
        *("--baseline-kernel", crashing, "--errors-against", crashing, "--check"),
    )
    assert (code, err.strip()) == (1, f"replay: failed: {crashing} (crash)")
    rows = [json.loads(line) for line in out.splitlines()]
    assert [row["kernel"] for row in rows] == ["torch-math", crashing] * 4
    assert [row["status"] for row in rows] == ["ok", "crash"] * 4
    assert all(row["time_ms"] and not row["speedup"] for row in rows[::2])
    assert all(row["accuracy"]["kernel"] is None for row in rows[::2])
    told = "not tried again, it ended 3 workers"
    assert [told in row["reason"] for row in rows[1::2]] == [False, False, True, True]


ALONE = """
import os, pathlib
from torch.nn.functional import scaled_dot_product_attention
here = pathlib.Path(__file__).parent
served = set()

def serve(name, *arguments, **options):
    served.add(name)
    (here / name).write_text(str(os.getpid()))
    if len(served) > 1:
        raise RuntimeError(f"one process, and {len(served)} of its kernels")
    return scaled_dot_product_attention(*arguments, **options)

def first(*arguments, **options): return serve("first", *arguments, **options)
def second(*arguments, **options): return serve("second", *arguments, **options)
def crash(*arguments, **options): os._exit(9)
"""


@pytest.mark.slow
def test_kernels_that_want_a_process_of_their_own(tmp_path: Path, quick: Settings) -> None:
    """Together `second` would fail, and a crash would end what `first` is in."""
    file = tmp_path / "alone.py"
    file.write_text(ALONE)
    alone = [
        Kernel(f"{file}:{name}", find("torch-math").attention, own_process=True)
        for name in ("first", "crash", "second")
    ]
    asked = [alone[0], find("torch-math"), *alone[1:]]
    call = synthetic_workload("call", "random", Spec(1, 2, 2, 64, 64, 32, 32), seed=0)
    environment = Environment("this", sys.executable, 60)
    try:
        rows = environment.replay(call, asked, quick, lambda stage: None)
        pids = [int((tmp_path / name).read_text()) for name in ("first", "second")]
        assert len(set(pids)) == 2
        assert all(Path(f"/proc/{pid}").exists() for pid in pids)
    finally:
        environment.close()
    assert not any(Path(f"/proc/{pid}").exists() for pid in pids)

    assert [row.kernel for row in rows] == [*(kernel.name for kernel in asked), "torch-default"]
    assert [row.status for row in rows] == ["ok", "ok", "crash", "ok", "ok"]
    assert rows[2].reason == "the worker exited with code 9"
    assert all(row.environment == "this" and row.machine.torch for row in rows)
    assert [row.speedup and row.speedup.vs for row in rows] == [
        *("torch-default", "torch-default", None, "torch-default", None)
    ]


DISTURBING = """
import os, pathlib, time, torch
from torch.nn.functional import scaled_dot_product_attention
here = pathlib.Path(__file__).parent

def serve(name, *arguments, **options):
    (here / name).write_text(str(os.getpid()))
    return scaled_dot_product_attention(*arguments, **options)

def honest(*arguments, **options): return serve("honest", *arguments, **options)

def setting(*arguments, **options):
    torch.set_default_dtype(torch.float64)
    return serve("setting", *arguments, **options)

def function(*arguments, **options):
    time.sleep = lambda seconds: None
    return serve("function", *arguments, **options)
"""


@pytest.mark.slow
def test_kernels_that_disturb_others_are_alone_from_then_on(
    tmp_path: Path, quick: Settings
) -> None:
    file = tmp_path / "disturbing.py"
    file.write_text(DISTURBING)
    names = ("function", "honest", "setting")
    kernels = [find(f"{file}:{name}") for name in names]
    call = synthetic_workload("call", "random", Spec(1, 2, 2, 64, 64, 32, 32), seed=0)
    environment = Environment("this", sys.executable, 60)
    try:
        rows = environment.replay(call, kernels, quick, lambda stage: None)
        pids = {(tmp_path / name).read_text() for name in names}
    finally:
        environment.close()
    assert len(pids) == 3
    assert [(row.kernel.rpartition(":")[2], row.status, row.process != "") for row in rows] == [
        ("function", "error", True),
        ("honest", "ok", False),
        ("setting", "ok", True),
        ("torch-default", "ok", False),
    ]
    assert rows[0].reason == "replaces time.sleep, which measurements rely on"
    assert "changes torch.get_default_dtype" in rows[2].flags


@pytest.mark.slow
def test_what_is_compiled_disturbs_nobody(run_cli: RunCli) -> None:
    code, out, _ = run_cli(
        *SHAPE, *QUICK, "--kernels", "flex,torch-math-compiled,torch-flash-autotuned", "--json", "-"
    )
    rows = rows_of(out)
    assert code == 0
    assert [row["status"] for row in rows.values()] == ["ok"] * 4
    assert {row["process"] for row in rows.values()} == {""}
    assert not [
        each for row in rows.values() for each in row["flags"] if each.startswith("changes")
    ]


STALLS = """
import pathlib, time
from torch.nn.functional import scaled_dot_product_attention
here = pathlib.Path(__file__).parent
count = 0

def stall(query, key, value, *others, **options):
    global count
    if float(query.abs().max()) == float((here / "first").read_text()):
        return scaled_dot_product_attention(query, key, value, *others, **options)
    if not (here / "go on").exists():
        (here / "stalled").touch()
        time.sleep(3600)
    return scaled_dot_product_attention(query, key, value, *others, **options)
"""


@pytest.fixture
def stalling(recorded: Path, tmp_path: Path) -> Path:
    """A kernel that hangs on every call but the first."""
    file = tmp_path / "stalls.py"
    file.write_text(STALLS)
    (tmp_path / "first").write_text(str(float(Dataset.open(recorded)[0].query.abs().max())))
    return file


@pytest.fixture
def begun(
    recorded: Path, stalling: Path, tmp_path: Path
) -> Iterator[tuple[subprocess.Popen[str], Surroundings, tuple[str, ...]]]:
    """A command that has written its first call's rows and hangs in the second."""
    surroundings = Surroundings.under(tmp_path)
    rows = str(tmp_path / "rows.jsonl")
    arguments = ("--dir", str(recorded), *QUICK, "--kernels", f"{stalling}:stall", "--json", rows)
    process = surroundings.start(*arguments)
    try:
        wait_for(tmp_path / "stalled")
        yield process, surroundings, arguments
    finally:
        process.kill()
        process.communicate()


def test_ctrl_c_ends_the_run_and_its_children(
    begun: tuple[subprocess.Popen[str], Surroundings, tuple[str, ...]],
) -> None:
    process, surroundings, _ = begun
    assert len(surroundings.processes()) == 3  # with a worker and the judge
    process.send_signal(signal.SIGINT)
    out, err = process.communicate(timeout=20)
    assert (process.returncode, out) == (130, "")
    assert err.strip().endswith("replay: interrupted")
    assert "Traceback" not in err
    assert surroundings.wait_until_nothing_runs()
    assert surroundings.left_files() == []


@pytest.mark.slow
def test_a_killed_run_leaves_no_child_and_is_continued(
    begun: tuple[subprocess.Popen[str], Surroundings, tuple[str, ...]],
    run_cli: RunCli,
    tmp_path: Path,
) -> None:
    process, surroundings, arguments = begun
    process.kill()
    process.communicate()
    assert surroundings.wait_until_nothing_runs()
    assert surroundings.left_files() == []

    rows = tmp_path / "rows.jsonl"
    before = rows.read_text().splitlines()
    assert len(before) == 2
    (tmp_path / "go on").touch()
    code, out, _ = run_cli(*arguments, "--resume")
    assert code == 0
    after = rows.read_text().splitlines()
    assert after[:2] == before
    names = [json.loads(line)["call"]["name"] for line in after]
    assert names == [f"model-{index:06d}" for index in range(3) for _ in range(2)]
    assert "3 calls" in out


SCRIPTS = {
    "talks-nonsense": "say(ready=True); receive(); os.write(replies, b'nonsense\\n'); rest()",
    "dies-idle": "say(ready=True); receive(); say(at='a'); say(done=True); os._exit(4)",
    "slow-and-partial": (
        "say(ready=True); receive(); line = b'{\"at\": \"' + 'é'.encode() * 10**6 + b'\"}\\n'\n"
        "for piece in (line[:7], line[7:100001], line[100001:]):\n"
        "    time.sleep(0.1)\n"
        "    while piece: piece = piece[os.write(replies, piece):]\n"
        "say(done=True); rest()"
    ),
    "prints-for-ever": "begin()\nwhile True: os.write(1, b'y' * 65536)",
    "closes-its-output": (
        "say(ready=True); receive(); os.close(1); os.close(2); say(at='a'); time.sleep(0.3)\n"
        "say(done=True); rest()"
    ),
    "never-ready": "print('not a worker'); sys.exit(5)",
    "aborts": "begin(); os.write(1, b'the last words, cut \\xff short'); os.abort()",
    "real-time-signal": "begin(); os.kill(os.getpid(), signal.SIGRTMIN + 1)",
    "prints-and-dies": (
        "begin(); print('x' * 2**20); print('the last words', flush=True); os._exit(1)"
    ),
    "shuts-its-mouth": "begin(); os.close(replies); rest()",
    "leaves-a-child-with-its-pipes": "begin(); os.fork() and os._exit(6); rest()",
}
PRELUDE = """
import json, os, signal, sys, time
requests, replies = int(sys.argv[-3]), int(sys.argv[-2])
def say(**message): os.write(replies, json.dumps(message).encode() + b"\\n")
def receive(): os.read(requests, 65536)
def rest(): time.sleep(3600)
def begin(): say(ready=True); receive(); say(at="a")
"""


@pytest.fixture
def worker(tmp_path: Path) -> Iterator[Callable[..., Process]]:
    """`worker(script)`: a process that runs one of `SCRIPTS` in place of the worker."""
    started: list[Process] = []

    def make(name: str, timeout: float = 5) -> Process:
        script = tmp_path / f"{name}.py"
        script.write_text(PRELUDE + SCRIPTS[name])
        python = tmp_path / f"an interpreter for {name}"
        python.write_text(f'#!/bin/sh\nexec "{sys.executable}" -S "{script}" "$@"\n')
        python.chmod(0o755)
        started.append(Process(str(python), timeout))
        return started[-1]

    yield make
    for process in started:
        process.close()


def open_descriptors() -> int:
    return len(list(Path("/proc/self/fd").iterdir()))


@pytest.mark.parametrize(
    ("script", "status", "reason", "log", "timeout"),
    [
        ("talks-nonsense", "crash", "something else wrote into the worker's replies", "", 5),
        ("prints-for-ever", "timeout", "no sign of life for 0.5 s", "y", 0.5),
        ("shuts-its-mouth", "crash", "closed its pipe and did not end", "", 5),
        ("aborts", "crash", "ended by SIGABRT", "the last words, cut � short", 5),
        ("real-time-signal", "crash", "ended by signal 3", "", 5),
        ("prints-and-dies", "crash", "exited with code 1", "the last words", 5),
    ],
)
def test_deaths(
    worker: Callable[..., Process],
    monkeypatch: pytest.MonkeyPatch,
    script: str,
    status: str,
    reason: str,
    log: str,
    timeout: float,
) -> None:
    monkeypatch.setattr("replay.workers.process.ENDING_SECONDS", 0.2)
    process = worker(script, timeout)
    before = open_descriptors()
    for _ in range(2):  # it is started again
        with pytest.raises(Died) as died:
            list(process.ask(do="something"))
        assert died.value.status == status
        assert reason in died.value.reason
        assert log in died.value.log
        assert len(died.value.log) <= LOG_BYTES
    assert open_descriptors() == before


@pytest.mark.timeout(60)
def test_a_death_is_noticed_long_before_the_timeout(worker: Callable[..., Process]) -> None:
    """The pipes stay open: nothing but a look at the process can tell."""
    with pytest.raises(Died, match="exited with code 6"):
        list(worker("leaves-a-child-with-its-pipes", 3600).ask(do="something"))


def test_a_death_while_idle_is_nobodys(worker: Callable[..., Process]) -> None:
    process = worker("dies-idle")
    for _ in range(3):
        assert list(process.ask(do="something")) == [{"at": "a"}]
        time.sleep(0.2)


def test_a_long_line_in_pieces(worker: Callable[..., Process]) -> None:
    (message,) = worker("slow-and-partial").ask(do="something")
    assert message["at"] == "é" * 10**6


def test_a_worker_without_output(worker: Callable[..., Process]) -> None:
    assert list(worker("closes-its-output").ask(do="something")) == [{"at": "a"}]


def test_who_stops_listening_leaves_no_answers_behind(worker: Callable[..., Process]) -> None:
    process = worker("slow-and-partial")
    answers = process.ask(do="something")
    next(answers)
    answers.close()  # type: ignore[attr-defined]
    (message,) = process.ask(do="something")
    assert message["at"].startswith("é")


def test_a_worker_that_cannot_start(worker: Callable[..., Process], tmp_path: Path) -> None:
    before = open_descriptors()
    for _ in range(2):
        with pytest.raises(CannotStart, match="exited with code 5: not a worker"):
            list(worker("never-ready").ask(do="something"))
        with pytest.raises(CannotStart, match="No such file"):
            list(Process(str(tmp_path / "nothing"), 5).ask(do="something"))
        (tmp_path / "text").write_text("no program")
        (tmp_path / "text").chmod(0o755)
        with pytest.raises(CannotStart, match="Exec format error"):
            list(Process(str(tmp_path / "text"), 5).ask(do="something"))
    assert open_descriptors() == before


def test_workers_can_start_before_this_process_imports_torch() -> None:
    program = "import replay.workers.process, sys; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", program]).returncode == 0


def environments_of(monkeypatch: pytest.MonkeyPatch, *processes: Process) -> list[dict[str, str]]:
    """What processes would be started with."""
    started: list[dict[str, str]] = []

    def popen(*_: object, env: dict[str, str], **__: object) -> None:
        started.append(env)
        raise OSError("enough")

    monkeypatch.setattr(subprocess, "Popen", popen)
    for process in processes:
        with pytest.raises(CannotStart):
            process.start()
    return started


def test_only_the_judge_waits_asleep(monkeypatch: pytest.MonkeyPatch) -> None:
    """How a kernel's threads wait is part of what is timed."""
    monkeypatch.delenv("OMP_WAIT_POLICY", raising=False)
    both = environments_of(monkeypatch, Process(sys.executable, 1.0), judge_process(1.0))
    assert [env.get("OMP_WAIT_POLICY") for env in both] == [None, "PASSIVE"]


def test_torch_compile_does_not_move_tritons_cache(monkeypatch: pytest.MonkeyPatch) -> None:
    """It does where the variable is not set: kernels that come after it are compiled again."""
    knobs = pytest.importorskip("triton.knobs", reason="an older Triton")
    monkeypatch.delenv("TRITON_CACHE_DIR", raising=False)
    (worker,) = environments_of(monkeypatch, Process(sys.executable, 1.0))
    assert worker["TRITON_CACHE_DIR"] == knobs.cache.dir
    monkeypatch.setenv("TRITON_CACHE_DIR", "/elsewhere")
    (worker,) = environments_of(monkeypatch, Process(sys.executable, 1.0))
    assert worker["TRITON_CACHE_DIR"] == "/elsewhere"


def test_a_worker_runs_where_it_is_placed() -> None:
    cpu = max(os.sched_getaffinity(0))
    place = Place({"CUDA_VISIBLE_DEVICES": "3"}, frozenset({cpu}))
    for process in (Process(sys.executable, 60, place=place), judge_process(60, place)):
        for each in (process, process.another()):
            each.start()
            try:
                assert each._child is not None
                assert os.sched_getaffinity(each._child.pid) == {cpu}
                environ, variables = Path(f"/proc/{each._child.pid}/environ"), b""
                while not variables:  # until the new program is there
                    assert each._child.poll() is None
                    variables = environ.read_bytes()
                assert b"CUDA_VISIBLE_DEVICES=3" in variables.split(b"\0")
            finally:
                each.close()


def test_a_worker_is_usable_or_not() -> None:
    environment = Environment("this", sys.executable, 60)
    try:
        assert environment.works_on(torch.device("cpu"))
        assert not environment.works_on(torch.device("cuda:7"))
    finally:
        environment.close()


@pytest.mark.parametrize(
    "device",
    [
        "no such device",
        *(pytest.param(each, marks=pytest.mark.slow) for each in ("cpu", "cuda:7", None)),
    ],
)
def test_whatever_comes_of_a_preparation_nobody_hears_of_it(device: str | None) -> None:
    with first_processes(60) as first:
        first.prepare(device)
        for process in first:
            child = process._child
            answers = list(process.ask(do="touch", device="cpu"))
            assert answers == [{"works": True}]
            assert process._child is child


def test_a_worker_imports_what_kernels_need_while_the_judge_is_at_work(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    done: list[str] = []

    def fails() -> None:
        done.append("failed")
        raise ImportError

    def kernel(name: str, warm_up: Callable[[], None] | None) -> Kernel:
        return dataclasses.replace(factories.kernel(name), warm_up=warm_up)

    kernels = [
        kernel("plain", None),
        kernel("broken", fails),
        kernel("needs", lambda: done.append("imported")),
    ]
    guard = Guard()
    monkeypatch.setattr(guard, "restore", lambda name: done.append(f"{name} settled"))

    def hear() -> dict[str, Any]:
        done.append("heard")
        return {"answer": 1}

    monkeypatch.setattr(kernel_server, "_warm", set())
    monkeypatch.setattr(gc, "freeze", lambda: done.append("frozen"))
    busy = kernel_server._busy_at_first(hear, kernels, guard)
    assert [busy(), busy()] == [{"answer": 1}] * 2
    at_first = ["failed", "broken settled", "imported", "needs settled", "frozen"]
    assert done == [*at_first, "heard", "heard"]
    kernel_server._busy_at_first(hear, kernels, guard)()
    assert done == [*at_first, "heard", "heard", "heard"]


def test_kernels_that_compile_with_torch_say_so() -> None:
    compiled = {name for name, kernel in catalogue().items() if kernel.warm_up is import_compiler}
    assert compiled == {
        name for name in catalogue() if name == "flex" or name.endswith(("-compiled", "-autotuned"))
    }


def test_a_worker_that_dies_of_its_preparation_is_replaced() -> None:
    process = Process(sys.executable, 60)
    request = {
        "workload": synthetic_workload("a", "b", Spec(1, 1, 1, 4, 4, 8, 8), 0).source,
        "kernels": [f"{BAD}:segfault"],
        "settings": Settings(torch.device("cpu"), "warm").to_json(),
    }
    process.prepare(do="call", **request)
    child = process._child
    try:
        assert process.answer(do="touch", device="cpu") == {"works": True}
        assert child is not None
        assert process._child is not child
    finally:
        process.close()


def test_what_waits_for_a_worker_can_be_stopped() -> None:
    place = Place()
    process = Process(sys.executable, 600, place=place)
    seen: list[str] = []

    def ask() -> None:
        request = {
            "workload": synthetic_workload("a", "b", Spec(1, 1, 1, 4, 4, 8, 8), 0).source,
            "kernels": [f"{BAD}:hang"],
            "settings": Settings(torch.device("cpu"), "warm").to_json(),
        }
        try:
            for message in process.ask(do="call", **request):
                seen.append(message.get("at", ""))
        except Stopped:
            seen.append("stopped")

    thread = threading.Thread(target=ask)
    thread.start()
    try:
        while f"{BAD}:hang" not in seen:
            assert thread.is_alive()
            time.sleep(0.01)
        child = process._child
        assert child is not None
    finally:
        place.stopped.set()
        thread.join(30)
    assert seen[-1] == "stopped"
    assert child.poll() is not None
    with pytest.raises(Stopped):
        process.start()
