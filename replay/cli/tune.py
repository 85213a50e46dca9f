"""`replay tune`: finds the fastest plan for a model within a quality budget."""

from __future__ import annotations

import argparse
from typing import TYPE_CHECKING

from attention_replay.errors import Error
from capture.command_line.run_options import add_run_options, load_run
from capture.large_imports import import_large
from capture.text.printable import printable
from replay.api.messages import shown_steps
from replay.api.tune_model import tuned
from replay.cli.files import INCONCLUSIVE, check_files, output_file
from replay.cli.report import check_report, write
from replay.cli.shared_options import VerbParser

if TYPE_CHECKING:
    from replay.tune.tuning import Tuning

EXAMPLES = """\
  replay tune --model flux --quality psnr=35
  replay tune --model ./checkpoint --quality ssim=0.97 --kernels all --max-time 30m
  replay tune --model my_model.py:build --quality relative_l1=0.01 --out my_plan.json
"""


def parser() -> VerbParser:
    """Build the parser of `replay tune`."""
    command = VerbParser(
        "tune",
        "Find the fastest plan for a model whose output stays within a quality budget:\n"
        "record, compare kernels, run plans in the model, and measure the best one. The same\n"
        "command goes on after an interruption.",
        EXAMPLES,
    )
    add_run_options(command)
    how = command.add_argument_group("how to tune")
    how.add_argument(
        "--quality",
        default="psnr=35",
        metavar="METRIC=X",
        help="least psnr (dB), ssim, cosine or top1, or largest relative_l1, kl or perplexity of "
        "the output (default psnr=35)",
    )
    command.add("--kernels", "--rounds", to=how)
    command.add(
        "--max-time", to=how, help="end comparing and searching after this time, such as 10m"
    )
    shown = command.add_argument_group("what to write")
    shown.add_argument(
        "--out",
        type=output_file,
        default="plan.json",
        metavar="FILE",
        help="write the plan; FILE.tuning keeps recording and rows (default plan.json)",
    )
    command.add("--report", to=shown)
    command.add_common(shown)
    return command


def run(arguments: argparse.Namespace) -> int:
    """Tune a model, and print the result.

    Returns:
        0 if a plan was written, 1 if none is faster, or 3 if noise hides which is faster.

    Raises:
        Error: an argument cannot be used, or the model cannot be built or judged.
    """
    if not arguments.model:
        raise Error("--model is required: cogvideo, flux, llama, a directory or file.py:function")
    if arguments.out == "-":
        raise Error("--out needs a file, next to which the recording is kept: name one")
    check_files(arguments)
    if arguments.report:
        check_report()
    from replay.tune.quality import parse_quality

    parse_quality(arguments.quality)  # before a model is loaded, which may take minutes
    import_large("torch")
    with shown_steps(quiet=arguments.quiet) as step:
        step(f"loading {arguments.model} …")
        runnable = load_run(arguments)
    try:
        result = tuned(
            runnable,
            arguments.quality,
            kernels=arguments.kernels,
            out=arguments.out,
            max_time=arguments.max_time,
            rounds=arguments.rounds,
            quiet=arguments.quiet,
        )
    except KeyboardInterrupt as interrupt:
        raise KeyboardInterrupt("the same command goes on from here") from interrupt
    _print(result)
    if arguments.report:
        from replay.api.verify_model import as_json

        write(result.rows, arguments.report, [as_json(check) for check in result.checks])
    if result.plan is not None:
        return 0
    return INCONCLUSIVE if result.is_undecided else 1


def _print(result: Tuning) -> None:
    from rich.console import Console

    from replay.report.model_tables import print_checks

    if result.checks:
        print_checks(result.checks, Console(highlight=False))
    print(printable(result.sentence))
