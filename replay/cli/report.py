"""`replay report`: writes an HTML page, or charts, from the rows of an earlier replay.

PyTorch is imported only after the arguments and their files have been checked.
"""

from __future__ import annotations

import argparse
import shlex
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from capture.text.printable import printable
from replay.api.write_report import read_checks, report
from replay.cli.files import (
    READ_FILES,
    UsageError,
    check_files,
    noted,
    opened,
    output_file,
    rows_of_file,
    say_unwritten,
)
from replay.cli.shared_options import VerbParser
from replay.report.html import chart_library
from replay.rows.row_files import write_csv

if TYPE_CHECKING:
    from replay.rows.row import Row

EXAMPLES = """\
  replay report rows.jsonl -o report.html
  replay report rows.jsonl -o report.html --checks checks.jsonl --budget cosine=0.998
  replay report rows.jsonl --plot charts
"""


def parser() -> VerbParser:
    """Build the parser of `replay report`."""
    command = VerbParser(
        "report",
        "Write one HTML page, which needs no network, or charts for papers, from the rows\n"
        "of a replay.",
        EXAMPLES,
    )
    command.add_argument("rows", metavar="ROWS", help="file that `replay --json` wrote")
    command.add_argument(
        "-o", "--out", type=output_file, metavar="FILE", help="write the page (- for stdout)"
    )
    command.add_argument("--plot", metavar="DIR", help="write charts, as SVG, PNG and Vega-Lite")
    command.add_argument(
        "--csv", type=output_file, metavar="FILE", help="write the rows as CSV (- for stdout)"
    )
    command.add_argument(
        "--checks", metavar="FILE", help="show the checks that `replay verify --checks` wrote"
    )
    command.add_argument(
        "--outputs", metavar="DIR", help="show the outputs that `replay verify --save-output` wrote"
    )
    command.add_argument(
        "--budget", metavar="METRIC=X", help="draw this limit of errors, e.g. cosine=0.998"
    )
    command.add_common()
    return command


def run(arguments: argparse.Namespace) -> int:
    """Write the files that the arguments request.

    Raises:
        Error: an argument or its file cannot be used.
    """
    _check(arguments)
    from replay.plan.plan import parse_budget

    budget = None if arguments.budget is None else parse_budget(arguments.budget)
    if arguments.out is not None:
        chart_library.require()
    if arguments.plot is not None:
        from replay.report.charts.chart_files import prepare

        prepare(Path(arguments.plot).absolute())
    rows = rows_of_file(arguments.rows)
    checks = () if arguments.checks is None else read_checks(arguments.checks)
    unwritten: list[str] = []
    if arguments.out is not None:
        with noted(unwritten):
            write(rows, arguments.out, checks, outputs=arguments.outputs, budget=budget)
    if arguments.plot is not None:
        with noted(unwritten):
            _draw(rows, Path(arguments.plot).absolute())
    with noted(unwritten), opened(arguments.csv) as file:
        if file is not None:
            write_csv(rows, file)
    return say_unwritten(unwritten)


def _check(arguments: argparse.Namespace) -> None:
    """Raise UsageError if a file cannot be written or two arguments contradict each other."""
    if {arguments.out, arguments.plot, arguments.csv} == {None}:
        raise UsageError("nothing to write: give -o FILE for a report, --plot DIR for charts")
    check_files(arguments, read=(*READ_FILES, "checks"))
    for name in ("checks", "outputs", "budget"):
        if arguments.out is None and getattr(arguments, name) is not None:
            raise UsageError(f"--{name} is shown in a report: give -o FILE too")
    if arguments.outputs is not None and arguments.checks is None:
        raise UsageError("--outputs belongs to the checks of a model: give --checks FILE too")
    if arguments.outputs is not None and not Path(arguments.outputs).is_dir():
        raise UsageError(f"there is no directory {arguments.outputs}: name that of --save-output")


def write(
    rows: Sequence[Row], out: str, checks: Sequence[Mapping[str, Any]] = (), **others: Any
) -> None:
    """Write a report and print its path.

    Raises:
        Error: there is nothing to report, or the file cannot be written.
    """
    command = shlex.join(["replay", *sys.argv[1:]])
    report(rows, out, checks=checks, command=command, **others)
    if Path(out).is_file():
        print(f"report: {out} ({Path(out).stat().st_size / 1e6:.1f} MB)", file=sys.stderr)


def _draw(rows: Sequence[Row], directory: Path) -> None:
    """Write charts and print their names.

    Raises:
        Error: a file cannot be written.
    """
    names = [path.name for path in report(rows, charts=directory) if path.suffix == ".svg"]
    found = ", ".join(names) or "none: no correct kernel was timed on two lengths, or on a model"
    print(f"charts in {printable(str(directory))}: {found}", file=sys.stderr)
