"""Processes are stopped, resumed and ended with all their descendants."""

import os
import signal
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
os.write(1, b"escaped\\n")  # in one piece, beside the other process
exec(sys.argv[2])
"""
"""Its grandchild has another session and an empty environment, and its parent has ended."""
IN_A_THREAD = """
import subprocess, sys, threading
command = [sys.executable, "-S", "-c", *sys.argv[1:]]
thread = threading.Thread(target=subprocess.Popen, args=[command])
thread.start()
thread.join()
threading.Event().wait()
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


def test_stopping_waits_for_the_end_of_system_calls(start: Start) -> None:
    """A process stops only after a call of the system, which may copy memory for seconds."""
    program = "import os; file, data = os.memfd_create(''), bytes(2**27); print(1, flush=True)"
    writer = start(f"{program}; os.pwrite(file, data, 0); {CHILD}")
    line_of(writer)
    assert processes.stop(writer.pid)
    assert state_of(writer.pid) == "T"


def supervised(start: Start, end: str) -> tuple[subprocess.Popen[str], list[int]]:
    """Start a supervisor; return also its child, which runs `end`, and an orphan of the child."""
    supervisor = start(SUPERVISED, ROOT, end)
    assert {line_of(supervisor), line_of(supervisor)} == {"escaped", "started"}
    return supervisor, processes.family(supervisor.pid)[1:]


def test_family_is_stopped_resumed_and_ended(start: Start) -> None:
    supervisor, others = supervised(start, "time.sleep(3600)")
    assert len(others) == 2
    for act, states in ((processes.stop, "T"), (processes.resume, "SR"), (processes.stop, "T")):
        act(supervisor.pid)
        for each in others:
            wait_for(each, states)
    processes.kill(supervisor.pid)  # stopped processes end too
    for each in others:
        wait_for(each, "")


@pytest.mark.parametrize(
    ("end", "code"), [("sys.exit(3)", 3), ("os.abort()", -6), ("os.kill(os.getpid(), 9)", -9)]
)
def test_supervisor_ends_as_its_child_after_the_family(start: Start, end: str, code: int) -> None:
    supervisor, others = supervised(start, f"sys.stdin.readline(); {end}")
    supervisor.communicate("\n")
    assert supervisor.returncode == code
    assert [state_of(each) for each in others] == ["", ""]


def test_worker_ends_with_its_supervisor(start: Start) -> None:
    """A kernel can end the supervisor, which leaves only the worker's descendants."""
    supervisor, (child, orphan) = supervised(start, "time.sleep(3600)")
    supervisor.kill()
    wait_for(child, "")
    os.kill(orphan, signal.SIGKILL)


def test_process_is_open_again_after_the_last_call(start: Start) -> None:
    program = "import sys; sys.path.insert(0, sys.argv[1]); from replay.isolation import processes"
    program += "; hiding = processes.Hiding(); calls = hiding.begin, hiding.begin, hiding.end"
    program += "; print([call() or processes._prctl(3) for call in (*calls, hiding.end)])"
    assert line_of(start(program, ROOT)) == "[0, 0, 0, 1]"


def test_family_ends_with_the_process_that_began_it_and_not_with_the_thread(start: Start) -> None:
    parent = start(IN_A_THREAD, SUPERVISED, ROOT, "time.sleep(3600)")
    assert {line_of(parent), line_of(parent)} == {"escaped", "started"}
    _, supervisor, *others = processes.family(parent.pid)
    time.sleep(2 * processes.LOOK_SECONDS)
    assert [state_of(each) for each in others] == ["S", "S"]
    processes.stop(supervisor, spared=True)
    parent.kill()
    for each in (supervisor, *others):
        wait_for(each, "")


def test_processor_time_includes_descendants(start: Start) -> None:
    burn = "while sum(os.times()[:2]) < 0.3: pass"
    ended = f"if os.fork() == 0:\n  {burn}\n  os._exit(0)\nos.wait()\n{burn}\n"
    parent, (child, *_) = supervised(start, f"{ended}print('burnt', flush=True); time.sleep(3600)")
    assert line_of(parent) == "burnt"
    used = processes.processor_seconds(child)
    assert processes.processor_seconds(parent.pid) >= used > 0.25
    assert processes.processor_seconds(child, with_ended=True) > used + 0.25
    waited = processes.waited_seconds(child)
    assert processes.waited_seconds(parent.pid) >= waited >= 0
    missing = 2**22 + 1
    assert processes.processor_seconds(missing) == processes.waited_seconds(missing) == 0
