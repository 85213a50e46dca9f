"""Lets a recording write what is in memory before SIGTERM ends the process."""

from __future__ import annotations

import contextlib
import os
import signal
import threading
from collections.abc import Callable, Iterator
from queue import SimpleQueue
from types import FrameType

from capture.errors import CaptureError


@contextlib.contextmanager
def before_termination(flush: Callable[[], bool]) -> Iterator[None]:
    """Call `flush` when SIGTERM arrives, then end the process as the signal would have.

    The signal interrupts the main thread anywhere, perhaps where it holds a lock that writing
    needs. So another thread calls `flush`, while the main thread goes on. Does nothing outside the
    main thread, or if the program handles the signal itself.

    Args:
        flush: must not raise; returns False if somebody else is already flushing: then the process
            ends with the `with` block.

    Raises:
        CaptureError: no thread can be started.
    """
    if (
        threading.current_thread() is not threading.main_thread()
        or signal.getsignal(signal.SIGTERM) is not signal.SIG_DFL
    ):
        yield
        return
    process, main = os.getpid(), threading.get_ident()
    arrived = flushed = over = False
    wanted: SimpleQueue[bool] = SimpleQueue()  # can be put to within a signal handler

    def handler(number: int, frame: FrameType | None) -> None:
        nonlocal arrived
        arrived = True
        # A forked child has nothing to write; afterwards, another handler may pass it on to this.
        if flushed or over or os.getpid() != process:
            _terminate()
        wanted.put(True)

    def wait() -> None:
        nonlocal flushed
        if wanted.get() and flush():
            flushed = True
            # Only the main thread can end as the signal would; this wakes it if it waits.
            signal.pthread_kill(main, signal.SIGTERM)

    thread = started(wait, "capture-termination")
    signal.signal(signal.SIGTERM, handler)
    try:
        yield
    finally:
        over = True
        if os.getpid() == process:
            wanted.put(False)
            thread.join()
        if signal.getsignal(signal.SIGTERM) is handler:
            signal.signal(signal.SIGTERM, signal.SIG_DFL)
        if arrived:
            _terminate()


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


def _terminate() -> None:
    signal.signal(signal.SIGTERM, signal.SIG_DFL)
    os.kill(os.getpid(), signal.SIGTERM)
