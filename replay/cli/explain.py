"""`replay explain`: why a kernel that is fast alone is slow in a model.

Imports torch only after reading the file.
"""

from __future__ import annotations

import difflib
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from rich.console import Console
from rich.text import Text

from capture.command_line.parser import OneSentenceParser
from capture.storage.json_data import parsed
from capture.storage.plain_files import given_text
from capture.text.printable import printable
from replay.cli.files import UsageError
from replay.report.explanation import PHASES, explanation
from replay.rows.row_files import RowsError, rebuilt

if TYPE_CHECKING:
    from replay.end_to_end.model_check import ModelResult


def parser() -> OneSentenceParser:
    """Build the parser of `replay explain`."""
    command = OneSentenceParser(
        prog="replay explain",
        description="Say in a paragraph why a kernel that is fast alone is slow in a model: what "
        "its speed would gain the model, and what takes that away.",
    )
    command.add_argument(
        "checks", type=Path, metavar="FILE", help="what `replay --e2e --e2e-json FILE` wrote"
    )
    command.add_argument("--kernel", metavar="NAME", help="this kernel alone (default: each)")
    command.add_argument(
        "--phase",
        choices=PHASES,
        metavar="PHASE",
        help=f"{', '.join(PHASES)} (default: the phase that takes most of a run)",
    )
    command.add_argument("--debug", action="store_true", help="show tracebacks")
    return command


def run(argv: Sequence[str]) -> int:
    """Print a paragraph for each kernel.

    Raises:
        UsageError: there is no such kernel, or the file has none.
        RowsError: the file cannot be read.
    """
    arguments = parser().parse_args(argv)
    checks = read_checks(arguments.checks)

    from replay.end_to_end.model_process import BASELINE

    checks = [each for each in checks if each.kernel != BASELINE.name]
    if not checks:
        raise UsageError(f"{arguments.checks} has no kernel to explain: choose some with --kernels")
    if arguments.kernel is not None:
        names = list(dict.fromkeys(each.kernel for each in checks))
        checks = [each for each in checks if each.kernel == arguments.kernel]
        if not checks:
            near = difflib.get_close_matches(arguments.kernel, names, n=1, cutoff=0.4)
            hint = f"did you mean {near[0]}?" if near else f"choose from {', '.join(names)}"
            raise UsageError(f"{arguments.checks} has no kernel {arguments.kernel!r}: {hint}")
    console = Console(highlight=False)
    for number, checked in enumerate(checks):
        if number:
            console.print()
        console.print(Text(printable(explanation(checked, arguments.phase))))
    return 0


def read_checks(path: Path) -> list[ModelResult]:
    """Read what `--e2e-json` wrote.

    Raises:
        RowsError: it cannot be read, or something else wrote it.
    """
    try:
        lines = given_text(path).splitlines()
    except OSError as error:
        raise RowsError(f"cannot read {path}: {error.strerror}") from error
    except UnicodeDecodeError as error:
        raise RowsError(f"{path} was not written by `replay --e2e-json`") from error
    try:
        return [_check(parsed(line)) for line in lines]
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise RowsError(
            f"{path} was not written by `replay --e2e-json` of this version: run --e2e again"
        ) from error


def _check(data: dict[str, object]) -> ModelResult:
    from replay.end_to_end.model_check import ModelResult

    data.pop("prediction_error")
    return rebuilt(ModelResult, data)
