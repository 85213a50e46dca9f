"""`--watch`: replay again whenever the file of a kernel changes. Imports no torch."""

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
from replay.cli.files import stdout_is_taken
from replay.kernels.own_files import own_files
from replay.report.rerun import changes

if TYPE_CHECKING:
    from replay.rows.row import Row
    from replay.workers.process import First

LOOK_SECONDS = 0.2
"""How often the files are looked at; after a change, until two looks find the same."""

ALONE = (
    *("e2e", "plan", "in_process", "gpus", "ray", "max_time"),
    *("list_kernels", "selftest", "resume", "save_baseline"),
)
"""Options of `replay` that `--watch` has no meaning for."""

Signature = dict[Path, tuple[int, int]]
"""When each file that is there was written, in nanoseconds, and its size."""


def misuse(arguments: argparse.Namespace) -> str:
    """Say in one sentence why `--watch` has nothing to watch; empty if it has."""
    if not arguments.watch:
        return ""
    for name in ALONE:
        if getattr(arguments, name):
            return f"--watch replays again and again: leave out --{name.replace('_', '-')}"
    if stdout_is_taken(arguments):
        return "--watch shows tables: name a file in place of -"
    if not _kernel_files(arguments.kernels):
        return "--watch waits for a file to change: give --kernels FILE.py:FUNCTION"
    return ""


def _kernel_files(kernels: str | None) -> list[Path]:
    names = (name.strip().rpartition(":")[0] for name in (kernels or "").split(","))
    return [Path(name) for name in names if name.endswith(".py")]


class Files:
    """The files of some kernels, and whether they have changed.

    Args:
        kernels: the files that define them.
    """

    def __init__(self, kernels: Sequence[Path]) -> None:
        self._kernels = [path.resolve() for path in kernels]
        self._seen: Signature = {}
        self._seen = self._look()

    def wait(self, sleep: Callable[[float], None] = time.sleep) -> list[str]:
        """Wait until some have changed, and are not being written any more; their names."""
        while True:
            now = self._look()
            if now != self._seen:
                sleep(LOOK_SECONDS)
                if self._look() == now and now.keys() >= set(self._kernels):
                    paths = {*now, *self._seen}
                    changed = [each for each in paths if now.get(each) != self._seen.get(each)]
                    self._seen = now
                    return sorted(path.name for path in changed)
            else:
                sleep(LOOK_SECONDS)

    def _look(self) -> Signature:
        """A file that cannot be parsed now may still import what it did."""
        paths = {*self._seen, *self._kernels}
        for kernel in self._kernels:
            paths.update(path for _, path in own_files(kernel, kernel.parent))
        found: Signature = {}
        for path in paths:
            with contextlib.suppress(OSError):
                status = path.stat()
                found[path] = (status.st_mtime_ns, status.st_size)
        return found


def watch(
    arguments: argparse.Namespace,
    replay: Callable[[First], list[Row]],
) -> NoReturn:
    """Replay now and after every change, until Ctrl-C.

    Args:
        replay: in these processes; prints and returns the rows.

    Raises:
        Error: of the first replay. Later ones print theirs, for another change may mend it.
    """
    from replay.workers.process import first_processes

    # A file that is written twice in a second would be taken for its compiled self.
    os.environ["PYTHONDONTWRITEBYTECODE"] = "1"
    files, is_first = Files(_kernel_files(arguments.kernels)), True
    rows: list[Row] = []
    while True:
        # The next processes import PyTorch while nothing happens.
        with first_processes(arguments.timeout) as first:
            first.prepare(arguments.device)
            first.warm_up(arguments.kernels)
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
