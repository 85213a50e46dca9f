"""`replay report`: writes an HTML page, or charts, from the rows of an earlier replay.

PyTorch is imported only after the arguments and their files have been checked.
"""

from __future__ import annotations

import argparse
import shlex
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from capture.command_line.parser import OneSentenceParser
from capture.text.printable import printable
from replay.api.session import say_on_stderr
from replay.api.write_report import read_checks, report
from replay.cli import shared_options as options
from replay.cli.files import (
    UsageError,
    check_place,
    noted,
    output_file,
    say_unwritten,
    shared_file,
)
from replay.rows.row_files import RowsError, read_jsonl

if TYPE_CHECKING:
    from replay.plan.plan import Budget
    from replay.rows.row import Row


EXAMPLES = """\
  replay report rows.jsonl -o report.html
  replay report rows.jsonl -o report.html --checks checks.jsonl --budget cosine=0.998
  replay report rows.jsonl --plot charts
"""


def parser() -> OneSentenceParser:
    """Build the parser of `replay report`."""
    command = options.verb(
        "report",
        "Write one HTML page, which needs no network, or charts for papers, from the rows\n"
        "of a replay.",
        EXAMPLES,
    )
    command.add_argument("rows", type=Path, metavar="ROWS", help="what `replay --json` wrote")
    command.add_argument(
        "-o", "--out", type=output_file, metavar="FILE", help="the page (- for stdout)"
    )
    command.add_argument("--plot", metavar="DIR", help="the charts, as SVG, PNG and Vega-Lite")
    command.add_argument(
        "--checks", type=Path, metavar="FILE", help="what `replay verify --checks` wrote"
    )
    command.add_argument(
        "--outputs", type=Path, metavar="DIR", help="what `replay verify --save-output` wrote"
    )
    command.add_argument(
        "--budget", metavar="METRIC=X", help="draw this limit of errors, e.g. cosine=0.998"
    )
    options.add_common(command, verbosity=False)
    return command


def run(argv: Sequence[str]) -> int:
    """Write the page and the charts that the arguments request.

    Raises:
        Error: an argument or its file cannot be used.
    """
    arguments = parser().parse_args(argv)
    if wrong := _misuse(arguments):
        raise UsageError(wrong)
    from replay.plan.plan import parse_budget

    budget = None if arguments.budget is None else parse_budget(arguments.budget)
    out = None if arguments.out is None else Path(arguments.out)
    if out is not None:
        check_report(out)
    charts = None if arguments.plot is None else _made(arguments.plot)
    try:
        rows, is_cut_off = read_jsonl(arguments.rows)
    except FileNotFoundError as error:
        raise RowsError(
            f"there is no file {arguments.rows}: write one with "
            f"{shlex.join(['replay', '--json', str(arguments.rows)])}"
        ) from error
    checks = () if arguments.checks is None else read_checks(arguments.checks)
    unwritten: list[str] = []
    if out is not None:
        with noted(unwritten):
            write(rows, checks, out, arguments.outputs, budget)
    if charts is not None:
        with noted(unwritten):
            _draw(rows, charts)
    if is_cut_off:
        say_on_stderr(f"{arguments.rows} ends within a row: its replay was interrupted")
    return say_unwritten(unwritten)


def _misuse(arguments: argparse.Namespace) -> str:
    """Return a sentence about arguments that contradict each other; empty if there are none."""
    outputs = arguments.outputs
    out = None if arguments.out is None else Path(arguments.out)
    if out is None and arguments.plot is None:
        return "nothing to write: give -o FILE for a report, --plot DIR for charts"
    if wrong := shared_file(arguments, (), ("out", "plot")):
        return wrong
    read = [path.resolve() for path in (arguments.rows, arguments.checks) if path is not None]
    if out is not None and out.resolve() in read:
        return f"-o would overwrite {out}: name another file"
    for name in ("checks", "outputs", "budget"):
        if out is None and getattr(arguments, name) is not None:
            return f"--{name} is shown in a report: give -o FILE too"
    if outputs is not None and arguments.checks is None:
        return "--outputs are those of a check of the model: give --checks FILE too"
    if outputs is not None and not outputs.is_dir():
        return f"there is no directory {outputs}: name that of --save-output"
    return ""


def check_report(out: Path) -> None:
    """Check that a report can be written, before anything is measured.

    Raises:
        Error: the report cannot be written.
    """
    from replay.report.html import chart_library

    chart_library.require()
    check_place(out)


def write(
    rows: Sequence[Row],
    checks: Sequence[dict[str, Any]],
    out: Path,
    outputs: Path | None,
    budget: Budget | None,
) -> None:
    """Write a report and print its place.

    Raises:
        Error: there is nothing to report, or the file cannot be written.
    """
    report(rows, out, checks=checks, outputs=outputs, budget=budget)
    if out.is_file():
        print(f"report: {out} ({out.stat().st_size / 1e6:.1f} MB)", file=sys.stderr)


def _made(given: str) -> Path:
    """Create the directory of `--plot`, and return its absolute path.

    Raises:
        Error: the directory cannot be created, or charts cannot be drawn.
    """
    from replay.report.charts.chart_files import prepare

    directory = Path(given).absolute()
    prepare(directory)
    return directory


def _draw(rows: Sequence[Row], directory: Path) -> None:
    """Write charts and print their names.

    Raises:
        Error: a file cannot be written.
    """
    names = [path.name for path in report(rows, charts=directory) if path.suffix == ".svg"]
    found = ", ".join(names) or "none: no correct kernel was timed on two lengths, or on a model"
    print(f"charts in {printable(str(directory))}: {found}", file=sys.stderr)
