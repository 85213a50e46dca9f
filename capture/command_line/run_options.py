"""Options that say which model to run, and how. Does not import torch."""

from __future__ import annotations

import argparse
from typing import Any

from capture.command_line.parser import OneSentenceParser, natural, not_empty, positive
from capture.models_package import import_models


def add_run_options(command: OneSentenceParser) -> None:
    """Add the options that say what to run."""
    run = command.add_argument_group("what to run")
    run.add_argument(
        "--model",
        metavar="MODEL",
        help=f"{', '.join(import_models().NAMES)}; a checkpoint directory; or your own function, "
        "FILE.py:FUNCTION",
    )
    run.add_argument(
        "--size",
        choices=["tiny", "full"],
        help="tiny: small, no download (default without a GPU); full: the official size",
    )
    run.add_argument(
        "--weights",
        choices=["pretrained", "random"],
        help="random weights are fine for timing, but not for judging quantised kernels "
        "(default: pretrained)",
    )
    run.add_argument(
        "--checkpoint", metavar="ID_OR_DIR", help="checkpoint to load instead of the official one"
    )
    run.add_argument(
        "--prompt",
        type=str,
        help="text to run the model on (may be empty for images and video)",
    )
    run.add_argument(
        "--steps",
        type=positive,
        metavar="N",
        help="number of denoising steps, or of tokens to decode",
    )
    run.add_argument(
        "--seed",
        type=natural,
        default=0,
        metavar="N",
        help="seed of weights and noise (default: 0)",
    )
    run.add_argument(
        "--set",
        action="append",
        type=_argument,
        default=[],
        metavar="NAME=VALUE",
        help="another argument of the pipeline or of generate; repeatable",
    )
    command.add_dtype(run)
    run.add_argument("--device", help="device such as cuda or cpu (default: cuda if available)")


def model_is_required() -> str:
    """Return a sentence that asks for `--model` and names the built-in models."""
    names = ", ".join(import_models().NAMES)
    return f"--model is required: {names}, a directory or file.py:function"


def _argument(text: str) -> tuple[str, str]:
    not_empty(text)
    name, equals, value = text.partition("=")
    if not (equals and name.isidentifier()):
        raise argparse.ArgumentTypeError(f"must be NAME=VALUE, not {text!r}")
    return name, value


def load_run(arguments: argparse.Namespace) -> Any:
    """Load the model (`models.Runnable`) that the options say.

    Raises:
        Error: the model cannot be built.
    """
    return import_models().load(
        arguments.model,
        size=arguments.size,
        weights=arguments.weights,
        checkpoint=arguments.checkpoint,
        prompt=arguments.prompt,
        steps=arguments.steps,
        seed=arguments.seed,
        dtype=arguments.dtype,
        device=arguments.device,
        arguments=dict(arguments.set),
    )
