"""Recognises exceptions that are meant for the program and only arrive while our code runs."""

from __future__ import annotations

import functools
import signal
import sys
import threading
from types import CodeType

_PACKAGES = {"capture", "torch", "builtins"} | sys.stdlib_module_names
"""Packages whose code our own work runs, and whose errors it raises."""


def is_meant_for_program(error: BaseException) -> bool:
    """Return whether an error is not a failure of ours, such as the program's time limit.

    A signal handler of the program raised it, or another thread put it into this one.
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

    A tensor or model of the program's own classes raises errors from its own code.
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
        code = getattr(function, "__code__", None)  # a method has that of its function
        if isinstance(code, CodeType):
            return code
    return None
