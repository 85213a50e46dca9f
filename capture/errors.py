"""Errors the user can fix, which the command lines print as one sentence, and a warning."""

from __future__ import annotations

import os

from attention_replay.errors import Error


class MissingPackage(Error):
    """A required package is not installed."""

    @classmethod
    def behind(cls, error: BaseException) -> BaseException:
        """Convert a failed import of a missing package; return any other error unchanged.

        A missing submodule of an installed package, including ours, is a bug that pip cannot fix.
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
        reason: what is wrong, without the file where `path` has it.
        path: the file, or what the user calls it.
    """

    def __init__(self, reason: str, path: str | os.PathLike[str] | None = None) -> None:
        super().__init__(reason, path)
        self.reason = reason
        self.path = path

    def __str__(self) -> str:
        return self.reason if self.path is None else f"{os.fspath(self.path)}: {self.reason}"


class RecordingWarning(UserWarning):
    """A recording is not what was asked for; the model's run is not affected."""


def described(error: BaseException) -> str:
    """The class of an error and what it says; a model's own class need not be able to."""
    name = type(error).__name__
    try:
        return f"{name}: {error}"
    except Exception:
        return name
