"""Files that arguments name. This module imports no torch."""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import stat
import sys
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, TextIO

from attention_replay.errors import Error
from capture.command_line.parser import not_empty
from capture.storage.names import is_of_dataset
from replay.api.messages import say
from replay.rows.replacement import why_not_written
from replay.rows.row_files import Writable, read_jsonl

WRITTEN_FILES = (
    *("json", "csv", "checks", "out", "report", "markdown", "junit", "plot", "save_output"),
)
"""Options that name a file or a directory to write; `-` means stdout."""

DIRECTORIES = ("plot", "save_output")

READ_FILES = (
    *("dir", "tolerances", "plan", "text", "prompts", "rows", "before", "after", "spread"),
    "doctor",
)
"""Arguments that name files to read."""

if TYPE_CHECKING:
    from replay.rows.row import Row

STDOUT = ("/dev/stdout", "/dev/fd/1", "/proc/self/fd/1")
"""Files that stand for stdout; while kernels run, they lead to stderr (`replay.cli.stdout`)."""


class UsageError(Error):
    """Reason why the arguments cannot be used; the message gives the remedy."""


class NotWritten(Error):
    """Reason why a file could not be written; the message names the file."""


def output_file(given: str) -> str:
    """Parse the name of a file to write; return `-` for any name of stdout."""
    return "-" if os.path.abspath(given) in STDOUT else not_empty(given)


def stdout_is_taken(arguments: argparse.Namespace) -> bool:
    """Return True if an option writes to stdout, so tables must go to stderr or be omitted."""
    return any(vars(arguments).get(name) == "-" for name in WRITTEN_FILES)


@contextlib.contextmanager
def noted(unwritten: list[str], errors: type[Error] = Error) -> Iterator[None]:
    """Collect the reasons why files cannot be written, without duplicates, and continue."""
    try:
        yield
    except errors as error:
        if str(error) not in unwritten:
            unwritten.append(str(error))


INCONCLUSIVE = 3
"""Exit code if no check failed but one could not be decided."""


def say_unwritten(unwritten: Sequence[str]) -> int:
    """Print the collected reasons to stderr, and return the exit code."""
    for sentence in unwritten:
        say(sentence)
    return 2 if unwritten else 0


def write_and_show(path: str | None, text: Callable[[], str], show: Callable[[], object]) -> None:
    """Write a string to a file, or to stdout for `-`; show the results even if writing fails.

    Raises:
        NotWritten: the file cannot be written.
    """
    try:
        with opened(path) as file:
            if file is not None:
                file.write(text())
    finally:
        show()


def write_and_print(path: str | None, data: Any, found: object) -> None:
    """Write data as JSON, and print results on stdout, or on stderr if the path is `-`.

    Raises:
        NotWritten: the file cannot be written.
    """
    stream = sys.stderr if path == "-" else sys.stdout
    write_and_show(
        path, lambda: json.dumps(data, indent=1) + "\n", lambda: print(found, file=stream)
    )


@contextlib.contextmanager
def opened(
    path: str | None, stdout: TextIO | None = None, *, append: bool = False
) -> Iterator[Writable | None]:
    """Yield a file to write; None if `path` is None. A path of `-` means stdout.

    The file is emptied at the first write, or at the end of a `with` block that wrote nothing. A
    block that raises before its first write leaves the file unchanged.

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
            with contextlib.suppress(NotWritten):  # the block's own error is raised instead
                output.close()
            raise
        if not output.has_failed:
            output.begin()
        output.close()


class _Output:
    """File that is opened at the first write.

    Its path is made absolute at once, because a kernel may change the current directory later.
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
        """Close the file; raise nothing if an earlier write has already failed."""
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
    """Check early that a file can be written; always accept None and `-`.

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
    is_new = not os.path.lexists(path)
    if not is_new and not stat.S_ISCHR(os.stat(path).st_mode):
        return
    try:  # other causes: a full or read-only file system, a name that is too long
        file = os.open(path, os.O_WRONLY | (os.O_CREAT | os.O_EXCL) * is_new, 0o666)
        try:
            os.write(file, b"\n" * is_new)
        finally:
            os.close(file)
            if is_new:
                os.unlink(path)
    except OSError as error:
        raise UsageError(f"cannot write {path}: {why_not_written(error)}") from error


def _check_directory(option: str, path: str) -> None:
    """Check early that files can be written into a directory, which may be missing.

    Raises:
        UsageError: the files cannot be written.
    """
    parents = (Path(path).absolute(), *Path(path).absolute().parents)
    place = next(parent for parent in parents if parent.exists())
    reason = "" if place.is_dir() else f"{place} is a file"
    if reason or not os.access(place, os.W_OK):
        reason = reason or f"{place} is write-protected"
        raise UsageError(f"cannot write {option} {path} ({reason}): name another directory")


def check_files(arguments: argparse.Namespace, read: Sequence[str] = READ_FILES) -> None:
    """Check early that a verb can write its files, and that each has its own path.

    Args:
        read: arguments that name files to read.

    Raises:
        UsageError: a file cannot be written.
    """
    given = vars(arguments)
    inputs: set[str] = set()
    for name in read:
        paths = given.get(name) or []
        inputs.update(map(os.path.realpath, paths if isinstance(paths, list) else [paths]))
    outputs: dict[str, str] = {}
    for name in WRITTEN_FILES:
        path = given.get(name)
        if path is None or name in read:
            continue
        option = f"--{name.replace('_', '-')}"
        place = "stdout" if path == "-" else os.path.realpath(path)
        if place in inputs:
            raise UsageError(f"{option} would overwrite {path}: name another file")
        other = outputs.setdefault(place, option)
        if other != option:
            where = "stdout" if path == "-" else path
            raise UsageError(f"{other} and {option} both name {where}: give each a file of its own")
        _check_directory(option, path) if name in DIRECTORIES else check_place(path)
    if given.get("per_call") and stdout_is_taken(arguments):
        raise UsageError("--per-call is about tables: name a file in place of -")


def rows_of(arguments: argparse.Namespace) -> list[Row] | None:
    """Return the rows of the file that `--rows` names; None without this option.

    Raises:
        UsageError: `--json` requests measured rows too.
        RowsError: the file cannot be read.
    """
    if arguments.rows is None:
        return None
    if arguments.json is not None:
        raise UsageError("--json is for rows that are measured: leave it out, or --rows")
    return rows_of_file(arguments.rows)


def rows_of_file(path: str) -> list[Row]:
    """Return the rows of a file; warn if its last row is incomplete.

    Raises:
        RowsError: the file cannot be read.
    """
    rows, is_cut_off = read_jsonl(Path(path))
    if is_cut_off:
        say(f"{path} ends within a row: its replay was interrupted")
    return rows
