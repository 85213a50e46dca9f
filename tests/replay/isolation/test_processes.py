"""Processes are stopped, resumed and ended with all their descendants."""

from __future__ import annotations

import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from replay.isolation import processes

pytestmark = pytest.mark.skipif(
    not processes.IS_POSSIBLE, reason="reads the states of processes in /proc"
)

ROOT = str(Path(processes.__file__).resolve().parents[2])
CHILD = "import time; print('started', flush=True); time.sleep(3600)"
PARENT = f"""
import subprocess, sys, time
child = subprocess.Popen([sys.executable, "-S", "-c", {CHILD!r}], start_new_session=True)
print(child.pid, flush=True)
time.sleep(3600)
"""
SUPERVISED = f"""
import os, signal, sys, time
sys.path.insert(0, sys.argv[1])
from replay.isolation.processes import supervise
supervise()
if os.fork() == 0:
    os.setsid()
    if os.fork() == 0:
        os.execve(sys.executable, [sys.executable, "-S", "-c", {CHILD!r}], {{}})
    os._exit(0)
os.wait()
print("escaped", flush=True)
exec(sys.argv[2])
"""
"""Its grandchild has another session and an empty environment, and its parent has ended."""
DIES_WITH_PARENT = """
import sys, time
sys.path.insert(0, sys.argv[1])
from replay.isolation.processes import end_with_parent
end_with_parent()
print("started", flush=True)
time.sleep(3600)
"""

Start = Callable[..., subprocess.Popen[str]]


@pytest.fixture
def start() -> Iterator[Start]:
    """`start(program, argument, …)` runs a Python program."""
    started: list[subprocess.Popen[str]] = []

    def begin(program: str, *arguments: str) -> subprocess.Popen[str]:
        command = [sys.executable, "-S", "-c", program, *arguments]
        pipe = subprocess.PIPE
        started.append(subprocess.Popen(command, stdin=pipe, stdout=pipe, text=True))
        return started[-1]

    yield begin
    for process in started:
        processes.kill(process.pid)
        process.communicate()


def line_of(process: subprocess.Popen[str]) -> str:
    assert process.stdout is not None
    return process.stdout.readline().strip()


def state_of(pid: int) -> str:
    """Return the state of a process (T: stopped, Z: ended); empty if there is no such process."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(") ")[2][0]
    except OSError:
        return ""


def wait_for(pid: int, states: str) -> None:
    """Wait until a process is in one of these states; an empty string stands for its end."""
    while state_of(pid) not in ((*states,) if states else ("", "Z")):
        time.sleep(0.01)


def test_process_is_stopped_and_resumed_with_its_descendants(start: Start) -> None:
    parent = start(PARENT)
    family = [parent.pid, int(line_of(parent))]
    line_of(parent)  # the child has started
    assert processes.family(parent.pid) == family
    processes.stop(parent.pid)
    for each in family:
        wait_for(each, "T")
    processes.resume(parent.pid)
    for each in family:
        wait_for(each, "SR")
    processes.stop(parent.pid)
    processes.kill(parent.pid)  # stopped processes end too, and those in other sessions
    for each in family:
        wait_for(each, "")


def supervised(start: Start, end: str) -> tuple[subprocess.Popen[str], list[int]]:
    """Start a supervisor; return also its child, which runs `end`, and an orphan of the child."""
    supervisor = start(SUPERVISED, ROOT, end)
    assert {line_of(supervisor), line_of(supervisor)} == {"escaped", "started"}
    return supervisor, processes.family(supervisor.pid)[1:]


def test_descendant_cannot_leave_the_family(start: Start) -> None:
    supervisor, others = supervised(start, "time.sleep(3600)")
    assert len(others) == 2
    processes.stop(supervisor.pid)
    for each in others:
        wait_for(each, "T")
    processes.kill(supervisor.pid)
    for each in others:
        wait_for(each, "")


@pytest.mark.parametrize(
    ("end", "code"), [("sys.exit(3)", 3), ("os.abort()", -6), ("os.kill(os.getpid(), 9)", -9)]
)
def test_supervisor_ends_as_its_child_but_after_the_family(
    start: Start, end: str, code: int
) -> None:
    supervisor, others = supervised(start, f"sys.stdin.readline(); {end}")
    supervisor.communicate("\n")
    assert supervisor.returncode == code
    assert [state_of(each) for each in others] == ["", ""]


def test_memory_can_be_hidden(start: Start) -> None:
    program = "import ctypes, sys; sys.path.insert(0, sys.argv[1]); from replay.isolation import "
    program += "processes; processes.hide_memory(); print(ctypes.CDLL(None).prctl(3, 0, 0, 0, 0))"
    assert line_of(start(program, ROOT)) == "0"


@pytest.mark.parametrize("is_stopped", [False, True])
def test_process_ends_with_its_parent(start: Start, is_stopped: bool) -> None:
    program = PARENT.replace(repr(CHILD), f"{DIES_WITH_PARENT!r}, {ROOT!r}")
    parent = start(program)
    child = int(line_of(parent))
    assert line_of(parent) == "started"
    if is_stopped:
        processes.stop(child)
        wait_for(child, "T")
    parent.kill()
    parent.wait()
    wait_for(child, "")


def test_processor_time_includes_descendants(start: Start) -> None:
    busy = "sum(range(10**7)); " + CHILD
    parent = start(PARENT.replace(repr(CHILD), repr(busy)))
    child = int(line_of(parent))
    assert line_of(parent) == "started"
    used = processes.processor_seconds(child)
    assert processes.processor_seconds(parent.pid) >= used > 0
    waited = processes.waited_seconds(child)
    assert processes.waited_seconds(parent.pid) >= waited >= 0
    missing = 2**22 + 1
    assert processes.processor_seconds(missing) == 0
    assert processes.waited_seconds(missing) == 0
