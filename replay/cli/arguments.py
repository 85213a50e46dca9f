"""The arguments of the `replay` command. Imports no torch."""

from __future__ import annotations

import argparse

from capture.command_line.parser import OneSentenceParser, natural, positive, positive_number, share
from capture.command_line.repeated_options import Listed
from capture.command_line.verbosity import add_verbosity
from replay.cli.comparison_arguments import add_baselines
from replay.cli.end_to_end_arguments import add_arguments
from replay.cli.files import output_file
from replay.cli.time_limit import duration
from replay.rows.fields import METRICS
from replay.timing.defaults import (
    CALLS_BEFORE_IN_MODELS,
    CPU_SECONDS,
    MINIMUM_ROUNDS,
    ROUNDS,
    SECONDS,
)

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
"""Those of `replay.workloads.distributions`, which imports torch."""
MASKS = ("none", "causal", "padding", "window", "random")
"""`causal`, and those of `replay.workloads.random_masks`."""
SUITES = ("flux", "sage", "aiter", "cogvideo", "llama")
SHAPE = ("b", "hq", "hk", "sq", "sk", "d", "dv")
"""The options of one letter or two, which have one dash."""

EXAMPLES = """examples:
  replay --dir captured_inputs                          every kernel × every recorded call
  replay --dir captured_inputs --metric all             with accuracy, bandwidth and memory
  replay --dir captured_inputs --kernels 'torch-*' --json rows.jsonl
  replay --random -b 2 -hq 24 -sq 4250 -d 64            any shape, no capture needed
  replay --random -hq 32 -hk 8 -sq 1 -sk 8192 -d 128    one decoded token, grouped heads
  replay --suite llama                                  a published list of shapes
  replay --dir captured_inputs --kernels 'torch-*,my_file.py:my_attention'
  replay --dir captured_inputs --call llama-000007 --kernels torch-flash,triton-decode
  replay --dir captured_inputs --call llama-000007 --kernels my_file.py:my_attention --watch
  replay --dir captured_inputs --versus-random          how far do random inputs mislead?
  replay --random -sq 4096 --distribution sink --mask padding
  replay --dir captured_inputs --env fa4=/opt/fa4/bin/python
  replay --dir captured_inputs --gpus all               on all GPUs of this host
  replay --dir captured_inputs --ray 10.0.0.1:6379      on all GPUs of a Ray cluster
  replay --dir captured_inputs --e2e                    run the kernels in the model
  replay --dir captured_inputs --plan plan.json --budget cosine=0.998
  replay --dir captured_inputs --report out.html        charts and every row, in one file
  replay --list-kernels                                 all kernels, and which can run here
  replay --selftest                                     does this machine measure right?

sub-commands, each with a --help of its own:
  replay compare before.jsonl after.jsonl               what became faster, slower or wrong?
  replay doctor --dir captured_inputs --kernels sage2   why is it wrong, where, and what instead?
  replay devices h100.jsonl h200.jsonl                  which kernel on which GPU?
  replay explain e2e.jsonl                              why fast kernels gain the model little
  replay report rows.jsonl -o out.html                  an earlier replay as one HTML file
  replay report rows.jsonl --plot charts                charts for papers: SVG, PNG, Vega-Lite
  replay reproduce --dir captured_inputs --call llama-000007 --kernel sage1 --out bug
                                                        the smallest call on which it fails
"""


