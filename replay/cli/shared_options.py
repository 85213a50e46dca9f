"""Options that several verbs of `replay` share. This module imports no torch."""

from __future__ import annotations

import argparse
import re
from typing import Any

from capture.command_line.parser import (
    Listed,
    OneSentenceParser,
    natural,
    not_empty,
    positive,
    positive_number,
    positives,
)
from capture.command_line.verbosity import add_verbosity
from replay.cli.files import output_file
from replay.rows.fields import METRICS
from replay.timing.defaults import CALLS_BEFORE_IN_MODELS, CPU_SECONDS, ROUNDS, SECONDS

DISTRIBUTIONS = (
    "normal",
    "uniform",
    "outlier-channels",
    "sink",
    "late-sink",
    "staircase",
    "underflow",
    "model-like",
)
"""Names of the distributions, copied from `replay.workloads.distributions`, which imports torch."""
MASKS = ("none", "causal", "padding", "window", "random")
"""Names of the masks: `causal`, and those of `replay.workloads.random_masks`."""

REQUESTED_METRICS = ("stats", "resources")
"""Figures shown only if `--metric` names them, because they take time or space."""
ALL_METRICS = (*METRICS, *REQUESTED_METRICS)
DEFAULT_METRICS = "time,throughput,accuracy,backward"

_UNITS = {"h": 3600.0, "m": 60.0, "s": 1.0}


def duration(given: str) -> float:
    """Parse a duration such as `10m`, `90s`, `1h30m` or a number of seconds."""
    not_empty(given)
    parts = re.fullmatch(r"(?=.)(?:([0-9]{1,6})h)?(?:([0-9]{1,6})m)?(?:([0-9]{1,9})s?)?", given)
    if parts is None:
        raise argparse.ArgumentTypeError(f"must be a time like 10m, 90s or 1h30m, not {given!r}")
    seconds = sum(
        int(part) * unit for part, unit in zip(parts.groups("0"), _UNITS.values(), strict=True)
    )
    if not seconds:
        raise argparse.ArgumentTypeError(f"must be longer than 0 s, not {given!r}")
    return seconds


def _text(metavar: str, meaning: str, **others: Any) -> dict[str, Any]:
    return {"metavar": metavar, "help": meaning, **others}


def _flag(meaning: str) -> dict[str, Any]:
    return {"action": "store_true", "help": meaning}


def _names(metavar: str, meaning: str, **others: Any) -> dict[str, Any]:
    return _text(metavar, meaning, action=Listed, **others)


def _sizes(dest: str, meaning: str, *default: int) -> dict[str, Any]:
    return _text("N,N", meaning, type=positives, dest=dest, default=default or None)


def _file(meaning: str) -> dict[str, Any]:
    return _text("FILE", f"{meaning} (- for stdout)", type=output_file)


