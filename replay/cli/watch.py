"""`replay watch`: repeats the replay whenever a kernel's file changes."""

from __future__ import annotations

import argparse
import contextlib
import os
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, NoReturn

from attention_replay.errors import Error
from capture.text.printable import printable
from replay.api.call_choices import RandomCalls
from replay.api.choices import ReplayRequest
from replay.api.messages import say
from replay.api.session import prepared
from replay.cli.files import UsageError, check_files, stdout_is_taken
from replay.cli.replayed import print_next_step, replayed
from replay.cli.requests import chosen, recorded_calls, request_of
from replay.cli.shared_options import RECORDING, SHAPE, TIMING, VALUES, VerbParser
from replay.kernels.own_files import own_files
from replay.kernels.registered_functions import sources
from replay.report.rerun import changes

if TYPE_CHECKING:
    from replay.rows.row import Row
    from replay.workers.process import First

LOOK_SECONDS = 0.2
"""Seconds between inspections of the files; a change is complete when two inspections agree."""

WRONG = ("inaccurate", "crash")
"""Statuses of a row after which `replay doctor` is suggested."""

Signature = dict[Path, tuple[int, int]]
"""Modification time in nanoseconds, and size in bytes, of each existing file."""

EXAMPLES = """\
  replay watch --dir captured_inputs --call llama-000003 --kernels mine.py:attention
  replay watch random -hq 8 -sq 1024 -d 64 --kernels mine.py:attention
"""


def parser() -> VerbParser:
    """Build the parser of `replay watch`."""
    return _parser("watch", *RECORDING)


def parser_with_shape() -> VerbParser:
    """Build the parser of `replay watch random`."""
    return _parser("watch random", *SHAPE, "--causal", *VALUES)


def _parser(name: str, *calls: str) -> VerbParser:
    command = VerbParser(
        name,
        "Replay again whenever the file of a kernel (FILE.py:FUNCTION) or a file that it\n"
        "imports changes, and print what changed since the run before. `watch random` uses\n"
        "one call of any shape.",
        EXAMPLES,
    )
    command.add(*calls, "--kernels", *TIMING, "--baseline-kernel", "--device", "--env", "--timeout")
    command.add("--details", "--metric", "--errors-against", "--tolerances", "--json")
    command.add_common()
    return command


def run(arguments: argparse.Namespace) -> int:
    """Replay now and after every change, until Ctrl-C.

    Raises:
        Error: an argument cannot be used, or the first replay fails.
    """
    check_files(arguments)
    if stdout_is_taken(arguments):
        raise UsageError("`replay watch` shows tables: name a file in place of -")
    if not _kernel_files(arguments.kernels):
        raise UsageError("no file to watch: give --kernels FILE.py:FUNCTION")
    is_random = "dir" not in arguments
    calls = chosen(RandomCalls, arguments) if is_random else recorded_calls(arguments)
    request = request_of(arguments, calls)

    def replay(first: First) -> list[Row]:
        found = replayed(request, arguments, early=first)
        if not is_random and any(row.status in WRONG for row in found.rows):
            print_next_step(arguments, found)
        return found.rows

    watch(request, replay)


def _kernel_files(kernels: str | None) -> list[Path]:
    names = (name.strip().rpartition(":")[0] for name in (kernels or "").split(","))
    return [Path(name) for name in names if name.endswith(".py")]


class Files:
    """Files to watch for changes: those of some kernels, and the files that these import.

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
        """Inspect the files. If one cannot be parsed, assume that its imports are unchanged."""
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
        replay: function that replays in the given processes, prints the rows and returns them.

    Raises:
        Error: the first replay failed. Errors of later replays are printed, because the next change
            may fix them.
    """
    from replay.workers.process import first_processes

    # A .pyc file would be outdated, but still used, if its source changed twice in a second.
    os.environ["PYTHONDONTWRITEBYTECODE"] = "1"
    files, is_first = Files(_kernel_files(request.kernels)), True
    rows: list[Row] = []
    while True:
        # The next processes import PyTorch while this process waits.
        own = sources(request.kernels)
        with first_processes(request.place.timeout, sources=own) as first:
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
                say(str(error))
            is_first = False
