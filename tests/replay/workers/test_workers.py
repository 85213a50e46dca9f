"""A faulty kernel loses only its own row, and leaves no process or file behind."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
import time
import uuid
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple

import pytest

import replay as replay_package
from capture.storage.dataset import Dataset
from replay.bench.settings import Settings
from replay.kernels.registry import find
from replay.workers.environments import Environment
from replay.workers.process import LOG_BYTES
from replay.workloads.random_calls import Spec
from replay.workloads.workload import random_workload as synthetic_workload

REPOSITORY = Path(replay_package.__file__).resolve().parent.parent
BAD = Path(__file__).with_name("bad_kernels.py")
COMMAND = (
    f"import sys; sys.path.insert(0, {str(REPOSITORY)!r}); from replay.cli.main import main; main()"
)
SHAPE = ("random", "-b", "1", "-hq", "2", "-sq", "64", "-d", "32", "--dtype", "float32")
QUICK = ("--rounds", "3", "--device", "cpu")

RunCli = Callable[..., tuple[int, str, str]]

pytestmark = pytest.mark.skipif(
    sys.platform != "linux", reason="counts processes in /proc, and limits memory as Linux does"
)


class Surroundings(NamedTuple):
    """Environment of a command; its mark identifies processes that the command leaves behind."""

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
        """Return the processes whose environment has the mark, which children inherit."""
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
        """Return leftover files, except torch's own cache."""
        names = [path.name for path in self.temporary.iterdir()]
        return [name for name in names if not name.startswith("torchinductor_")]

    def wait_until_nothing_runs(self, seconds: float = 100) -> bool:
        deadline = time.monotonic() + seconds
        while self.processes() and time.monotonic() < deadline:
            time.sleep(0.05)
        return not self.processes()


def wait_for(path: Path, process: subprocess.Popen[str]) -> None:
    while not path.exists():
        assert process.poll() is None, f"{path} does not come"
        time.sleep(0.05)


def rows_of(text: str) -> dict[str, dict[str, Any]]:
    """Return rows by kernel name; a user's kernel is named without its file."""
    rows = [json.loads(line) for line in text.splitlines()]
    return {row["kernel"].rpartition(":")[2]: row for row in rows}


NAN = "1 elements are NaN or infinite"
FAULTS: dict[str, tuple[str, str, str]] = {
    "segfault": ("crash", "ended by SIGSEGV", "the last words of segfault"),
    # Where SIGINT is ignored, as in a job in the background, Python exits with 1.
    "interrupt": ("crash", "ended by SIGINT|exited with code 1", "KeyboardInterrupt"),
    "fork_and_die": ("crash", "ended by SIGKILL, perhaps by a system out of memory", ""),
    "fork_and_return": ("ok", "is within", ""),
    "stop_waiting": ("ok", "is within", ""),
    "close_pipes": ("crash", "exited with code 1", "Bad file descriptor"),
    "exits_when_imported": ("crash", "exited with code 3", "the last words of an import"),
    "fails_when_imported": ("error", "RuntimeError: built for another PyTorch", ""),
    "segfault_when_timed": ("crash", "ended by SIGSEGV", "in segfault_when_timed"),
    "hang_when_timed": ("timeout", r"no message for 4 s \(--timeout\)", ""),
    "take_memory": ("out-of-memory", r"needed \d", ""),
    "keep_memory": ("out-of-memory", "all of it is kept; it keeps the memory it took", ""),
    "one_nan": ("inaccurate", NAN, ""),
    "fail_at_length": (
        "error",
        r"ValueError: größer  \[31m +x{400,500} \(bad_kernels.py, line \d+\)$",
        "",
    ),
    "never_the_same": ("ok", "is within", ""),
    "close_stdout": ("ok", "is within", ""),
    "print_a_megabyte": ("ok", "is within", ""),
    "expects_collection": ("ok", "is within", ""),
}
SLOW = (
    "interrupt",
    "fork_and_die",
    "close_pipes",
    "segfault_when_timed",
    "hang_when_timed",
    "exits_when_imported",
    "keep_memory",
)
"""Faults that end their worker, whose restart takes seconds."""
FLAGS = {"never_the_same": "not deterministic: calls differ by up to"}


class Finished(NamedTuple):
    code: int
    rows: dict[str, dict[str, Any]]
    stderr: str
    surroundings: Surroundings


def run_of(directory: Path, names: list[str]) -> Finished:
    """Run kernels with these faults between two good kernels."""
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
def test_fault_is_classified(request: pytest.FixtureRequest, name: str) -> None:
    status, reason, log = FAULTS[name]
    finished: Finished = request.getfixturevalue("more_deaths" if name in SLOW else "everything")
    row = finished.rows[name]
    assert row["status"] == status, row["reason"]
    assert re.search(reason, row["reason"]), row["reason"]
    assert log in row["log"]
    assert len(row["log"].encode()) <= 2 * LOG_BYTES
    # A busy machine may be slow through no fault of the kernel.
    flags = [flag for flag in row["flags"] if not flag.startswith("took longer than")]
    assert [bool(re.match(FLAGS.get(name, "none"), flag)) for flag in flags] == [
        True for _ in range(name in FLAGS)
    ]
    assert (row["time_ms"] is not None) == (status in ("ok", "inaccurate"))
    assert (row["speedup"] is not None) == (status == "ok")
    assert row["machine"]["torch"]
    assert row["call"]["shape"]["q_len"] == 64


