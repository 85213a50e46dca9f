"""Options that several verbs of `replay` share, each declared once. Imports no torch."""

from __future__ import annotations

import argparse
import re
import shutil

from capture.command_line.parser import (
    Listed,
    OneSentenceParser,
    natural,
    not_empty,
    positive,
    positive_number,
    share,
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
"""Names of `replay.workloads.distributions`, which imports torch."""
MASKS = ("none", "causal", "padding", "window", "random")
"""`causal`, and names of `replay.workloads.random_masks`."""
SUITES = ("flux", "sage", "aiter", "cogvideo", "llama")
SHAPE = ("b", "hq", "hk", "sq", "sk", "d", "dv")
"""Options named by one or two letters, with a single dash."""

REQUESTED_METRICS = ("stats", "resources")
"""Figures that `--metric` shows only if named, because they take time or space."""

_UNITS = {"h": 3600.0, "m": 60.0, "s": 1.0}


class WideHelp(argparse.RawDescriptionHelpFormatter):
    """Help of at most 100 columns, with one line per option if it fits."""

    def __init__(self, prog: str) -> None:
        width = min(shutil.get_terminal_size((100, 24)).columns, 100)
        super().__init__(prog, max_help_position=27, width=width)


def verb(
    name: str, description: str, examples: str = "", usage: str | None = None
) -> OneSentenceParser:
    """Return the parser of a verb, without options; an empty name denotes the default verb."""
    return OneSentenceParser(
        prog=f"replay {name}".strip(),
        usage=usage,
        description=description,
        epilog=f"examples:\n{examples}" if examples else None,
        formatter_class=WideHelp,
        add_help=False,
    )


def add_common(group: argparse._ActionsContainer, *, verbosity: bool = True) -> None:
    """Add the options of every verb: help, tracebacks and, for long verbs, verbosity."""
    group.add_argument("-h", "--help", action="help", help="show this help and exit")
    if verbosity:
        add_verbosity(group)
    group.add_argument("--debug", action="store_true", help="show tracebacks")


def add_recording(group: argparse._ActionsContainer, *, chosen_calls: bool = True) -> None:
    """Add the options for the recording and its calls."""
    add_directory(group)
    if chosen_calls:
        add_calls(group)
        group.add_argument(
            "--join-ranks",
            action="store_true",
            help="replay calls that ranks of a distributed model share, each as a whole",
        )


def add_directory(group: argparse._ActionsContainer, *, required: bool = True) -> None:
    """Add the option for the recording's directory."""
    group.add_argument(
        "--dir",
        required=required,
        metavar="DIR",
        help="what `capture` wrote: a directory, an archive or an address (hf://, s3://)",
    )


def add_calls(group: argparse._ActionsContainer) -> None:
    """Add the option for the names of calls."""
    group.add_argument(
        "--call", action=Listed, metavar="A,'GLOB*'", help="only the calls of these names"
    )


def add_shape(group: argparse._ActionsContainer) -> None:
    """Add the options for the sizes of one call."""
    group.add_argument("-b", type=positive, default=1, metavar="B", help="batch (default 1)")
    group.add_argument(
        "-hq", type=positive, default=16, metavar="N", help="query heads (default 16)"
    )
    group.add_argument("-hk", type=positive, metavar="N", help="key/value heads (default: -hq)")
    group.add_argument(
        "-sq", type=positive, default=1024, metavar="N", help="query length (default 1024)"
    )
    group.add_argument("-sk", type=positive, metavar="N", help="key length (default: -sq)")
    group.add_argument(
        "-d", type=positive, default=64, metavar="N", help="head dimension (default 64)"
    )
    group.add_argument("-dv", type=positive, metavar="N", help="value head dimension (default: -d)")


def add_values(group: argparse._ActionsContainer, command: OneSentenceParser) -> None:
    """Add the options for the values of random calls."""
    group.add_argument("--causal", action="store_true", help="top-left causal mask")
    group.add_argument(
        "--mask",
        choices=MASKS,
        default="none",
        metavar="MASK",
        help="causal, or a boolean attn_mask: padding, window or random (default: none)",
    )
    group.add_argument(
        "--scale", type=positive_number, metavar="X", help="scale of the scores (default: 1/√D)"
    )
    group.add_argument(
        "--distribution",
        choices=DISTRIBUTIONS,
        default="normal",
        metavar="NAME",
        help=f"{', '.join(DISTRIBUTIONS)} (default normal)",
    )
    command.add_dtype(group, default="bfloat16")
    group.add_argument(
        "--seed", type=natural, default=0, metavar="N", help="seed of the values (default 0)"
    )


def add_kernels(group: argparse._ActionsContainer) -> None:
    """Add the option for the kernels to run."""
    group.add_argument(
        "--kernels",
        action=Listed,
        metavar="A,B,'GLOB*'",
        help="kernels to run; FILE.py:FUNCTION for your own, all for all (default: a few)",
    )


def add_timing(group: argparse._ActionsContainer, *, baseline: bool = True) -> None:
    """Add the options for timing kernels."""
    group.add_argument(
        "--cache", choices=["cold", "warm"], help="L2 cache (default: cold on a GPU)"
    )
    group.add_argument(
        "--rounds",
        type=positive,
        default=ROUNDS,
        metavar="N",
        help=f"samples per kernel and call (default {ROUNDS})",
    )
    group.add_argument(
        "--calls-before",
        type=natural,
        metavar="N",
        help="untimed calls before each sample (default 0; plan and verify on a GPU: "
        f"{CALLS_BEFORE_IN_MODELS})",
    )
    group.add_argument(
        "--max-seconds",
        type=positive_number,
        metavar="S",
        help=f"time limit per kernel and call (default {SECONDS:g}, on CPUs {CPU_SECONDS:g})",
    )
    if baseline:
        group.add_argument(
            "--baseline-kernel",
            metavar="K",
            help="kernel that speed-ups are relative to (default: what the model called)",
        )


def add_limits(group: argparse._ActionsContainer) -> None:
    """Add the options that end a long replay early."""
    group.add_argument(
        "--max-time",
        type=duration,
        metavar="10m",
        help="end after this time, with the most representative calls first",
    )
    group.add_argument(
        "--max-noise",
        type=share,
        metavar="SHARE",
        help="end the rounds once every median is known within this share, e.g. 0.01",
    )


def add_place(
    command: argparse._ActionsContainer, *, several: bool = False, in_process: bool = True
) -> None:
    """Add the options for the device, environments and processes of kernels."""
    devices: argparse._ActionsContainer = command
    if several:
        devices = command.add_mutually_exclusive_group()
    add_device(devices)
    if several:
        devices.add_argument(
            "--gpus", action=Listed, metavar="all|0,1", help="spread calls over GPUs of this host"
        )
        devices.add_argument(
            "--ray",
            nargs="?",
            const="local",
            metavar="HOST:PORT",
            help="spread calls over a Ray cluster (auto: this machine's; without: one here)",
        )
    add_environments(command)
    add_workers(command, in_process=in_process)


def add_device(group: argparse._ActionsContainer) -> None:
    """Add the option for the device."""
    group.add_argument(
        "--device", metavar="NAME", help="cpu, cuda or cuda:1 (default: a GPU if there is one)"
    )


def add_environments(group: argparse._ActionsContainer) -> None:
    """Add the option for other Python environments."""
    group.add_argument(
        "--env",
        action="append",
        default=[],
        metavar="NAME=PYTHON",
        help="another environment to run kernels in, or a .toml file of them (repeatable)",
    )


def add_workers(group: argparse._ActionsContainer, *, in_process: bool = True) -> None:
    """Add the options for the time-out of worker processes, and for running without workers."""
    waiting = group.add_mutually_exclusive_group() if in_process else group
    waiting.add_argument(
        "--timeout",
        type=positive_number,
        default=300.0,
        metavar="S",
        help="end a kernel that hangs for this long (default 300)",
    )
    if in_process:
        waiting.add_argument(
            "--in-process",
            action="store_true",
            help="run without workers; a crash then ends the run",
        )


def add_metric(group: argparse._ActionsContainer) -> None:
    """Add the option for the figures that tables show."""
    group.add_argument(
        "--metric",
        action=Listed,
        default="time,throughput,accuracy",
        metavar="A,B",
        help=f"columns: {', '.join((*METRICS, *REQUESTED_METRICS))}",
    )


def add_errors_against(group: argparse._ActionsContainer) -> None:
    """Add the option for the output to compare with."""
    group.add_argument(
        "--errors-against",
        default="reference",
        metavar="WHAT",
        help="reference (default), captured for the recorded output, or a kernel",
    )


def add_tolerances(group: argparse._ActionsContainer) -> None:
    """Add the option for the constants of judging accuracy."""
    group.add_argument(
        "--tolerances", metavar="TOML", help="judge accuracy by other constants (docs/method.md)"
    )


def add_rows(group: argparse._ActionsContainer) -> None:
    """Add the option for rows that were measured earlier."""
    group.add_argument(
        "--rows",
        metavar="FILE",
        help="rows that `replay plan --json` or `verify --json` wrote (default: measure them)",
    )


def add_json(
    group: argparse._ActionsContainer, *, resume: bool = True, what: str = "a JSON row per line"
) -> None:
    """Add the option for the file of rows, or of other content named by `what`."""
    group.add_argument(
        "--json", type=output_file, metavar="FILE", help=f"write {what} (- for stdout)"
    )
    if resume:
        group.add_argument("--resume", action="store_true", help="continue the --json file")


def add_markdown(group: argparse._ActionsContainer) -> None:
    """Add the option for a Markdown file of tables, for a pull request."""
    group.add_argument(
        "--markdown",
        type=output_file,
        metavar="FILE",
        help="write it for a pull request (- for stdout)",
    )


def add_kernel(group: argparse._ActionsContainer, *, required: bool = False) -> None:
    """Add the option for the name of one kernel."""
    group.add_argument(
        "--kernel", required=required, metavar="K", help="this kernel: a name, or FILE.py:FUNCTION"
    )


def add_report(group: argparse._ActionsContainer) -> None:
    """Add the option for the HTML report."""
    group.add_argument(
        "--report", type=output_file, metavar="FILE", help="write an HTML page (- for stdout)"
    )


def add_saved_output(group: argparse._ActionsContainer) -> None:
    """Add the option for the directory of outputs."""
    group.add_argument("--save-output", metavar="DIR", help="save every kernel's outputs")


def add_check(group: argparse._ActionsContainer) -> None:
    """Add the option that makes failures set the exit code to 1."""
    group.add_argument(
        "--check", action="store_true", help="exit with 1 if a kernel fails or is inaccurate"
    )


def duration(given: str) -> float:
    """Parse `10m`, `90s`, `1h30m` or a number of seconds, for `add_argument(type=…)`."""
    not_empty(given)
    parts = re.fullmatch(r"(?=.)(?:([0-9]{1,6})h)?(?:([0-9]{1,6})m)?(?:([0-9]{1,9})s?)?", given)
    if parts is None:
        raise argparse.ArgumentTypeError(f"must be a time like 10m, 90s or 1h30m, not {given!r}")
    seconds = sum(
        int(part) * unit for part, unit in zip(parts.groups("0"), _UNITS.values(), strict=True)
    )
    if not seconds:
        raise argparse.ArgumentTypeError(f"must be longer than nothing, not {given!r}")
    return seconds
