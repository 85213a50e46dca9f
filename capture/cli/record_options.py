"""Options of `capture --model MODEL` that say what to store. Does not import torch."""

from __future__ import annotations

import argparse

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
        "difficult for 8-bit kernels; first; or every:N: first of every N calls",
    )
    store.add_argument("--phase", choices=PHASES, help="store only calls of this phase")
    store.add_argument(
        "--heads",
        action=Listed,
        type=_heads,
        metavar="LIST",
        help="query heads to store, such as 0,8-11, with their key/value heads (default: all)",
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
        help="rank of this process; all ranks may write to one DIR (default: as set by torchrun)",
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
        help="host memory for calls that are not written yet (default: a quarter of free memory)",
    )
    store.add_argument(
        "--durable", action="store_true", help="write each call to disk before the model continues"
    )


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
