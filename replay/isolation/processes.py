"""Functions that observe, stop and end other processes with their descendants.

They need Linux. On other systems nothing is stopped, and rows are flagged `not isolated`.
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import signal
import sys
import threading
import time
from collections.abc import Iterable, Iterator
from pathlib import Path

IS_POSSIBLE = sys.platform == "linux" and all(
    Path(f"/proc/self/task/{os.getpid()}/{name}").exists() for name in ("children", "schedstat")
)
"""True if this system has the lists and counters of processes that isolation needs."""

_PR_SET_PDEATHSIG, _PR_GET_DUMPABLE, _PR_SET_DUMPABLE = 1, 3, 4
_PR_CAPBSET_DROP, _PR_SET_CHILD_SUBREAPER = 24, 36
_CAP_SYS_PTRACE, _VERSION_3 = 19, 0x20080522
LOOK_SECONDS, ENDING_SECONDS = 0.5, 0.01
"""Intervals at which a supervisor looks for its parent's end, and for processes left to end."""
STOP_SECONDS, PAUSE_SECONDS = 2.0, 0.0005
"""Time limit for processes to stop, and the pause between checks of their states."""
_ROUNDS = 10
"""Maximum number of searches for new processes, which started while others were being stopped."""


def supervise(*descriptors: int) -> None:
    """Fork; return only in the child, while this process becomes the child's supervisor.

    The supervisor becomes the parent of every descendant whose own parent ends, even in another
    session. So no process leaves the supervisor's family. When the child or the supervisor's parent
    ends, the supervisor ends all other processes of the family. Then it ends with the child's exit
    code or signal.

    Args:
        descriptors: open files that only the child may use.
    """
    if not IS_POSSIBLE:
        return
    parent = os.getppid()
    _prctl(_PR_SET_CHILD_SUBREAPER, 1)
    if (child := os.fork()) == 0:
        _prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
        return
    signal.signal(signal.SIGTERM, signal.SIG_IGN)  # see `kill`
    signal.pthread_sigmask(signal.SIG_BLOCK, [signal.SIGCHLD])  # for `sigtimedwait`
    nowhere = os.open(os.devnull, os.O_RDWR)
    for descriptor in (1, 2, *descriptors):
        os.dup2(nowhere, descriptor)
    code = None
    # PDEATHSIG would not do: it is sent when the parent's thread that forked ends.
    while code is None and os.getppid() == parent:
        signal.sigtimedwait([signal.SIGCHLD], LOOK_SECONDS)
        code = _wait().get(child)
    while others := family(os.getpid())[1:]:
        _send(signal.SIGKILL, others)
        signal.sigtimedwait([signal.SIGCHLD], ENDING_SECONDS)
        _wait()
    _end_like(1 if code is None else code)


def _wait() -> dict[int, int]:
    """Wait for all children that have ended; return their exit codes."""
    codes = {}
    with contextlib.suppress(ChildProcessError):  # there is no child left
        while (ended := os.waitpid(-1, os.WNOHANG))[0]:
            codes[ended[0]] = os.waitstatus_to_exitcode(ended[1])
    return codes


def _end_like(code: int) -> None:
    """End this process with an exit code, or by a signal if the code is negative."""
    if code < 0:
        with contextlib.suppress(OSError):  # SIGKILL has no handler
            signal.signal(-code, signal.SIG_DFL)
        os.kill(os.getpid(), -code)
    os._exit(code)


def close_off() -> None:
    """Prevent processes that have called this function from opening each other.

    They can still send each other signals. Tracing a process or opening its memory and files
    (`/proc/PID/mem`, `/proc/PID/fd`) needs a process that may dump its memory, or the capability
    CAP_SYS_PTRACE, which root has. This function gives up both.
    """
    if sys.platform != "linux":
        return
    system, header, sets = ctypes.CDLL(None), (ctypes.c_uint * 2)(_VERSION_3), (ctypes.c_uint * 6)()
    _prctl(_PR_CAPBSET_DROP, _CAP_SYS_PTRACE)  # of programs that this process will start
    if system.capget(header, sets) == 0:
        for index in range(3):  # effective, permitted, inheritable
            sets[index] &= ~(1 << _CAP_SYS_PTRACE)
        system.capset(header, sets)
    # With this option of /proc, the parent could not find closed workers, to stop them.
    if "hidepid=" not in Path("/proc/self/mounts").read_text():
        _prctl(_PR_SET_DUMPABLE, 0)


