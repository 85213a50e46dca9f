"""Options of a recording: an engine to record in, and what to store. Does not import torch."""

from __future__ import annotations

import argparse
from typing import Any

from attention_replay.errors import Error
from capture.call.head_ranges import parse_ranges
from capture.call.splits import SPLITS
from capture.command_line.parser import (
    Listed,
    OneSentenceParser,
    natural,
    not_empty,
    positive,
    size,
)
from capture.recording.sampling import PER_LAYER, PHASES, SAMPLES, make_sampler


def add_engine_options(command: OneSentenceParser) -> None:
    """Add the options that run the model inside an engine that serves."""
    engine = command.add_argument_group("inside an engine; --set then means its arguments")
    engine.add_argument("--engine", choices=["vllm"], help="engine that runs --model DIR")
    engine.add_argument(
        "--prompts", metavar="FILE", help="prompts to answer, as text or JSON lines"
    )
    engine.add_argument("--trace", metavar="FILE", help="times and lengths of requests to answer")


def check_engine_options(arguments: argparse.Namespace) -> None:
    """Check that the options of an engine go with the others.

    Raises:
        Error: an option is missing, or has no effect.
    """
    given = [name for name in ("prompts", "trace") if getattr(arguments, name) is not None]
    if arguments.engine is None:
        if given:
            raise Error(f"--{given[0]} needs --engine vllm")
        return
    if not given:
        raise Error("--engine vllm needs --prompts FILE or --trace FILE")
    if len(given) > 1:
        raise Error("--prompts and --trace exclude each other: leave out one of them")
    for name in ("size", "weights", "checkpoint", "prompt", "steps", "device"):
        if getattr(arguments, name) is not None:
            raise Error(f"--{name} has no effect with --engine: leave it out")


def add_storage_options(command: OneSentenceParser) -> None:
    """Add the options that say what to store, and where."""
    store = command.add_argument_group("what to store")
    store.add_argument(
        "--max",
        type=lambda text: text if text == PER_LAYER else positive(text),
        default=10,
        metavar="N",
        help="calls to store (default: 10); per-layer: one of each layer and phase",
    )
    store.add_argument(
        "--sample",
        type=_sample,
        default="spread",
        metavar="HOW",
        help="calls to store: spread over layers, steps, phases and shapes (default); hard: most "
        "difficult for 8-bit kernels; first; or every:N",
    )
    store.add_argument(
        "--phase",
        choices=PHASES,
        metavar="PHASE",
        help="phase to store: denoise, prefill, extend, decode, mixed or encode",
    )
    store.add_argument(
        "--heads",
        action=Listed,
        type=_heads,
        metavar="LIST",
        help="query heads to store, such as 0,8-11, with their key heads (default: all)",
    )
    store.add_argument(
        "--modules",
        action=Listed,
        metavar="LIST",
        help="store only calls of these modules (paths or globs)",
    )
    store.add_argument(
        "--max-bytes",
        type=size,
        metavar="SIZE",
        help="limit of the total size, such as 500M or 20G",
    )
    store.add_argument("--no-output", action="store_true", help="do not store attention outputs")
    store.add_argument(
        "--backward",
        action="store_true",
        help="also store gradients, if the run calls backward()",
    )
    store.add_argument(
        "--out",
        default="captured_inputs",
        metavar="DIR",
        help="directory to write to (default: captured_inputs)",
    )
    store.add_argument(
        "--overwrite", action="store_true", help="replace an earlier recording of this model"
    )
    store.add_argument(
        "--rank",
        type=natural,
        metavar="N",
        help="rank of this process; ranks may share one DIR (default: torchrun's)",
    )
    store.add_argument(
        "--split",
        choices=SPLITS,
        help="how ranks split a call, for `replay --join-ranks` (default: by heads if distributed "
        "tensors are split by heads)",
    )
    store.add_argument(
        "--buffer-bytes",
        type=size,
        metavar="SIZE",
        help="memory for calls not written yet (default: a quarter of free host memory)",
    )
    store.add_argument(
        "--durable", action="store_true", help="write each call to disk before the model continues"
    )


def storage_arguments(arguments: argparse.Namespace) -> dict[str, Any]:
    """Return the arguments of `capture.record` that these options mean."""
    names = ["out", "max", "sample", "phase", "heads", "modules", "rank", "split"]
    names += ["max_bytes", "buffer_bytes", "durable", "backward", "overwrite"]
    given = vars(arguments)
    return {name: given[name] for name in names} | {"output": not arguments.no_output}


def _sample(text: str) -> str:
    not_empty(text)
    try:
        make_sampler(text, 1, None)
    except ValueError as error:
        raise argparse.ArgumentTypeError(f"must be {SAMPLES}, not {text!r}") from error
    return text


def _heads(text: str) -> tuple[int, ...]:
    not_empty(text)
    try:
        return parse_ranges(text)
    except ValueError as error:
        raise argparse.ArgumentTypeError(str(error)) from error
