"""`replay tune`: finds the fastest plan for a model within a quality budget."""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import TYPE_CHECKING

from attention_replay.errors import Error
from capture.command_line.run_options import add_run_options, load_run, model_is_required
from capture.text.printable import printable
from replay.api.chosen_kernels import check_kernels
from replay.api.messages import shown_steps
from replay.api.recorded_models import ModelRequest, text_of
from replay.api.tune_model import tune_runnable
from replay.cli.files import INCONCLUSIVE, check_files, output_file
from replay.cli.report import write
from replay.cli.shared_options import VerbParser
from replay.report.html import chart_library

if TYPE_CHECKING:
    from replay.tune.tuning import Tuning

EXAMPLES = """\
  replay tune --model flux --quality psnr=35
  replay tune --model ./checkpoint --prompts prompts.txt --quality ssim=0.97 --max-time 30m
  replay tune --model llama --text book.txt --quality kl=0.01 --kernels all
  replay tune --model cogvideo --sparse --quality psnr=30
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
    command.add("--prompts", "--text", "--kernels", to=how)
    how.add_argument(
        "--sparse",
        action="store_true",
        help="choose from block-sparse attention too, with a share of the blocks for each layer, "
        "head and range of steps",
    )
    command.add("--rounds", to=how)
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
        0 if a plan was written, 1 if none is faster, or 3 if noise or the time limit hides which
        is faster.

    Raises:
        Error: an argument cannot be used, or the model cannot be built or judged.
    """
    if not arguments.model:
        raise Error(model_is_required())
    if arguments.out == "-":
        raise Error("--out needs a file, next to which the recording is kept: name one")
    check_files(arguments)
    if arguments.report:
        chart_library.require()
    prompts, text = prompts_of(arguments), ModelRequest(text=arguments.text).words
    from replay.sparsity.kernel import SparseKernel
    from replay.tune.quality import parse_quality

    parse_quality(arguments.quality)  # before a model is loaded, which may take minutes
    check_kernels(arguments.kernels, [], guess=False)
    with shown_steps(quiet=arguments.quiet) as step:
        step(f"loading {arguments.model} …")
        runnable = load_run(arguments)
    try:
        result = tune_runnable(
            runnable,
            arguments.quality,
            prompts=prompts,
            text=text,
            kernels=arguments.kernels,
            sparse=SparseKernel() if arguments.sparse else None,
            out=arguments.out,
            max_time=arguments.max_time,
            rounds=arguments.rounds,
            quiet=arguments.quiet,
        )
    except KeyboardInterrupt as interrupt:
        is_begun = Path(f"{arguments.out}.tuning").exists()
        what = "goes on from here" if is_begun else "begins again, as nothing was recorded"
        raise KeyboardInterrupt(f"the same command {what}") from interrupt
    _print(result)
    if arguments.report:
        from replay.api.verify_model import as_json

        checks = [as_json(check) for check in result.checks]
        write(result.rows, arguments.report, checks, summary=result.sentence)
    if result.plan is not None:
        return 0
    return INCONCLUSIVE if result.is_undecided else 1


def prompts_of(arguments: argparse.Namespace) -> list[str] | None:
    """Return the prompts of the file that `--prompts` names; None without this option.

    Raises:
        Error: the file cannot be read, or has too few prompts, or another option excludes it.
    """
    names = ("prompt", "prompts", "text")
    given = [f"--{name}" for name in names if getattr(arguments, name) is not None]
    if len(given) > 1:
        raise Error(f"{' and '.join(given)} exclude each other: leave out one of them")
    if arguments.prompts is None:
        return None
    from replay.tune.judged_runs import check_prompts

    lines = text_of("--prompts", arguments.prompts, "at least two prompts, one a line").splitlines()
    prompts = [line.strip() for line in lines if line.strip()]
    check_prompts(prompts)
    return prompts


def _print(result: Tuning) -> None:
    from rich.console import Console

    from replay.report.model_tables import print_checks

    if result.checks:
        print_checks(result.checks, Console(highlight=False))
    print(printable(result.sentence))
