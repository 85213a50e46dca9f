"""`replay reproduce`: the smallest dataset, and a script, that show a kernel's failure."""

from __future__ import annotations

import argparse
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

from capture.command_line.parser import OneSentenceParser, positive_number
from capture.command_line.verbosity import add_verbosity, narrated
from capture.text.printable import printable
from replay.api.choices import thresholds
from replay.cli.files import UsageError

if TYPE_CHECKING:
    from replay.reproduce.reproducer import Reproduced, Reproduction

SECONDS = 120.0


def parser() -> OneSentenceParser:
    """Build the parser of `replay reproduce`."""
    command = OneSentenceParser(
        prog="replay reproduce",
        description="Write the smallest part of a recorded call that a kernel fails on, and one "
        "Python file that shows it with torch and the kernel's library alone. Exits with 1 if the "
        "kernel does not fail.",
    )
    command.add_argument("--dir", required=True, metavar="DIR", help="as for replay --dir")
    command.add_argument(
        "--call", required=True, metavar="NAME", help="name of the call, e.g. llama-000007"
    )
    command.add_argument("--kernel", required=True, metavar="K", help="a name, or file.py:function")
    command.add_argument(
        "--out", required=True, type=Path, metavar="DIR", help="a new directory to write"
    )
    command.add_argument("--device", help="cuda, cpu … (default: cuda if available)")
    command.add_argument(
        "--env", metavar="NAME=PYTHON", help="interpreter of another environment for the kernel"
    )
    command.add_argument(
        "--max-seconds",
        type=positive_number,
        default=SECONDS,
        metavar="S",
        help=f"time limit for finding the smallest part (default {SECONDS:g})",
    )
    command.add_argument(
        "--timeout",
        type=positive_number,
        default=300.0,
        metavar="S",
        help="kill a kernel that hangs for this long (default 300)",
    )
    command.add_argument("--tolerances", metavar="TOML", help="judge accuracy by other constants")
    add_verbosity(command)
    command.add_argument("--debug", action="store_true", help="show tracebacks")
    return command


def run(argv: Sequence[str]) -> int:
    """Write what the arguments ask for; 1 if the kernel does not fail.

    Raises:
        Error: an argument cannot be used, or nothing could be written.
    """
    arguments = parser().parse_args(argv)
    return narrated(arguments.verbose)(partial(_run, arguments))()


def _run(arguments: argparse.Namespace) -> int:
    from replay.reproduce.reproducer import reproduce

    request = _request(arguments)
    with _progress(request.seconds, quiet=arguments.quiet) as report:
        found = reproduce(request, arguments.out, report)
    for line in _said(request, found, arguments.out):
        print(printable(line))
    if found.smallest is not None and found.no_script:
        print(f"replay: no reproduce.py: {printable(found.no_script)}", file=sys.stderr)
    return 0 if found.smallest is not None else 1


def _request(arguments: argparse.Namespace) -> Reproduction:
    from capture.storage.arrivals import shown_arrivals
    from replay.api.chosen_device import device_of
    from replay.bench.settings import Settings
    from replay.kernels.registry import find
    from replay.reproduce.reproducer import Reproduction
    from replay.workers.environment_options import interpreters
    from replay.workloads.recorded import from_directory

    kernel = find(arguments.kernel)
    device = device_of(arguments.device)
    with shown_arrivals(quiet=arguments.quiet) as report:
        found, note = from_directory(arguments.dir, arguments.call, report=report)
    if note:
        print(f"replay: {printable(note)}", file=sys.stderr)
    if len(found) != 1:
        names = ", ".join(workload.name for workload in found[:3]) + " …" * (len(found) > 3)
        raise UsageError(f"--call {arguments.call} is {len(found)} calls ({names}): name one")
    pythons = interpreters([arguments.env] if arguments.env else [])
    settings = Settings(
        device=device,
        cache="warm",
        rounds=1,
        max_seconds=0.01,
        tolerances=thresholds(arguments.tolerances and Path(arguments.tolerances)),
    )
    python = next(iter(pythons.values()), sys.executable)
    return Reproduction(
        found[0], kernel.name, settings, arguments.max_seconds, arguments.timeout, python
    )


def _said(request: Reproduction, found: Reproduced, out: Path) -> list[str]:
    name, call = request.kernel, request.workload.name
    if found.smallest is None:
        reason = f" ({found.whole.reason})" if found.whole.reason else ""
        return [
            f"{name} does not fail on {call}, it is {found.whole.status}{reason}: nothing written"
        ]
    smallest = found.smallest
    part = smallest.call.origin.derived or f"all of {call}"
    limit = "" if smallest.is_complete else "; --max-seconds ended the search"
    return [
        f"{name}: {smallest.outcome.status}: {smallest.outcome.reason}",
        f"{out}: {part} ({smallest.call.shape}), after {smallest.trials} trials{limit}",
    ]


@contextmanager
def _progress(seconds: float, *, quiet: bool) -> Iterator[Callable[[str], None]]:
    from rich.console import Console
    from rich.text import Text

    console, began, trials = Console(stderr=True), time.monotonic(), 0
    with Console(stderr=True, quiet=quiet or not console.is_terminal).status("") as status:

        def report(line: str) -> None:
            nonlocal trials
            trials += 1
            taken = time.monotonic() - began
            shown = f"{line} · step {trials} · {taken:.0f} s of at most {seconds:g} s"
            status.update(Text(printable(shown)))

        yield report
