"""The arguments of `replay` that concern whole models. Imports no torch."""

from __future__ import annotations

import argparse

from capture.arguments import positive


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The options of `--e2e` and `--plan`."""
    model = parser.add_argument_group("the whole model (with --dir)")
    model.add_argument(
        "--e2e",
        action="store_true",
        help="put the kernels back into the recorded model: predicted and measured speed-up, and "
        "what becomes of its output",
    )
    model.add_argument(
        "--model-rounds",
        type=positive,
        metavar="N",
        help="timed runs of the model with each kernel (default: 6 to 10, as many as fit into 6 s)",
    )
    model.add_argument("--text", metavar="FILE", help="a language model's perplexity on a text")
    model.add_argument("--e2e-json", metavar="FILE", help="a JSON object per kernel and model")
    model.add_argument("--use-plan", metavar="FILE", help="with --e2e: run the model by a plan too")
    model.add_argument(
        "--plan", metavar="FILE", help="write which kernel to use at every layer, within --budget"
    )
    model.add_argument(
        "--budget", metavar="METRIC=X", help="cosine=0.998, relative_l1=0.05 or rmse=0.01"
    )


def misuse(arguments: argparse.Namespace) -> str:
    """What is wrong with the arguments together, in a sentence; empty when nothing is."""
    for option in ("model_rounds", "text", "e2e_json", "use_plan"):
        if getattr(arguments, option) is not None and not arguments.e2e:
            return f"--{option.replace('_', '-')} goes with --e2e"
    if (arguments.plan is None) != (arguments.budget is None):
        return "--plan FILE and --budget METRIC=X go together: as in --budget cosine=0.998"
    if not arguments.e2e and arguments.plan is None:
        return ""
    if not arguments.dir:
        return "--e2e and --plan need a recording: give --dir DIR"
    if arguments.also_random:
        return "--also-random is not for whole models: leave it out"
    if arguments.baseline_kernel is not None:
        return "whole models compare with their own attention: leave out --baseline-kernel"
    if arguments.e2e and arguments.in_process:
        return "--e2e runs the model in a process of its own: leave out --in-process"
    return ""
