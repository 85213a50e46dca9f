"""The files that arguments name. Imports no torch."""

from __future__ import annotations

import argparse
import contextlib
import os
import sys
from collections.abc import Iterator, Sequence
from typing import TextIO

from attention_replay import Error
from capture.storage.names import is_of_dataset


class UsageError(Error):
    """The arguments cannot be used; the message names the remedy."""


@contextlib.contextmanager
def opened(
    path: str | None, stdout: TextIO | None = None, *, append: bool = False
) -> Iterator[TextIO | None]:
    """Yield a file to write, None without a path; `-` is stdout.

    Raises:
        UsageError: it cannot be written.
    """
    if path is None:
        yield None
    elif path == "-":
        yield stdout or sys.stdout
    else:
        try:
            file = open(  # noqa: SIM115 - closed below
                path,
                "a" if append else "w",
                encoding="utf-8",
                errors="backslashreplace",
                newline="",
            )
        except OSError as error:
            raise UsageError(f"cannot write {path}: {error.strerror}") from error
        with file:
            yield file


def check_place(path: str | os.PathLike[str] | None) -> None:
    """Find out, before any work, whether a file can be written; without a path, or `-`, it can.

    Raises:
        UsageError: it cannot.
    """
    if path is None or os.fspath(path) == "-":
        return
    if os.path.isdir(path):
        raise UsageError(f"cannot write {path}: it is a directory, name a file")
    if os.path.exists(path) and is_of_dataset(os.path.basename(path)):
        raise UsageError(f"cannot write {path}: it is a recording's own, name another file")
    directory = os.path.dirname(os.path.abspath(path))
    if not os.path.isdir(directory):
        raise UsageError(f"cannot write {path}: create its directory first")
    if not os.access(path if os.path.exists(path) else directory, os.W_OK):
        raise UsageError(f"cannot write {path}: it is write-protected, name another file")
    if os.path.lexists(path):
        return
    try:  # a directory that is a view of something else, a name that is too long
        os.close(os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o666))
        os.unlink(path)
    except OSError as error:
        raise UsageError(f"cannot write {path}: {error.strerror}") from error


def shared_file(arguments: argparse.Namespace, read: Sequence[str], written: Sequence[str]) -> str:
    """Say which two options name one file, where at least one writes it; empty if none do.

    Args:
        read: the options, as attributes, that name a file which is read.
        written: those that name one which is written.
    """
    found: dict[str, str] = {}
    for name in (*read, *written):
        given = getattr(arguments, name)
        if given is None:
            continue
        option = f"--{name.replace('_', '-')}"
        other = found.setdefault("-" if given == "-" else os.path.realpath(given), option)
        if other != option and name in written:
            where = "stdout" if given == "-" else given
            return f"{other} and {option} both name {where}: give each a file of its own"
    return ""