def parser() -> argparse.ArgumentParser:
    """Build the parser; invalid combinations of arguments are rejected later."""
    command = OneSentenceParser(
        prog="replay",
        description="Run attention kernels on recorded calls (or random ones): how fast,\n"
        "how accurate, which to use.",
        epilog=EXAMPLES,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    what = command.add_argument_group("what to replay")
    source = what.add_mutually_exclusive_group()
    source.add_argument(
        "--dir",
        metavar="DIR",
        help="a directory that `capture` wrote, a .zip or .tar.gz of one, or an address such as "
        "hf://datasets/ORG/NAME, s3://BUCKET/PATH or https://",
    )
    source.add_argument("--random", action="store_true", help="one shape, given by the flags below")
    source.add_argument("--suite", choices=SUITES, help="a list of shapes, with random values")
    source.add_argument("--list-kernels", action="store_true", help="list kernels and exit")
    source.add_argument(
        "--selftest", action="store_true", help="check that this machine measures right, and exit"
    )
    what.add_argument(
        "--call",
        action=Listed,
        metavar="A,B,'GLOB*'",
        help="of --dir, only the calls of these names",
    )
    what.add_argument(
        "--join-ranks",
        action="store_true",
        help="of --dir, replay the calls that ranks of a distributed model share, each as a whole",
    )
    what.add_argument(
        "--kernels",
        action=Listed,
        metavar="A,B,'GLOB*'",
        help="default: a few; all for every one",
    )
    what.add_argument(
        "--keep",
        type=share,
        metavar="FRACTION",
        help="fraction of the keys that sparse kernels attend to (default 0.02)",
    )
    what.add_argument(
        "--page-size",
        type=positive,
        metavar="N",
        help="keys per page for paged kernels (default 16)",
    )
    what.add_argument(
        "--versus-random",
        action="store_true",
        help="replay each call of --dir beside random and moment-matched values, with the same "
        "shapes, strides and mask, and show how far those mislead",
    )
    what.add_argument("--variants", choices=["all"], help="also run every variant of these kernels")
    what.add_argument("--max-seq", type=positive, metavar="N", help="skip longer shapes")
    what.add_argument("--seed", type=natural, default=0, help="seed of random values (default 0)")
    what.add_argument("--device", help="cuda, cpu … (default: cuda if available)")

    shape = command.add_argument_group("shape and values of --random")
    shape.add_argument("-b", type=positive, default=1, metavar="B", help="batch (default 1)")
    shape.add_argument(
        "-hq", type=positive, default=16, metavar="HQ", help="query heads (default 16)"
    )
    shape.add_argument("-hk", type=positive, metavar="HK", help="key/value heads (default: HQ)")
    shape.add_argument("-sq", type=positive, default=1024, metavar="SQ", help="query length")
    shape.add_argument("-sk", type=positive, metavar="SK", help="key length (default: SQ)")
    shape.add_argument(
        "-d", type=positive, default=64, metavar="D", help="head dimension (default 64)"
    )
    shape.add_argument("-dv", type=positive, metavar="DV", help="value head dimension (default: D)")
    shape.add_argument("--causal", action="store_true", help="top-left causal mask")
    shape.add_argument(
        "--mask",
        choices=MASKS,
        default="none",
        help="none (default), causal, or a boolean attn_mask: padding, window or random",
    )
    shape.add_argument(
        "--scale", type=positive_number, metavar="X", help="of the scores (default: 1/√D)"
    )
    shape.add_argument(
        "--distribution",
        choices=DISTRIBUTIONS,
        default="normal",
        metavar="NAME",
        help=f"of the values: {', '.join(DISTRIBUTIONS)} (docs/replaying.md explains each)",
    )
    command.add_dtype(shape, default="bfloat16")

    how = command.add_argument_group("how to measure")
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
        type=positive_number,
        metavar="S",
        help=f"time limit per kernel and call, which may reduce the rounds to {MINIMUM_ROUNDS} "
        f"(default {SECONDS:g}, on CPUs {CPU_SECONDS:g})",
    )
    how.add_argument(
        "--max-time",
        type=duration,
        metavar="10m",
        help="end after this time, with the most representative calls first, spread over models, "
        "phases and layers, and defaults before variants (--resume completes it)",
    )
    how.add_argument(
        "--max-noise",
        type=share,
        metavar="SHARE",
        help="end the rounds once the median time of every kernel is known within this share of "
        "it, e.g. 0.01 (default: all rounds)",
    )
    how.add_argument(
        "--baseline-kernel",
        metavar="K",
        help="kernel that speed-ups are relative to (default: what the model called)",
    )

    how.add_argument(
        "--watch",
        action="store_true",
        help="replay again whenever the file of a kernel (FILE.py:FUNCTION), or one beside it that "
        "it imports, changes; say what changed since the run before",
    )
    how.add_argument(
        "--ncu",
        action="store_true",
        help="of one kernel and one call, print the command of Nsight Compute that profiles it",
    )
    how.add_argument(
        "--once",
        action="store_true",
        help="what that command runs: this kernel on this call in this process, warmed up, "
        "between cudaProfilerStart and cudaProfilerStop",
    )

    where = command.add_argument_group("where kernels run")
    where.add_argument(
        "--gpus",
        action=Listed,
        metavar="all|0,1",
        help="spread the calls over these GPUs of this host, each of which is measured alone",
    )
    where.add_argument(
        "--ray",
        nargs="?",
        const="local",
        metavar="HOST:PORT",
        help="spread the calls over the devices of the Ray cluster at this address (auto: the one "
        "that this machine is a node of; without: one is started here)",
    )
    where.add_argument(
        "--env",
        action="append",
        default=[],
        metavar="NAME=PYTHON",
        help="interpreter of another environment, whose kernels are also run (repeatable); with "
        "--ray, a path on the nodes",
    )
    where.add_argument("--env-file", metavar="TOML", help="file with a table [environments]")
    where.add_argument(
        "--timeout",
        type=positive_number,
        default=300.0,
        metavar="S",
        help="kill a kernel that hangs for this long (default 300)",
    )
    where.add_argument(
        "--in-process",
        action="store_true",
        help="use no worker processes: a crash ends the run; protects against accidents only",
    )

    report = command.add_argument_group("what to report")
    report.add_argument(
        "--metric",
        action=Listed,
        default="time,throughput,accuracy",
        metavar="A,B",
        help=f"columns to show: {', '.join(METRICS)}",
    )
    report.add_argument(
        "--errors-against",
        default="reference",
        metavar="WHAT",
        help="reference (high precision, default), captured (the recorded output), or a kernel",
    )
    report.add_argument(
        "--tolerances",
        metavar="TOML",
        help="judge accuracy by other constants, a table per class of kernel",
    )
    report.add_argument(
        "--compare-stats", action="store_true", help="show min, max, mean and std of outputs"
    )
    report.add_argument(
        "--resources", action="store_true", help="show registers, spills and shared memory (Triton)"
    )
    report.add_argument(
        "--per-call", action="store_true", help="show one table per call, not per shape"
    )
    report.add_argument(
        "--json",
        type=output_file,
        metavar="FILE",
        help="write a JSON object per row (- for stdout)",
    )
    report.add_argument("--resume", action="store_true", help="continue the --json file")
    report.add_argument(
        "--csv", type=output_file, metavar="FILE", help="write the rows as CSV (- for stdout)"
    )
    report.add_argument(
        "--report",
        type=output_file,
        metavar="FILE",
        help="write all of it as one HTML file (- for stdout)",
    )
    report.add_argument(
        "--plot",
        metavar="DIR",
        help="draw charts for papers: sweeps over lengths, models, layers (SVG, PNG, Vega-Lite)",
    )
    report.add_argument(
        "--benchmark-json",
        type=output_file,
        metavar="FILE",
        help="write each kernel's time as github-action-benchmark reads it (- for stdout)",
    )
    report.add_argument("--save-output", metavar="DIR", help="save every kernel's outputs")
    report.add_argument(
        "--check", action="store_true", help="exit with 1 if a kernel fails or is inaccurate"
    )
    add_verbosity(report)
    report.add_argument("--debug", action="store_true", help="show tracebacks")
    command.add_version()
    add_arguments(command)
    add_baselines(command)
    return command
