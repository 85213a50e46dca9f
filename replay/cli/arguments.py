"""The arguments of the `replay` command. Imports no torch."""

from __future__ import annotations

import argparse

from capture.arguments import OneSentenceParser, natural, positive
from replay.cli.end_to_end_arguments import add_arguments
from replay.rows.fields import METRICS
from replay.timing.defaults import (
    CALLS_BEFORE_IN_MODELS,
    CPU_SECONDS,
    MINIMUM_ROUNDS,
    ROUNDS,
    SECONDS,
)

SUITES = ("flux", "sage", "aiter", "cogvideo", "llama")

EXAMPLES = """examples:
  replay --dir captured_inputs                          every kernel × every recorded call
  replay --dir captured_inputs --metric all             with accuracy, bandwidth and memory
  replay --dir captured_inputs --kernels 'torch-*' --json rows.jsonl
  replay --random -b 2 -hq 24 -sq 4250 -d 64            any shape, no capture needed
  replay --random -hq 32 -hk 8 -sq 1 -sk 8192 -d 128    one decoded token, grouped heads
  replay --suite llama                                  a published list of shapes
  replay --dir captured_inputs --kernels 'torch-*,my_file.py:my_attention'
  replay --dir captured_inputs --kernels 'triton-*decode' --keep 0.05 --also-random
  replay --dir captured_inputs --env fa4=/opt/fa4/bin/python
  replay --dir captured_inputs --e2e                    the kernels back in the model
  replay --dir captured_inputs --plan plan.json --budget cosine=0.998
  replay --list-kernels                                 what there is, and what can run here
"""


def parser() -> argparse.ArgumentParser:
    """Everything that `replay` takes; what makes no sense together is found later."""
    made = OneSentenceParser(
        prog="replay",
        description="Run attention kernels on recorded calls (or random ones): how fast, how "
        "accurate, which to use.",
        epilog=EXAMPLES,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    what = made.add_argument_group("what to replay")
    source = what.add_mutually_exclusive_group()
    source.add_argument("--dir", metavar="DIR", help="a directory that `capture` wrote")
    source.add_argument("--random", action="store_true", help="one shape, given by the flags below")
    source.add_argument("--suite", choices=SUITES, help="a list of shapes, with random values")
    source.add_argument("--list-kernels", action="store_true", help="list kernels and exit")
    what.add_argument("--kernels", metavar="A,B,'GLOB*'", help="default: a few; all: every one")
    what.add_argument(
        "--keep",
        type=_share,
        metavar="SHARE",
        help="share of the keys that sparse kernels keep (default 0.02)",
    )
    what.add_argument(
        "--page-size",
        type=positive,
        metavar="N",
        help="keys in a page of paged kernels (default 16)",
    )
    what.add_argument(
        "--also-random",
        action="store_true",
        help="after each call of --dir, random values of its shapes, strides and mask",
    )
    what.add_argument("--variants", choices=["all"], help="also every variant of those kernels")
    what.add_argument("--max-seq", type=positive, metavar="N", help="leave longer shapes out")
    what.add_argument("--seed", type=int, default=0, help="of random values (default 0)")
    what.add_argument("--device", help="cuda, cpu … (default: cuda where there is one)")

    shape = made.add_argument_group("shape of --random")
    shape.add_argument("-b", type=int, default=1, metavar="B", help="batch (default 1)")
    shape.add_argument("-hq", type=int, default=16, metavar="HQ", help="query heads (default 16)")
    shape.add_argument("-hk", type=int, metavar="HK", help="key/value heads (default: HQ)")
    shape.add_argument("-sq", type=int, default=1024, metavar="SQ", help="query length")
    shape.add_argument("-sk", type=int, metavar="SK", help="key length (default: SQ)")
    shape.add_argument("-d", type=int, default=64, metavar="D", help="head dimension (default 64)")
    shape.add_argument("-dv", type=int, metavar="DV", help="value head dimension (default: D)")
    shape.add_argument("--causal", action="store_true", help="top-left causal mask")
    made.add_dtype(shape, default="bfloat16")

    how = made.add_argument_group("how to measure")
    how.add_argument("--cache", choices=["cold", "warm"], help="L2 cache (default: cold on a GPU)")
    how.add_argument(
        "--rounds",
        type=positive,
        default=ROUNDS,
        help=f"samples per kernel (default {ROUNDS}; below {MINIMUM_ROUNDS} there is no interval)",
    )
    how.add_argument(
        "--calls-before",
        type=natural,
        metavar="N",
        help="untimed calls of the same kernel before each sample, as in a model (default 0; on a "
        f"GPU with --e2e or --plan {CALLS_BEFORE_IN_MODELS})",
    )
    how.add_argument(
        "--max-seconds",
        type=float,
        metavar="S",
        help=f"per kernel and call; then fewer rounds, but {MINIMUM_ROUNDS} at least "
        f"(default {SECONDS:g}, on CPUs {CPU_SECONDS:g})",
    )
    how.add_argument(
        "--max-noise",
        type=_share,
        metavar="SHARE",
        help="fewer rounds once every kernel's median time is known within this share of it, e.g. "
        "0.01 (default: all rounds)",
    )
    how.add_argument(
        "--baseline-kernel", metavar="K", help="speed-ups are against it (default: the model's own)"
    )

    where = made.add_argument_group("where kernels run")
    where.add_argument(
        "--env",
        action="append",
        default=[],
        metavar="NAME=PYTHON",
        help="another environment's interpreter; its kernels join the table (repeatable)",
    )
    where.add_argument(
        "--env-file", metavar="TOML", help="environments from a file, [environments]"
    )
    where.add_argument(
        "--timeout",
        type=_seconds,
        default=300.0,
        metavar="S",
        help="end a hanging kernel (default 300)",
    )
    where.add_argument(
        "--in-process", action="store_true", help="no worker processes: a crash ends the run"
    )

    report = made.add_argument_group("what to report")
    report.add_argument(
        "--metric", default="time,throughput,accuracy", metavar="M", help=", ".join(METRICS)
    )
    report.add_argument(
        "--errors-against",
        default="reference",
        metavar="WHAT",
        help="reference (high precision, default), captured (the recorded output), or a kernel",
    )
    report.add_argument(
        "--compare-stats", action="store_true", help="min, max, mean, std of outputs"
    )
    report.add_argument(
        "--resources", action="store_true", help="registers, spills, shared memory (Triton)"
    )
    report.add_argument("--per-call", action="store_true", help="a table per call, not per shape")
    report.add_argument("--json", metavar="FILE", help="a JSON object per row (- for stdout)")
    report.add_argument("--resume", action="store_true", help="continue the --json file")
    report.add_argument("--csv", metavar="FILE", help="a line per row (- for stdout)")
    report.add_argument("--save-output", metavar="DIR", help="keep every kernel's outputs")
    report.add_argument("--check", action="store_true", help="exit 1 when a kernel fails accuracy")
    report.add_argument("--debug", action="store_true", help="show tracebacks")
    made.add_version()
    add_arguments(made)
    return made


def _share(text: str) -> float:
    value = float(text)
    if not 0 < value <= 1:
        raise argparse.ArgumentTypeError(f"must be more than 0 and at most 1, not {text}")
    return value


def _seconds(text: str) -> float:
    value = float(text)
    if not value > 0:
        raise argparse.ArgumentTypeError(f"must be more than 0, not {text}")
    return value
