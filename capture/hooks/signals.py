"""Recognises exceptions for the user's program that happen to be raised while our code runs."""

from __future__ import annotations

import functools
import signal
import sys
import threading
from types import CodeType

_PACKAGES = {"capture", "torch", "builtins"} | sys.stdlib_module_names
"""Packages whose code our own work runs; errors of their classes may be failures of ours."""


def is_meant_for_program(error: BaseException) -> bool:
    """Return whether an error is meant for the program, such as the program's time limit.

    Such an error was raised by a signal handler of the program, or set by another thread.
    """
    return _is_of_signal_handler(error) or _is_of_another_thread(error)


def _is_of_signal_handler(error: BaseException) -> bool:
    if threading.current_thread() is not threading.main_thread():
        return False  # Python runs signal handlers in the main thread only
    codes = {_code(signal.getsignal(number)) for number in signal.valid_signals()}
    traceback = error.__traceback__
    while traceback is not None:
        if traceback.tb_frame.f_code in codes:
            return True
        traceback = traceback.tb_next
    return False


def _is_of_another_thread(error: BaseException) -> bool:
    """Return whether an error has a class of the program but was raised in our own code.

    An error that the program's own tensors or models raise comes from the program's code instead.
    """
    traceback = error.__traceback__
    if traceback is None or _package(type(error).__module__) in _PACKAGES:
        return False
    while traceback is not None:
        if _package(traceback.tb_frame.f_globals.get("__name__")) not in _PACKAGES:
            return False
        traceback = traceback.tb_next
    return True


def _package(module: object) -> str:
    return str(module).partition(".")[0]


def _code(handler: object) -> CodeType | None:
    """Return the code of a Python function, method, partial function or callable object."""
    while isinstance(handler, functools.partial):
        handler = handler.func
    for function in (handler, handler.__call__ if callable(handler) else None):
        code = getattr(function, "__code__", None)  # a method has the code of its function
        if isinstance(code, CodeType):
            return code
    return None