def test_other_rows_are_unaffected(everything: Finished) -> None:
    faults = [name for name in FAULTS if name not in SLOW]
    assert list(everything.rows) == ["good", *faults, "torch-math", "torch-default"]
    for name in ("good", "torch-math", "torch-default"):
        row = everything.rows[name]
        assert (row["status"], row["flags"], row["log"]) == ("ok", [], "")
        assert row["time_ms"]["n"] == 3
        assert (row["speedup"] is None) == (name == "torch-default")
    assert everything.code == 0
    assert everything.stderr.strip() == ""


def test_no_process_stays_behind(everything: Finished) -> None:
    assert everything.surroundings.processes() == []
    assert everything.surroundings.left_files() == []


@pytest.mark.slow
def test_no_process_stays_behind_after_more_crashes(more_deaths: Finished) -> None:
    assert list(more_deaths.rows) == ["good", *SLOW, "torch-math", "torch-default"]
    test_no_process_stays_behind(more_deaths)


ALONE = """
import os, pathlib, time, torch
from torch.nn.functional import scaled_dot_product_attention
here = pathlib.Path(__file__).parent

def serve(name, *arguments, **options):
    (here / name).write_text(str(os.getpid()))
    return scaled_dot_product_attention(*arguments, **options)

def apart(*arguments, **options): return serve("apart", *arguments, **options)
def crash(*arguments, **options): os._exit(9)
def honest(*arguments, **options): return serve("honest", *arguments, **options)

def setting(*arguments, **options):
    torch.set_default_dtype(torch.float64)
    return serve("setting", *arguments, **options)

def function(*arguments, **options):
    time.sleep = lambda seconds: None
    return serve("function", *arguments, **options)
"""


@pytest.mark.slow
def test_kernels_that_need_or_disturb_a_process_run_alone(tmp_path: Path, quick: Settings) -> None:
    file = tmp_path / "alone.py"
    file.write_text(ALONE)
    names = ("apart", "crash", "honest", "setting", "function")
    kernels = [find(f"{file}:{name}") for name in names]
    kernels[:2] = (replace(kernel, own_process=True) for kernel in kernels[:2])
    call = synthetic_workload("call", "random", Spec(1, 2, 2, 64, 64, 32, 32), seed=0)
    environment = Environment("this", sys.executable, 60)
    try:
        rows = environment.replay(call, kernels, quick, lambda stage: None)
        pids = {int((tmp_path / name).read_text()) for name in names if name != "crash"}
    finally:
        environment.close()
    assert len(pids) == 4
    assert not any(Path(f"/proc/{pid}").exists() for pid in pids)
    found = [(row.kernel.rpartition(":")[2], row.status, row.process != "") for row in rows]
    assert found == [
        ("apart", "ok", True),
        ("crash", "crash", True),
        ("honest", "ok", False),
        ("setting", "ok", True),
        ("function", "error", True),
        ("torch-default", "ok", False),
    ]
    assert rows[0].speedup is not None
    assert rows[0].speedup.vs == "torch-default"
    assert rows[1].reason == "the worker exited with code 9"
    assert "changes torch.get_default_dtype" in rows[3].flags
    assert rows[4].reason == "replaces time.sleep, which measurements rely on"


@pytest.mark.slow
def test_compiled_kernels_disturb_no_other(run_cli: RunCli) -> None:
    code, out, _ = run_cli(*SHAPE, *QUICK, "--kernels", "flex,torch-math-compiled", "--json", "-")
    rows = rows_of(out)
    assert code == 0
    assert [row["status"] for row in rows.values()] == ["ok"] * 3
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
    """Path of a kernel that hangs on every call except the first."""
    file = tmp_path / "stalls.py"
    file.write_text(STALLS)
    (tmp_path / "first").write_text(str(float(Dataset.open(recorded)[0].query.abs().max())))
    return file


@pytest.fixture
def begun(
    recorded: Path, stalling: Path, tmp_path: Path
) -> Iterator[tuple[subprocess.Popen[str], Surroundings, tuple[str, ...]]]:
    """Command that has written the first call's rows and hangs in the second call."""
    surroundings = Surroundings.under(tmp_path)
    rows = str(tmp_path / "rows.jsonl")
    arguments = ("--dir", str(recorded), *QUICK, "--kernels", f"{stalling}:stall", "--json", rows)
    process = surroundings.start(*arguments)
    try:
        wait_for(tmp_path / "stalled", process)
        yield process, surroundings, arguments
    finally:
        process.kill()
        process.communicate()


def test_ctrl_c_ends_the_run_and_its_children(
    begun: tuple[subprocess.Popen[str], Surroundings, tuple[str, ...]],
) -> None:
    process, surroundings, _ = begun
    assert len(surroundings.processes()) == 3  # the command, its worker and its judge
    process.send_signal(signal.SIGINT)
    out, err = process.communicate(timeout=100)
    assert process.returncode == 130
    assert "· 1 call\n" in out  # the call that was measured
    assert "replay: interrupted: 2 of 3 calls left out" in err.splitlines()[-1]
    assert "Traceback" not in err
    assert surroundings.wait_until_nothing_runs()
    assert surroundings.left_files() == []


@pytest.mark.slow
def test_killed_run_leaves_no_child_and_is_continued(
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
