"""Processes seen from outside: their descendants, their processor time, and stopping them.

All of this needs Linux. Elsewhere nothing is stopped, and rows say that they are not isolated.
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import signal
import sys
import time
from collections.abc import Iterable, Iterator
from pathlib import Path

IS_POSSIBLE = sys.platform == "linux" and all(
    Path(f"/proc/self/task/{os.getpid()}/{name}").exists() for name in ("children", "schedstat")
)
"""True if this system has the signals, lists and counters that isolate a worker."""

_PR_SET_PDEATHSIG, _PR_SET_DUMPABLE, _PR_SET_CHILD_SUBREAPER = 1, 4, 36
_ROUNDS = 10
"""Maximum number of searches for processes that were started while others were being stopped."""


def supervise(*descriptors: int) -> None:
    """Return in a new child of this process, which stays behind as the child's supervisor.

    The supervisor becomes the parent of every descendant whose own parent ends, also in another
    session and with another environment. So no process leaves the supervisor's family. The
    supervisor ends as the child ended, after all other processes of the family.

    Args:
        descriptors: open files that belong to the child alone.
    """
    if not IS_POSSIBLE:
        return
    _prctl(_PR_SET_CHILD_SUBREAPER, 1)
    if (child := os.fork()) == 0:
        end_with_parent()
        return
    signal.signal(signal.SIGTERM, signal.SIG_IGN)  # see `kill`
    signal.signal(signal.SIGHUP, lambda *_: _end_family())
    _prctl(_PR_SET_PDEATHSIG, signal.SIGHUP)  # SIGKILL would leave the family behind
    nowhere = os.open(os.devnull, os.O_RDWR)
    for descriptor in (1, 2, *descriptors):
        os.dup2(nowhere, descriptor)
    status = None
    while status is None:
        pid, ended = os.wait()
        status = ended if pid == child else None
    _end_family(os.waitstatus_to_exitcode(status))


def _end_family(code: int = 1) -> None:
    """End all processes of this supervisor's family, and then this process."""
    with contextlib.suppress(ChildProcessError):  # there is no child left
        while True:
            _send(signal.SIGKILL, family(os.getpid())[1:])
            os.wait()
    _end_like(code)


def _end_like(code: int) -> None:
    """End this process with an exit code, or by a signal if the code is negative."""
    if code < 0:
        _prctl(_PR_SET_DUMPABLE, 0)  # the child has dumped its memory already
        with contextlib.suppress(OSError):  # SIGKILL has no handler
            signal.signal(-code, signal.SIG_DFL)
        os.kill(os.getpid(), -code)
    os._exit(code)


def end_with_parent() -> None:
    """Let the system end this process when its parent ends, even while it is stopped."""
    if sys.platform == "linux":
        _prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)


def hide_memory() -> None:
    """Forbid processes of the same user to trace this process and to write its memory.

    They can still send it signals. The parent, the user's own program, can also still be traced,
    because debuggers and profilers need that, unless the system forbids it (Yama).
    """
    if sys.platform == "linux":
        _prctl(_PR_SET_DUMPABLE, 0)


def _prctl(option: int, value: int) -> None:
    ctypes.CDLL(None).prctl(option, value, 0, 0, 0)


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
    """Yield this file of each thread of a process, which may end in the meantime."""
    with contextlib.suppress(OSError):
        for place in Path(f"/proc/{pid}/task").iterdir():
            with contextlib.suppress(OSError):
                yield (place / name).read_text()


def stop(pid: int, *, spared: bool = False) -> None:
    """Stop a process and all its descendants.

    Args:
        spared: do not stop the process itself, a supervisor, which must notice its parent's end.
    """
    stopped = {pid} if spared else set()
    for _ in range(_ROUNDS):
        if not (running := set(family(pid)) - stopped):
            return
        _send(signal.SIGSTOP, running)
        stopped |= running


def resume(pid: int) -> None:
    """Let a process and its descendants run again."""
    _send(signal.SIGCONT, family(pid))


def kill(pid: int) -> None:
    """End a process and all its descendants, also those in other sessions.

    A supervisor ends by itself, after it has waited for its family.
    """
    stop(pid)  # so that none starts another before its own end
    _send(signal.SIGKILL, family(pid)[1:])
    _send(signal.SIGTERM if IS_POSSIBLE else signal.SIGKILL, [pid])
    _send(signal.SIGCONT, [pid])


def _send(number: signal.Signals, pids: Iterable[int]) -> None:
    for pid in pids:
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.kill(pid, number)


def processor_seconds(pid: int) -> float:
    """Return the processor time that a process and its descendants have used so far."""
    total = 0.0
    for each in family(pid):
        with contextlib.suppress(OSError):
            total += time.clock_gettime((~each << 3) | 2)  # the process's CPU clock (Linux)
    return total


def waited_seconds(pid: int) -> float:
    """Return how long all threads of a process and its descendants have waited for a processor."""
    waited = 0
    for each in family(pid):
        waited += sum(int(text.split()[1]) for text in _of_threads(each, "schedstat"))
    return waited / 1e9
