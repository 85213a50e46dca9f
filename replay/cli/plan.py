"""`replay plan`: chooses the kernel for each layer of a recorded model."""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from functools import partial
from typing import TYPE_CHECKING

from capture.command_line.parser import OneSentenceParser
from capture.command_line.verbosity import narrated
from replay.api.plan_model import BUDGET, choose_plan
from replay.api.recorded_models import one_capture
from replay.api.session import say_on_stderr
from replay.cli import shared_options as options
from replay.cli.files import check_files, noted, output_file, rows_of
from replay.cli.replayed import Replayed, console_of, exit_code, replayed
from replay.cli.requests import recorded_calls, request_of
from replay.cli.showing import print_next_step

if TYPE_CHECKING:
    from capture.storage.capture_record import CaptureRecord
    from replay.plan.plan import Budget, Plan
    from replay.rows.row import Row

EXAMPLES = """\
  replay plan --dir captured_inputs --out plan.json
  replay plan --dir captured_inputs --out plan.json --budget rmse=0.01 --json rows.jsonl
  replay plan --dir captured_inputs --out other.json --budget cosine=0.9999 --rows rows.jsonl
"""


def parser() -> OneSentenceParser:
    """Build the parser of `replay plan`."""
    command = options.verb(
        "plan",
        "Write the fastest kernel for each layer of a recorded model, within an error\n"
        "budget. `replay verify --plan` runs the model with it, `use_plan` in a program.",
        EXAMPLES,
    )
    what = command.add_argument_group("the plan")
    options.add_recording(what, chosen_calls=False)
    options.add_rows(what)
    what.add_argument(
        "--out",
        type=output_file,
        required=True,
        metavar="FILE",
        help="write the plan (- for stdout)",
    )
    what.add_argument(
        "--budget",
        default=BUDGET,
        metavar="METRIC=X",
        help=f"largest error at any layer: cosine, relative_l1 or rmse (default {BUDGET})",
    )
    how = command.add_argument_group("how to measure, and where (without --rows)")
    options.add_kernels(how)
    options.add_timing(how, baseline=False)
    options.add_place(how, several=True)
    options.add_tolerances(how)
    options.add_json(how)
    options.add_check(how)
    options.add_common(how)
    return command


def run(argv: Sequence[str]) -> int:
    """Measure, choose and write; return 1 if a call cannot be read or `--check` fails.

    Raises:
        Error: an argument cannot be used.
    """
    arguments = parser().parse_args(argv)
    return narrated(arguments.verbose)(partial(_run, arguments))()


def _run(arguments: argparse.Namespace) -> int:
    check_files(arguments, read=("dir", "rows"))
    rows = rows_of(arguments)
    calls = recorded_calls(arguments)
    request = request_of(arguments, calls, for_model=True)
    from replay.plan.plan import parse_budget

    budget = parse_budget(arguments.budget)
    dataset = calls.opened(quiet=arguments.quiet)
    capture = one_capture(dataset, arguments.dir)
    if rows is None:
        replay = replayed(request, arguments, one_type="a plan")
    else:
        replay = Replayed(rows, dataset, {}, {})
    plan = None
    with noted(replay.unwritten):
        plan = _chosen(capture, replay.rows, budget, arguments)
    code = exit_code(replay, [], check=arguments.check)
    print_next_step(arguments, parser(), replay, plan)
    return code


def _chosen(
    capture: CaptureRecord, rows: Sequence[Row], budget: Budget, arguments: argparse.Namespace
) -> Plan:
    """Choose a plan, print it and write it."""
    from replay.report.plan_tables import print_plan

    choice = choose_plan(capture, rows, budget)
    if choice.shortfall:
        say_on_stderr(choice.shortfall)
    print_plan(choice.plan, choice.uniform, console_of(arguments))
    choice.plan.save(arguments.out)
    return choice.plan
