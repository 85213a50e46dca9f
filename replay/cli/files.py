"""Files named by arguments. Imports no torch."""

from __future__ import annotations

import argparse
import contextlib
import os
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, TextIO

from attention_replay.errors import Error
from capture.command_line.parser import not_empty
from capture.storage.names import is_of_dataset
from capture.text.printable import printable
from replay.rows.replacement import why_not_written
from replay.rows.row_files import Writable

WRITTEN_FILES = ("json", "csv", "checks", "out", "report")
"""Options that name a file to write; `-` means stdout."""

READ_FILES = ("dir", "tolerances")
"""Options of most verbs that name a file to read."""

if TYPE_CHECKING:
    from replay.rows.row import Row

STDOUT = ("/dev/stdout", "/dev/fd/1", "/proc/self/fd/1")
"""Names of stdout; while kernels run, these files lead to stderr (`replay.cli.stdout`)."""


class UsageError(Error):
    """Reason why the arguments cannot be used; the message gives the remedy."""


class NotWritten(Error):
    """Reason why a file could not be written; the message names the file."""


def output_file(given: str) -> str:
    """Return a file to write, for `add_argument(type=…)`; `-` for any name of stdout."""
    return "-" if os.path.abspath(given) in STDOUT else not_empty(given)


def stdout_is_taken(arguments: argparse.Namespace) -> bool:
    """Return True if an option writes to stdout, so that tables go to stderr or are not printed."""
    return "-" in [vars(arguments).get(name) for name in WRITTEN_FILES]


@contextlib.contextmanager
def noted(unwritten: list[str], errors: type[Error] = Error) -> Iterator[None]:
    """Collect the reason why a file cannot be written, without duplicates, and continue."""
    try:
        yield
    except errors as error:
        if str(error) not in unwritten:
            unwritten.append(str(error))


def say_unwritten(unwritten: Sequence[str]) -> int:
    """Print the collected reasons to stderr, and return the exit code."""
    for sentence in unwritten:
        print(f"replay: {printable(sentence)}", file=sys.stderr)
    return 2 if unwritten else 0


@contextlib.contextmanager
def opened(
    path: str | None, stdout: TextIO | None = None, *, append: bool = False
) -> Iterator[Writable | None]:
    """Yield a file to write, or None without a path; `-` means stdout.

    The file keeps its content until the first text is written, or until the `with` block ends
    without any text. A reader may therefore follow the file, and a block that raises before it
    writes leaves the file as it was.

    Raises:
        NotWritten: the file cannot be written.
    """
    if path is None:
        yield None
    elif path == "-":
        yield stdout or sys.stdout
    else:
        output = _Output(path, append=append)
        try:
            if os.path.exists(path) and not os.path.isfile(path):
                output.begin()  # a pipe has no content to keep, and its reader may be waiting
            yield output
        except BaseException:
            with contextlib.suppress(NotWritten):  # the error of the block is reported instead
                output.close()
            raise
        if not output.has_failed:
            output.begin()
        output.close()


class _Output:
    """File that is opened at the first write.

    Args:
        path: path as the user wrote it; a kernel may change the current directory in the meantime.
        append: True to keep the content of the file.
    """

    def __init__(self, path: str, *, append: bool) -> None:
        self._name, self._path = path, os.path.abspath(path)
        self._append = append
        self._file: TextIO | None = None
        self.has_failed = False

    def write(self, text: str) -> int:
        file = self.begin()
        with self._named():
            return file.write(text)

    def flush(self) -> None:
        with self._named():
            if self._file is not None:
                self._file.flush()

    def begin(self) -> TextIO:
        """Open the file if it is closed."""
        with self._named():
            if self._file is None:
                self._file = open(  # noqa: SIM115 - `close` closes it
                    self._path,
                    "a" if self._append else "w",
                    encoding="utf-8",
                    errors="backslashreplace",
                    newline="",
                )
        return self._file

    def close(self) -> None:
        """Close the file; an error that was already raised is not raised again."""
        if self._file is None:
            return
        if self.has_failed:
            with contextlib.suppress(OSError):
                self._file.close()
        else:
            with self._named():
                self._file.close()

    @contextlib.contextmanager
    def _named(self) -> Iterator[None]:
        try:
            yield
        except OSError as error:
            self.has_failed = True
            raise NotWritten(f"cannot write {self._name}: {why_not_written(error)}") from error


def check_place(path: str | os.PathLike[str] | None) -> None:
    """Check before any work that a file can be written; None and `-` are always accepted.

    Raises:
        UsageError: the file cannot be written.
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
    try:  # the directory may be read-only in other ways, or the name too long
        os.close(os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o666))
        os.unlink(path)
    except OSError as error:
        raise UsageError(f"cannot write {path}: {error.strerror}") from error


def check_files(arguments: argparse.Namespace, read: Sequence[str] = READ_FILES) -> None:
    """Check before any work that the files of a verb can be written.

    Args:
        read: attributes of the options that name files to read.

    Raises:
        UsageError: a file cannot be written, or two options name the same file.
    """
    if wrong := shared_file(arguments, read, (*WRITTEN_FILES, "save_output")):
        raise UsageError(wrong)
    for name in WRITTEN_FILES:
        check_place(vars(arguments).get(name))
    if vars(arguments).get("per_call") and stdout_is_taken(arguments):
        raise UsageError("--per-call is about tables: name a file in place of -")


def rows_of(arguments: argparse.Namespace) -> list[Row] | None:
    """Return the rows of the file in `--rows`; None without this option.

    Raises:
        UsageError: the file does not exist, or `--json` requests measured rows too.
        RowsError: the file cannot be read.
    """
    from replay.rows.row_files import read_jsonl

    if arguments.rows is None:
        return None
    if arguments.json is not None:
        raise UsageError("--json is for rows that are measured: leave it out, or --rows")
    try:
        rows, is_cut_off = read_jsonl(Path(arguments.rows))
    except FileNotFoundError:
        raise UsageError(
            f"{arguments.rows}: no such file; write one with `replay plan --json`"
        ) from None
    if is_cut_off:
        sentence = "ends within a row: its replay was interrupted"
        print(f"replay: {printable(arguments.rows)} {sentence}", file=sys.stderr)
    return rows


def shared_file(arguments: argparse.Namespace, read: Sequence[str], written: Sequence[str]) -> str:
    """Return a sentence about two options that name the same file to write; empty if none do.

    Args:
        read: attributes of the options that name files to read.
        written: attributes of the options that name files to write.
    """
    found: dict[str, str] = {}
    for name in (*read, *written):
        given = vars(arguments).get(name)
        if given is None:
            continue
        option = f"--{name.replace('_', '-')}"
        other = found.setdefault("-" if given == "-" else os.path.realpath(given), option)
        if other != option and name in written:
            where = "stdout" if given == "-" else given
            return f"{other} and {option} both name {where}: give each a file of its own"
    return ""
