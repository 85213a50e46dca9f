"""Errors that the user can fix, and one warning. The commands print an error as one sentence."""

from __future__ import annotations

import contextlib
import os
import signal
import traceback
import warnings
from collections.abc import Iterator

from attention_replay.errors import Error, shortened


class MissingPackage(Error):
    """A required package is not installed."""

    @classmethod
    def behind(cls, error: BaseException) -> BaseException:
        """Convert the import error of a missing package; return any other error unchanged.

        A missing submodule of an installed package is a bug that pip cannot fix.
        """
        if not isinstance(error, ModuleNotFoundError) or error.name is None or "." in error.name:
            return error
        return cls(f"{error.name} is required but not installed: pip install {error.name}")


class CaptureError(Error):
    """A recording cannot start or is empty; the message names the remedy.

    The message refers to `record`'s arguments as `out=` or `overwrite=True`, in backquotes, so that
    the command line can replace them with its flags.
    """


class DatasetError(Error):
    """A dataset, or one of its files, cannot be read; the message names the file.

    Args:
        reason: description of the fault, without the file that `path` names.
        path: the file, or its name as the user gave it.
    """

    def __init__(self, reason: str, path: str | os.PathLike[str] | None = None) -> None:
        super().__init__(reason, path)
        self.reason = reason
        self.path = path

    def __str__(self) -> str:
        place = "" if self.path is None else f"{os.fspath(self.path)}: "
        return shortened(f"{place}{self.reason}")


class InvalidCall(ValueError):
    """The model called attention with values that no kernel can compute: a bug of the model.

    Args:
        reason: description of the invalid argument.
        module, step: place of the call in the model.
    """

    def __init__(self, reason: str, module: str, step: int) -> None:
        super().__init__(reason)
        self.module, self.step = module, step


class RecordingWarning(UserWarning):
    """A recording is incomplete; the model's run is not affected."""


def described(error: BaseException) -> str:
    """Return the class and text of an error; only the class if it has none that can be read."""
    name = type(error).__name__
    try:
        return f"{name}: {error}".removesuffix(": ")
    except Exception:
        return name


def reason_of(error: Exception) -> str:
    """Return one line about an error: the system's message of an OSError, else class and text."""
    if isinstance(error, OSError) and error.strerror:
        return error.strerror
    return described(error).partition("\n")[0]


def reraise_from_signal_handler(error: Exception) -> None:
    """Raise an error again if a signal handler raised it, such as the program's own time limit.

    Python may run a handler while our code runs, but its error is meant for the program.
    """
    handlers = map(signal.getsignal, signal.valid_signals())
    codes = {getattr(getattr(one, "__func__", one), "__code__", None) for one in handlers} - {None}
    if any(frame.f_code in codes for frame, _ in traceback.walk_tb(error.__traceback__)):
        raise error


@contextlib.contextmanager
def warned(what: str) -> Iterator[None]:
    """Turn an error of our own code into a warning, so that the program goes on.

    Args:
        what: beginning of the warning, such as "the batch could not be read".
    """
    try:
        yield
    except Exception as error:
        reraise_from_signal_handler(error)
        with contextlib.suppress(Exception):  # the program's filters may raise
            text = f"recording: {what}: {reason_of(error)}"
            warnings.warn(text, RecordingWarning, stacklevel=3)
