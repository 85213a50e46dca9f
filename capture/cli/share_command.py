"""`capture share DIR --to PATH`: write a copy of a recording for others."""

from __future__ import annotations

import argparse
import sys

from capture.cli.verbs import add_common_options, new_parser
from capture.command_line.parser import OneSentenceParser, size
from capture.large_imports import import_large
from capture.text.counted import counted, human_bytes
from capture.text.printable import printable, quoted

DESCRIPTION = """\
Write a copy of a recording that others can use: all calls or a few, and a dataset card that says
what they are, how they were recorded and what they may reveal. DIR may be anything that
`capture show` accepts."""

EXAMPLES = """\
  capture share captured_inputs --to hf://datasets/USER/NAME --license cc-by-4.0
  capture share captured_inputs --to small --keep 20 --max-bytes 20M
  capture share captured_inputs --to small --keep worst:20 --rows rows.jsonl
  capture share captured_inputs --to my-kernel/benchmarks/recorded --keep 5 \\
      --benchmark my-kernel/benchmarks/benchmark_recorded.py"""


def parser() -> OneSentenceParser:
    """Return the parser of `capture share`."""
    usage = "capture share DIR --to PATH|hf://datasets/USER/NAME [options]"
    command = new_parser("share", DESCRIPTION, examples=EXAMPLES, usage=usage)
    command.add_argument("dir", metavar="DIR", help="recording to copy")
    command.add_argument(
        "--to",
        required=True,
        metavar="PATH",
        help="new directory, or an address such as hf://datasets/USER/NAME (private at first)",
    )
    command.add_argument(
        "--license",
        metavar="ID",
        help="the Hub's name of the licence, such as cc-by-4.0 or other; required for hf://",
    )
    command.add_argument(
        "--keep",
        metavar="HOW",
        help="calls to keep: N, spread over layers, steps, phases and shapes; worst:N, with the "
        "largest error relative to its tolerance; slowest:N, with the lowest speed-up (default: "
        "all)",
    )
    command.add_argument(
        "--rows", metavar="FILE", help="rows of `replay --json`, for worst:N and slowest:N"
    )
    command.add_argument(
        "--max-bytes", type=size, metavar="SIZE", help="limit of the total size, such as 20M"
    )
    command.add_argument(
        "--benchmark",
        metavar="FILE",
        help="also write a benchmark of these calls for `kernels benchmark`: "
        "benchmarks/benchmark_*.py in the kernel's repository",
    )
    command.add_argument("--overwrite", action="store_true", help="replace an earlier copy")
    add_common_options(command)
    return command


def run(arguments: argparse.Namespace) -> int:
    """Write the copy and print what it contains; return the exit code."""
    import_large("torch")
    from capture.sharing.share import share
    from capture.storage.arrivals import shown_arrivals

    with shown_arrivals(quiet=arguments.quiet) as report:
        shared = share(
            arguments.dir,
            arguments.to,
            license=arguments.license or "",
            keep=arguments.keep,
            rows=arguments.rows,
            max_bytes=arguments.max_bytes,
            benchmark=arguments.benchmark,
            overwrite=arguments.overwrite,
            report=report,
        )
    kept = f"{shared.calls:,} of {counted(shared.recorded, 'call')}"
    print(printable(f"shared {kept} ({human_bytes(shared.nbytes)}) in {shared.address}"))
    if shared.benchmark is not None:
        left_out = f", without {shared.benchmark.left_out}" * bool(shared.benchmark.left_out)
        calls = counted(shared.benchmark.calls, "call")
        print(printable(f"wrote {arguments.benchmark}: {calls}{left_out}"))
    for prompt in shared.prompts:
        print(printable(f"note: the copy contains the prompt {prompt!r}"), file=sys.stderr)
    if not arguments.quiet:
        print(
            f"next: read its README.md, which says what the values may reveal; replay it with "
            f"{printable(f'replay --dir {quoted(shared.address)}')}",
            file=sys.stderr,
        )
    return 0