class Hiding:
    """Closes this process to other processes while at least one caller needs it."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._callers = 0
        self._was = 1

    def begin(self) -> None:
        with self._lock:
            if self._callers == 0 and sys.platform == "linux":
                self._was = _prctl(_PR_GET_DUMPABLE)
                _prctl(_PR_SET_DUMPABLE, 0)
            self._callers += 1

    def end(self) -> None:
        with self._lock:
            self._callers -= 1
            if self._callers == 0 and sys.platform == "linux":
                _prctl(_PR_SET_DUMPABLE, self._was)


def _prctl(option: int, value: int = 0) -> int:
    return int(ctypes.CDLL(None).prctl(option, value, 0, 0, 0))


def family(pid: int) -> list[int]:
    """Return a process and all its descendants."""
    found = [pid]
    for each in found:  # grows while it is read
        found += _children(each)
    return found


def _children(pid: int) -> list[int]:
    found: list[int] = []
    for text in _of_threads(pid, "children"):
        found += map(int, text.split())
    return found


def _of_threads(pid: int, name: str) -> Iterator[str]:
    """Yield the text of this file in `/proc` for each thread of a process that has not ended."""
    with contextlib.suppress(OSError):
        for place in Path(f"/proc/{pid}/task").iterdir():
            with contextlib.suppress(OSError):
                yield (place / name).read_text()


def stop(pid: int, *, spared: bool = False) -> bool:
    """Stop a process and all its descendants, and wait until every thread has stopped.

    A thread stops when its system call returns. A call that copies memory may take seconds.

    Args:
        spared: stop only the descendants of a supervisor, which must notice its parent's end.

    Returns:
        False if a thread was still running after `STOP_SECONDS`.
    """
    stopped = {pid} if spared else set()
    for _ in range(_ROUNDS):
        if not (running := set(family(pid)) - stopped):
            break
        _send(signal.SIGSTOP, running)
        stopped |= running
    until = time.monotonic() + STOP_SECONDS
    while any(map(_is_running, stopped - {pid} if spared else stopped)):
        if time.monotonic() > until:
            return False
        time.sleep(PAUSE_SECONDS)
    return True


def _is_running(pid: int) -> bool:
    states = (text.rpartition(") ")[2][:1] for text in _of_threads(pid, "stat"))
    return any(state not in "TtZX" for state in states)


def cores(pid: int) -> dict[int, set[int]]:
    """Return the logical CPUs that each thread of a process and its descendants may use."""
    found = {}
    for each in family(pid):
        with contextlib.suppress(OSError):
            for thread in map(int, os.listdir(f"/proc/{each}/task")):
                found[thread] = os.sched_getaffinity(thread)
    return found


def bind(cores: dict[int, set[int]]) -> None:
    """Let threads use only these logical CPUs."""
    for thread, wanted in cores.items():
        with contextlib.suppress(OSError):  # the thread has ended
            if os.sched_getaffinity(thread) != wanted:
                os.sched_setaffinity(thread, wanted)


def resume(pid: int) -> None:
    """Let a process and its descendants run again."""
    _send(signal.SIGCONT, family(pid))


def kill(pid: int) -> None:
    """End a process and all its descendants, also those in other sessions.

    A supervisor ignores SIGTERM, and ends by itself after its family.
    """
    stop(pid)  # so that no process starts another before it ends
    _send(signal.SIGKILL, family(pid)[1:])
    _send(signal.SIGTERM if IS_POSSIBLE else signal.SIGKILL, [pid])
    _send(signal.SIGCONT, [pid])


def _send(number: signal.Signals, pids: Iterable[int]) -> None:
    for pid in pids:
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.kill(pid, number)


def processor_seconds(pid: int, *, with_ended: bool = False) -> float:
    """Return the processor time that a process and its descendants have used so far.

    Args:
        with_ended: add the time of ended processes whose parents have waited for them, which is
            rounded to about 10 ms.
    """
    total = 0.0
    for each in family(pid):
        with contextlib.suppress(OSError):
            if with_ended:
                fields = Path(f"/proc/{each}/stat").read_text().rpartition(") ")[2].split()
                ticks = sum(map(int, fields[13:15]))  # of waited-for children: user, system
                total += ticks / os.sysconf("SC_CLK_TCK")
            total += time.clock_gettime((~each << 3) | 2)  # the process's CPU clock (Linux)
    return total


def waited_seconds(pid: int) -> float:
    """Return how long all threads of a process and its descendants have waited for a processor."""
    waited = 0
    for each in family(pid):
        waited += sum(int(text.split()[1]) for text in _of_threads(each, "schedstat"))
    return waited / 1e9
