"""`replay watch`: repeats the replay whenever a kernel's file changes. Imports torch late."""

from __future__ import annotations

import argparse
import contextlib
import os
import sys
import time
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, NoReturn

from attention_replay.errors import Error
from capture.command_line.parser import OneSentenceParser
from capture.command_line.verbosity import narrated
from capture.text.printable import printable
from replay.api.choices import ReplayRequest
from replay.api.session import prepared
from replay.cli import shared_options as options
from replay.cli.files import UsageError, check_files, stdout_is_taken
from replay.cli.replayed import replayed
from replay.cli.requests import random_call, recorded_calls, request_of
from replay.kernels.own_files import own_files
from replay.report.rerun import changes

if TYPE_CHECKING:
    from replay.rows.row import Row
    from replay.workers.process import First

LOOK_SECONDS = 0.2
"""Seconds between two inspections of the files; a change is complete when two inspections agree."""

Signature = dict[Path, tuple[int, int]]
"""Time of the last change, in nanoseconds, and size of each existing file."""

EXAMPLES = """\
  replay watch --dir captured_inputs --call llama-000007 --kernels mine.py:attention
  replay watch random -hq 8 -sq 1024 -d 64 --kernels mine.py:attention
"""


def parser(*, is_random: bool = False) -> OneSentenceParser:
    """Build the parser of `replay watch`, or of `replay watch random`."""
    command = options.verb(
        "watch random" if is_random else "watch",
        "Replay again whenever the file of a kernel (FILE.py:FUNCTION) changes, or one\n"
        "beside it that it imports, and say what changed since the run before. `watch\n"
        "random` has one call of any shape.",
        EXAMPLES,
    )
    if is_random:
        options.add_shape(command)
        options.add_values(command, command)
    else:
        options.add_recording(command)
    options.add_kernels(command)
    options.add_timing(command)
    options.add_place(command, in_process=False)
    options.add_metric(command)
    options.add_errors_against(command)
    options.add_tolerances(command)
    options.add_json(command, resume=False)
    options.add_common(command)
    return command


def run(argv: Sequence[str]) -> int:
    """Replay now and after every change, until Ctrl-C.

    Raises:
        Error: an argument cannot be used, or the first replay fails.
    """
    is_random = list(argv[:1]) == ["random"]
    arguments = parser(is_random=is_random).parse_args(argv[1:] if is_random else argv)
    return narrated(arguments.verbose)(partial(_run, arguments, is_random))()


def _run(arguments: argparse.Namespace, is_random: bool) -> int:
    check_files(arguments)
    if stdout_is_taken(arguments):
        raise UsageError("`replay watch` shows tables: name a file in place of -")
    if not _kernel_files(arguments.kernels):
        raise UsageError("no file to watch: give --kernels FILE.py:FUNCTION")
    calls = random_call(arguments) if is_random else recorded_calls(arguments)
    request = request_of(arguments, calls)
    watch(request, lambda first: replayed(request, arguments, early=first).rows)


def _kernel_files(kernels: str | None) -> list[Path]:
    names = (name.strip().rpartition(":")[0] for name in (kernels or "").split(","))
    return [Path(name) for name in names if name.endswith(".py")]


class Files:
    """Files of some kernels, watched for changes.

    Args:
        kernels: the files that define the kernels.
    """

    def __init__(self, kernels: Sequence[Path]) -> None:
        self._kernels = [path.resolve() for path in kernels]
        self._seen: Signature = {}
        self._seen = self._look()

    def wait(self, sleep: Callable[[float], None] = time.sleep) -> list[str]:
        """Wait until files have changed and are fully written; return their names."""
        while True:
            now = self._look()
            if now != self._seen:
                sleep(LOOK_SECONDS)
                if self._look() == now and now.keys() >= set(self._kernels):
                    paths = {*now, *self._seen}
                    changed = [path for path in paths if now.get(path) != self._seen.get(path)]
                    self._seen = now
                    return sorted(path.name for path in changed)
            else:
                sleep(LOOK_SECONDS)

    def _look(self) -> Signature:
        """Inspect the files; the imports of a file that cannot be parsed are assumed unchanged."""
        paths = {*self._seen, *self._kernels}
        for kernel in self._kernels:
            paths.update(path for _, path in own_files(kernel, kernel.parent))
        found: Signature = {}
        for path in paths:
            with contextlib.suppress(OSError):
                status = path.stat()
                found[path] = (status.st_mtime_ns, status.st_size)
        return found


def watch(request: ReplayRequest, replay: Callable[[First], list[Row]]) -> NoReturn:
    """Replay now and after every change, until Ctrl-C.

    Args:
        replay: function that replays in these processes, prints the rows and returns them.

    Raises:
        Error: the first replay failed. Errors of later replays are printed, because the next change
            may fix them.
    """
    from replay.workers.process import first_processes

    # If a file changes twice within a second, Python would use the outdated compiled file.
    os.environ["PYTHONDONTWRITEBYTECODE"] = "1"
    files, is_first = Files(_kernel_files(request.kernels)), True
    rows: list[Row] = []
    while True:
        # The next processes import PyTorch while this process waits.
        with first_processes(request.place.timeout) as first:
            prepared(first, request.place, request.kernels)
            if not is_first:
                print("\nwaiting for a change (Ctrl-C ends)", file=sys.stderr)
                changed = ", ".join(files.wait())
                print(f"{time.strftime('%H:%M:%S')} {printable(changed)} changed\n")
            try:
                before, rows = rows, replay(first)
                for line in changes(before, rows):
                    print(line)
            except Error as error:
                if is_first:
                    raise
                print(f"replay: {printable(str(error))}", file=sys.stderr)
            is_first = False
