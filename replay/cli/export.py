"""`replay export`: writes a plan in the form that another library loads.

The module imports torch only after it has read the plan.
"""

from __future__ import annotations

import argparse
import sys

from capture.command_line.parser import positive
from replay.api.export_plan import export
from replay.cli.files import check_place, output_file
from replay.cli.shared_options import VerbParser
from replay.export.targets import TARGETS
from replay.plan.plan import Plan

EXAMPLES = """\
  replay export plan.json --to diffusers --out attention_plan.py
  replay export plan.json --to xdit --steps 50
  replay export plan.json --to vllm --out arguments.json
"""


def parser() -> VerbParser:
    """Build the parser of `replay export`."""
    command = VerbParser(
        "export",
        "Write a plan in the form that another library loads, and report the parts of the plan\n"
        "that it cannot express, with their costs.",
        EXAMPLES,
    )
    command.add_argument(
        "plan", metavar="PLAN", help="file that `replay tune` or `replay plan` wrote"
    )
    command.add_argument("--to", required=True, choices=TARGETS, help="library that runs the plan")
    command.add_argument(
        "--out",
        type=output_file,
        default="-",
        metavar="FILE",
        help="write the exported plan (default: - for stdout)",
    )
    command.add_argument(
        "--steps", type=positive, metavar="N", help="number of denoising steps, for xdit"
    )
    command.add_common()
    return command


def run(arguments: argparse.Namespace) -> int:
    """Export a plan and print the losses.

    Raises:
        Error: the plan cannot be exported, or the file cannot be written.
    """
    check_place(arguments.out)
    plan = Plan.load(arguments.plan)
    exported = export(plan, arguments.to, arguments.out, steps=arguments.steps)
    print(exported, file=sys.stderr if arguments.out == "-" else sys.stdout)
    return 0
