"""The arguments of `replay` that concern whole models. Imports no torch."""

from __future__ import annotations

import argparse

from capture.command_line.parser import positive
from replay.cli.files import output_file

OPTIONS = (
    *("e2e", "model_rounds", "text", "e2e_json", "use_plan", "any_device", "trust_code"),
    *("plan", "budget"),
)
"""Their attributes."""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the options of `--e2e` and `--plan`."""
    model = parser.add_argument_group("the whole model (with --dir)")
    model.add_argument(
        "--e2e",
        action="store_true",
        help="run the kernels in the recorded model: predicted and measured speed-up, and drift of "
        "its output",
    )
    model.add_argument(
        "--model-rounds",
        type=positive,
        metavar="N",
        help="timed runs of the model per kernel (default: 6 to 10, as many as fit into 6 s)",
    )
    model.add_argument(
        "--text", metavar="FILE", help="measure a language model's perplexity on this text"
    )
    model.add_argument(
        "--e2e-json",
        type=output_file,
        metavar="FILE",
        help="write a JSON object per kernel and model (- for stdout)",
    )
    model.add_argument(
        "--use-plan", metavar="FILE", help="with --e2e: also run the model with this plan"
    )
    model.add_argument(
        "--any-device",
        action="store_true",
        help="with --use-plan: also if it was made on another type of GPU",
    )
    model.add_argument(
        "--trust-code",
        action="store_true",
        help="with --e2e: run files of code that the recording or --use-plan names; what you name "
        "yourself always runs",
    )
    model.add_argument(
        "--plan",
        type=output_file,
        metavar="FILE",
        help="write the kernel to use at each layer, within --budget (- for stdout)",
    )
    model.add_argument(
        "--budget",
        metavar="METRIC=X",
        help="largest error at any layer: cosine=0.998, relative_l1=0.05 or rmse=0.01",
    )


def misuse(arguments: argparse.Namespace) -> str:
    """Say in one sentence why the arguments do not combine; empty if they do."""
    for option in ("model_rounds", "text", "e2e_json", "use_plan"):
        if getattr(arguments, option) is not None and not arguments.e2e:
            return f"--{option.replace('_', '-')} requires --e2e"
    if arguments.any_device and arguments.use_plan is None:
        return "--any-device is about a plan: give --use-plan FILE"
    if arguments.trust_code and not arguments.e2e:
        return "--trust-code requires --e2e"
    if (arguments.plan is None) != (arguments.budget is None):
        return "--plan and --budget require each other: give, e.g., --budget cosine=0.998"
    if not arguments.e2e and arguments.plan is None:
        return ""
    if not arguments.dir:
        return "--e2e and --plan require a recording: give --dir DIR"
    if arguments.call is not None:
        return "--e2e and --plan require all calls of a recording: leave out --call"
    if arguments.versus_random:
        return "--e2e and --plan do not combine with --versus-random: leave it out"
    if arguments.baseline_kernel is not None:
        return "the baseline of a whole model is its own attention: leave out --baseline-kernel"
    if arguments.e2e and arguments.in_process:
        return "--e2e runs the model in a separate process: leave out --in-process"
    return ""