OPTIONS: dict[str, dict[str, Any]] = {
    "--dir": _text(
        "DIR",
        "recording to read: a directory, an archive or an address (hf://, s3://)",
        required=True,
    ),
    "--call": _names("A,'GLOB*'", "calls to use, by name or glob (default: all)"),
    "--join-ranks": _flag("replay calls that ranks of a distributed model share, each as a whole"),
    "-b": _sizes("batch", "batch sizes (default 1)", 1),
    "-hq": _sizes("q_heads", "query heads (default 16)", 16),
    "-hk": _sizes("kv_heads", "key/value heads (default: -hq)"),
    "-sq": _sizes("q_len", "query lengths (default 1024)", 1024),
    "-sk": _sizes("kv_len", "key lengths (default: -sq)"),
    "-d": _sizes("head_dim", "head dimensions (default 64)", 64),
    "-dv": _sizes("v_head_dim", "head dimensions of the value (default: -d)"),
    "--causal": {
        "action": "store_const",
        "const": "causal",
        "dest": "mask",
        "help": "short for --mask causal",
    },
    "--mask": _text(
        "MASK",
        "causal (top-left), or a boolean attn_mask: padding, window or random (default: none)",
        choices=MASKS,
        default="none",
    ),
    "--distribution": _text(
        "NAME",
        f"{', '.join(DISTRIBUTIONS)} (default normal)",
        choices=DISTRIBUTIONS,
        default="normal",
    ),
    "--dtype": {"default": "bfloat16"},
    "--seed": _text("N", "seed of the values (default 0)", type=natural, default=0),
    "--kernels": _names(
        "A,B,'GLOB*'",
        "kernels to run; FILE.py:FUNCTION for your own, all for every kernel (default: a few)",
    ),
    "--kernel": _text("K", "kernel to use: a name, or FILE.py:FUNCTION"),
    "--backward": _flag("judge gradients and time backward too, as in a training step"),
    "--cache": {
        "choices": ["cold", "warm"],
        "help": "state of the L2 cache (default: cold on a GPU)",
    },
    "--rounds": _text(
        "N", f"samples per kernel and call (default {ROUNDS})", type=positive, default=ROUNDS
    ),
    "--calls-before": _text(
        "N",
        "untimed calls before each sample (default 0; plan and verify on a GPU: "
        f"{CALLS_BEFORE_IN_MODELS})",
        type=natural,
    ),
    "--max-seconds": _text(
        "S",
        f"time limit per kernel and call (default {SECONDS:g}, on CPUs {CPU_SECONDS:g})",
        type=positive_number,
    ),
    "--baseline-kernel": _text(
        "K",
        "kernel that speed-ups are relative to (default: what the model called)",
        dest="baseline",
    ),
    "--max-time": _text(
        "10m", "end after this time; the most representative calls run first", type=duration
    ),
    "--device": _text("NAME", "cpu, cuda or cuda:1 (default: a GPU if there is one)"),
    "--gpus": _names("all|0,1", "spread calls over GPUs of this host"),
    "--ray": _text(
        "HOST:PORT",
        "spread calls over a Ray cluster: its address, auto, or none to start one",
        nargs="?",
        const="local",
    ),
    "--env": _text(
        "NAME=PYTHON",
        "another environment to run kernels in, or a .toml file of them (repeatable)",
        action="append",
        default=[],
    ),
    "--timeout": _text(
        "S",
        "end a kernel that hangs for this long (default 300)",
        type=positive_number,
        default=300.0,
    ),
    "--in-process": _flag(
        "run without workers: a crash ends the run, and your kernels are not ranked"
    ),
    "--details": _flag("show tables of each kind of call: times, intervals, errors, notes"),
    "--metric": _names("A,B", f"columns of the tables: {', '.join(ALL_METRICS)}"),
    "--errors-against": _text(
        "WHAT",
        "output to compare with: reference (default), captured, or a kernel",
        default="reference",
    ),
    "--tolerances": _text("TOML", "constants for judging accuracy (docs/method.md)"),
    "--json": _file("write a JSON row per line"),
    "--resume": _flag("continue the --json file"),
    "--report": _file("write an HTML page"),
    "--markdown": _file("write the tables for a pull request"),
    "--rows": _text(
        "FILE", "rows that `replay plan --json` or `verify --json` wrote (default: measure them)"
    ),
    "--plan": _text("FILE", "also run the model with this plan"),
    "--prompts": _text(
        "FILE", "two or more prompts, one a line; half of them are kept for acceptance"
    ),
    "--text": _text("FILE", "text to judge a language model on: KL, top-1 agreement, perplexity"),
    "--save-output": _text("DIR", "save the outputs of all kernels that run"),
    "--check": _flag("exit with 1 if a kernel fails or is wrong, 3 if the machine is too busy"),
    "--debug": _flag("show tracebacks"),
}
"""Options by flag, each with its arguments for `add_argument`."""

SHAPE = ("-b", "-hq", "-hk", "-sq", "-sk", "-d", "-dv")
VALUES = ("--mask", "--distribution", "--dtype", "--seed")
RECORDING = ("--dir", "--call", "--join-ranks")
TIMING = ("--cache", "--rounds", "--calls-before", "--max-seconds")
WAITING = ("--timeout", "--in-process")
"""Mutually exclusive options: a timeout needs worker processes."""
DEVICES = ("--device", "--gpus", "--ray")
"""Mutually exclusive options that choose where the kernels run."""


class VerbParser(OneSentenceParser):
    """Parser of a verb, with methods to add shared options.

    Args:
        verb: name of the verb; empty for the default verb.
        examples: lines of examples below the help.
    """

    def __init__(self, verb: str, description: str, examples: str = "", **others: Any) -> None:
        super().__init__(
            prog=f"replay {verb}".strip(),
            description=description,
            epilog=f"examples:\n{examples}" if examples else None,
            add_help=False,
            **others,
        )
        self.set_defaults(verb=verb)

    def _hint(self, name: str) -> str:
        return ": other verbs have it" if name in OPTIONS else super()._hint(name)

    def add(
        self,
        *flags: str | tuple[str, ...],
        to: argparse._ActionsContainer | None = None,
        **changes: Any,
    ) -> None:
        """Add shared options; options in one tuple are mutually exclusive.

        Args:
            to: group to add the options to; None for the parser itself.
            changes: arguments of `add_argument` that replace those in `OPTIONS`.
        """
        place = self if to is None else to
        for flag in flags:
            if isinstance(flag, tuple):
                self.add(*flag, to=place.add_mutually_exclusive_group())
            elif flag == "--dtype":
                self.add_dtype(place, **OPTIONS[flag])
            else:
                place.add_argument(flag, **OPTIONS[flag] | changes)

    def group(self, title: str, *flags: str | tuple[str, ...]) -> argparse._ArgumentGroup:
        """Add a group of shared options, and return the group."""
        group = self.add_argument_group(title)
        self.add(*flags, to=group)
        return group

    def add_common(self, group: argparse._ActionsContainer | None = None) -> None:
        """Add the options of every verb: help, verbosity and tracebacks."""
        place = self if group is None else group
        place.add_argument("-h", "--help", action="help", help="show this help and exit")
        add_verbosity(place)
        self.add("--debug", to=place)
