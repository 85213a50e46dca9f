"""Lets a recording write the calls in memory before SIGTERM or SIGHUP ends the process."""

from __future__ import annotations

import _thread
import contextlib
import os
import signal
import threading
from collections.abc import Callable, Iterator
from queue import SimpleQueue
from types import FrameType

from capture.errors import CaptureError

SIGNALS = [getattr(signal, name) for name in ("SIGTERM", "SIGHUP") if hasattr(signal, name)]
"""Signals sent by `kill` or a closed terminal or ssh session; by default they end a process."""


@contextlib.contextmanager
def before_termination(flush: Callable[[], bool]) -> Iterator[None]:
    """Call `flush` when one of `SIGNALS` arrives, then end the process as the signal would.

    The signal may interrupt the main thread while that thread holds a lock that writing needs.
    Therefore another thread calls `flush` while the main thread continues. Signals that the program
    handles or ignores are unchanged. Outside of the main thread, this context manager does nothing.

    Args:
        flush: function that must not raise. If it returns False, because another thread is already
            flushing, the process ends at the end of the `with` block.

    Raises:
        CaptureError: no thread can be started.
    """
    ours = [number for number in SIGNALS if signal.getsignal(number) is signal.SIG_DFL]
    if not can_flush() or not ours:
        yield
        return
    process, main = os.getpid(), threading.get_ident()
    arrived = 0
    flushed = over = False
    wanted: SimpleQueue[int] = SimpleQueue()  # its `put` is safe in a signal handler

    def handler(number: int, frame: FrameType | None) -> None:
        nonlocal arrived
        arrived = number
        # A forked child has nothing to write. After the block, another handler may still call this
        # function.
        if flushed or over or os.getpid() != process:
            _end_by(number)
        wanted.put(number)

    def wait() -> None:
        nonlocal flushed
        number = wanted.get()
        if number and flush():
            flushed = True
            # Only the main thread can end the process by a signal; the signal also wakes it.
            signal.pthread_kill(main, number)

    thread = started(wait)
    for number in ours:
        signal.signal(number, handler)
    try:
        yield
    finally:
        over = True
        if os.getpid() == process:
            wanted.put(0)
            thread.join()
        for number in ours:
            if signal.getsignal(number) is handler:
                signal.signal(number, signal.SIG_DFL)
        if arrived:
            _end_by(arrived)


def can_flush() -> bool:
    """Return whether `before_termination` has an effect in this thread."""
    return threading.current_thread() is threading.main_thread()


class Job:
    """Work in a thread that does not keep the program from ending.

    `threading` keeps its threads in a `WeakSet`. When a thread object is freed, Python code of that
    set runs, and Python discards a KeyboardInterrupt that arrives meanwhile. Therefore a job starts
    its thread without such an object.
    """

    def __init__(self, work: Callable[[], None]) -> None:
        self._work = work
        self._ended = threading.Event()

    def is_alive(self) -> bool:
        return not self._ended.is_set()

    def join(self, timeout: float | None = None) -> None:
        self._ended.wait(timeout)

    def run(self) -> None:
        try:
            self._work()
        finally:
            self._ended.set()


def started(work: Callable[[], None]) -> Job:
    """Start a job.

    Raises:
        CaptureError: no thread can be started.
    """
    job = Job(work)
    try:
        _thread.start_new_thread(job.run, ())
    except RuntimeError as error:
        raise CaptureError(
            f"cannot start the two threads that recording needs ({error}); raise the limit with "
            "`ulimit -u`"
        ) from error
    return job


def _end_by(number: int) -> None:
    signal.signal(number, signal.SIG_DFL)
    os.kill(os.getpid(), number)
