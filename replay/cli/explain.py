"""`replay explain`: explains why a kernel that is fast on its own is slow in a model.

The module imports torch only after it has read the file of checks.
"""

from __future__ import annotations

import argparse
import difflib
from pathlib import Path

from rich.console import Console
from rich.text import Text

from capture.text.printable import printable
from replay.api.write_report import stored_checks
from replay.cli.files import UsageError
from replay.cli.shared_options import VerbParser
from replay.report.explanation import SPANS, explanation
from replay.report.foretold import quality_paragraph


def parser() -> VerbParser:
    """Build the parser of `replay explain`."""
    command = VerbParser(
        "explain",
        "Explain in a paragraph why a kernel that is fast alone is slow in a model: what its\n"
        "speed would gain, and where that gain is lost; after `verify --sketch`, also where\n"
        "the drift comes from.",
    )
    command.add_argument(
        "checks", type=Path, metavar="FILE", help="file that `replay verify --checks FILE` wrote"
    )
    command.add("--kernel")
    command.add_argument(
        "--phase",
        choices=SPANS,
        metavar="PHASE",
        help=f"{', '.join(SPANS)} (default: the phase that takes most of a run)",
    )
    command.add_common()
    return command


def run(arguments: argparse.Namespace) -> int:
    """Print a paragraph that explains each kernel's time.

    Raises:
        UsageError: the file does not contain the named kernel, or contains no kernel.
        RowsError: the file cannot be read.
    """
    checks = stored_checks(arguments.checks)

    from replay.end_to_end.model_process import BASELINE

    checks = [check for check in checks if check.kernel != BASELINE.name]
    if not checks:
        raise UsageError(f"{arguments.checks} has no kernel to explain: choose some with --kernels")
    if arguments.kernel is not None:
        names = list(dict.fromkeys(check.kernel for check in checks))
        checks = [check for check in checks if check.kernel == arguments.kernel]
        if not checks:
            near = difflib.get_close_matches(arguments.kernel, names, n=1, cutoff=0.4)
            hint = f"did you mean {near[0]}?" if near else f"choose from {', '.join(names)}"
            raise UsageError(f"{arguments.checks} has no kernel {arguments.kernel!r}: {hint}")
    console = Console(highlight=False)
    for number, check in enumerate(checks):
        if number:
            console.print()
        console.print(Text(printable(explanation(check, arguments.phase))))
        if check.foretold is not None:
            console.print()
            console.print(Text(printable(quality_paragraph(check.kernel, check.foretold))))
    return 0
