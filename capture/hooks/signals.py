"""Exceptions that a program's own signal handlers raise, wherever the program happens to be."""

from __future__ import annotations

import functools
import signal
import threading
from types import CodeType


def is_of_signal_handler(error: BaseException) -> bool:
    """Whether a signal handler of the program raised the error, say for a time limit of its own.

    Such an error is meant for the program, even if the signal came while our code ran.
    """
    if threading.current_thread() is not threading.main_thread():
        return False  # Python runs signal handlers in the main thread only
    codes = {_code(signal.getsignal(number)) for number in signal.valid_signals()}
    traceback = error.__traceback__
    while traceback is not None:
        if traceback.tb_frame.f_code in codes:
            return True
        traceback = traceback.tb_next
    return False


def _code(handler: object) -> CodeType | None:
    """Return the code of a Python function, method, partial function or callable object."""
    while isinstance(handler, functools.partial):
        handler = handler.func
    for function in (handler, handler.__call__ if callable(handler) else None):
        code = getattr(function, "__code__", None)  # a method has that of its function
        if isinstance(code, CodeType):
            return code
    return None
