"""Lets a recording write what is in memory before SIGTERM or SIGHUP ends the process."""

from __future__ import annotations

import contextlib
import os
import signal
import threading
from collections.abc import Callable, Iterator
from queue import SimpleQueue
from types import FrameType

from capture.errors import CaptureError

SIGNALS = [getattr(signal, name) for name in ("SIGTERM", "SIGHUP") if hasattr(signal, name)]
"""What ends a process that does nothing about it: `kill`, and the end of its terminal or ssh."""


@contextlib.contextmanager
def before_termination(flush: Callable[[], bool]) -> Iterator[None]:
    """Call `flush` when one of `SIGNALS` arrives, then end the process as it would have.

    The signal interrupts the main thread anywhere, perhaps where it holds a lock that writing
    needs. So another thread calls `flush`, while the main thread goes on. Does nothing outside the
    main thread, nor about a signal that the program handles itself or that is ignored, as SIGHUP is
    under `nohup`.

    Args:
        flush: must not raise; returns False if somebody else is already flushing: then the process
            ends with the `with` block.

    Raises:
        CaptureError: no thread can be started.
    """
    ours = [each for each in SIGNALS if signal.getsignal(each) is signal.SIG_DFL]
    if threading.current_thread() is not threading.main_thread() or not ours:
        yield
        return
    process, main = os.getpid(), threading.get_ident()
    arrived = 0
    flushed = over = False
    wanted: SimpleQueue[int] = SimpleQueue()  # can be put to within a signal handler

    def handler(number: int, frame: FrameType | None) -> None:
        nonlocal arrived
        arrived = number
        # A forked child has nothing to write; afterwards, another handler may pass it on to this.
        if flushed or over or os.getpid() != process:
            _end_by(number)
        wanted.put(number)

    def wait() -> None:
        nonlocal flushed
        number = wanted.get()
        if number and flush():
            flushed = True
            # Only the main thread can end as the signal would; this wakes it if it waits.
            signal.pthread_kill(main, number)

    thread = started(wait, "capture-termination")
    for each in ours:
        signal.signal(each, handler)
    try:
        yield
    finally:
        over = True
        if os.getpid() == process:
            wanted.put(0)
            thread.join()
        for each in ours:
            if signal.getsignal(each) is handler:
                signal.signal(each, signal.SIG_DFL)
        if arrived:
            _end_by(arrived)


def started(work: Callable[[], None], name: str) -> threading.Thread:
    """Start a thread that the program does not wait for when it ends.

    Raises:
        CaptureError: it cannot be started.
    """
    thread = threading.Thread(target=work, name=name, daemon=True)
    try:
        thread.start()
    except RuntimeError as error:
        raise CaptureError(
            f"recording needs two threads, and there can be no more ({error}); raise the limit "
            "with `ulimit -u`"
        ) from error
    return thread


def _end_by(number: int) -> None:
    signal.signal(number, signal.SIG_DFL)
    os.kill(os.getpid(), number)
