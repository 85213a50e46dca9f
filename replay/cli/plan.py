"""`replay plan`: chooses the kernel for each layer of a recorded model."""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from typing import TYPE_CHECKING

from capture.command_line.parser import positive_number
from replay.api.messages import say
from replay.api.plan_model import BUDGET, choose_plan
from replay.api.recorded_models import one_capture
from replay.cli.files import check_files, noted, output_file, rows_of
from replay.cli.replayed import Replayed, console_of, exit_code, print_next_step, replayed
from replay.cli.requests import recorded_calls, request_of
from replay.cli.shared_options import DEVICES, TIMING, WAITING, VerbParser

if TYPE_CHECKING:
    from capture.storage.capture_record import CaptureRecord
    from replay.plan.plan import Budget, Plan
    from replay.rows.row import Row

EXAMPLES = """\
  replay plan --dir captured_inputs --out plan.json
  replay plan --dir captured_inputs --out plan.json --budget rmse=0.01 --json rows.jsonl
  replay plan --dir captured_inputs --out other.json --budget cosine=0.9999 --rows rows.jsonl
  replay plan --dir captured_inputs --out other.json --total-error 0.01 --rows rows.jsonl
"""


def parser() -> VerbParser:
    """Build the parser of `replay plan`."""
    command = VerbParser(
        "plan",
        "Choose the fastest kernel for each layer of a recorded model, within an error\n"
        "budget. `replay verify --plan` runs the model with the plan, `use_plan` in a program.",
        EXAMPLES,
    )
    what = command.group("the plan", "--dir", "--rows")
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
    what.add_argument(
        "--total-error",
        type=positive_number,
        metavar="X",
        help="largest sum of squared relative errors over the calls of a run; kernels may then "
        "differ between denoising steps (default: no limit)",
    )
    how = command.group(
        "how to measure, and where (without --rows)",
        *("--kernels", *TIMING, DEVICES, "--env", WAITING),
        *("--tolerances", "--json", "--resume", "--check"),
    )
    command.add_common(how)
    return command


def run(arguments: argparse.Namespace) -> int:
    """Measure kernels and write a plan; return 1 if a call cannot be read or `--check` fails.

    Raises:
        Error: an argument cannot be used.
    """
    check_files(arguments)
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
    code = exit_code(replay, check=arguments.check)
    print_next_step(arguments, replay, plan)
    return code


def _chosen(
    capture: CaptureRecord, rows: Sequence[Row], budget: Budget, arguments: argparse.Namespace
) -> Plan:
    """Make a plan from the rows, print the plan and write it."""
    from replay.report.plan_tables import print_plan

    choice = choose_plan(capture, rows, budget, arguments.total_error)
    if choice.shortfall:
        say(choice.shortfall)
    print_plan(choice.plan, choice.uniform, console_of(arguments))
    choice.plan.save(arguments.out)
    return choice.plan
