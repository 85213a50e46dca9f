"""Runs FlashAttention's and FlashInfer's own numeric tests with our kernels in place of theirs.

    git clone https://github.com/Dao-AILab/flash-attention
    git clone https://github.com/flashinfer-ai/flashinfer
    python -m benchmarks.public_tests --flash-attention flash-attention --flashinfer flashinfer

The tests are the libraries', unchanged; `flash_attn` and `flashinfer` are shims that call our
functions and kernels (needs pytest and einops, not the libraries). There are hundreds of thousands
of parametrisations, so each test runs on a random sample of them, which the seed determines.
Parametrisations with features that our kernels lack are skipped, with the reason. FlashAttention's
tests compare gradients too. Writes `benchmarks/results/public_tests.csv`, a line for each test and
kernel, while it runs. Exits 1 if a comparison fails, and 2 if time runs out first.
"""

from __future__ import annotations

import argparse
import re
import subprocess
import sys
import time
from collections import Counter
from pathlib import Path
from typing import Any

import torch

from benchmarks import results
from benchmarks.gpu import MACHINE, measured_on
from benchmarks.public_tests.flash_attn_shim import NAME
from benchmarks.public_tests.listed import TESTS, Listed
from benchmarks.public_tests.sharing import Ran, jobs, played
from replay.kernels.registry import find

COLUMNS = (
    "library",
    "version",
    "file",
    "test",
    "kernel",
    "against",
    "passed",
    "failed",
    "skipped",
    "reasons",
    *MACHINE,
)
WRITTEN_FOR = ("flash-attention 0251105a2fb1", "flashinfer fb28d7242b35")


def version(checkout: Path) -> str:
    """Return a checkout's commit, from git or from a file COMMIT."""
    file = checkout / "COMMIT"
    if file.is_file():
        return file.read_text().strip()[:12]
    command = ["git", "-C", str(checkout), "rev-parse", "--short=12", "HEAD"]
    return subprocess.run(command, capture_output=True, text=True, check=False).stdout.strip()


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--flash-attention", type=Path, help="checkout of flash-attention")
    parser.add_argument("--flashinfer", type=Path, help="checkout of FlashInfer")
    parser.add_argument("--per-test", type=int, default=40, help="maximum comparisons per test")
    parser.add_argument("--seconds", type=float, default=600, help="time limit in seconds")
    parser.add_argument("--processes", type=int, default=12)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument(
        "--only", default="", metavar="REGEX", help="tests to run, as `test kernel`"
    )
    parser.add_argument("--device", choices=("cuda", "cpu"), default="cuda")
    parser.add_argument("--largest", type=int, help="largest number in a parametrisation")
    parser.add_argument("--out", type=Path, default=results.DIRECTORY / "public_tests.csv")
    arguments = parser.parse_args()
    roots = {"flash-attention": arguments.flash_attention, "flashinfer": arguments.flashinfer}
    if not any(roots.values()):
        parser.error("nothing to run; give --flash-attention, --flashinfer or both")
    for root in filter(None, roots.values()):
        if not root.is_dir():
            parser.error(f"{root} is not a folder; give a checkout of the library")
    device = torch.device(arguments.device)
    tests = [
        (test, kernel, root.resolve())
        for test in TESTS
        for kernel in test.kernels
        if (root := roots[test.library]) is not None
        and re.search(arguments.only, f"{test.name} {kernel}")
        and (kernel == NAME or find(kernel).unavailable(device) is None)
    ]
    began = time.monotonic()
    until = began + arguments.seconds
    versions = {name: version(root) for name, root in roots.items() if root is not None}
    options = (arguments.seed, until, arguments.device, arguments.largest)
    machine = measured_on(device)
    found: dict[tuple[Listed, str], Ran] = {(test, kernel): [] for test, kernel, _ in tests}
    try:
        for job, ran in played(list(jobs(tests, arguments.per_test)), arguments.processes, options):
            for given, outcome in ran:
                if outcome.result == "failed":
                    print(f"{job.test.name}, {job.kernel}, {given}: {outcome.sentence}", flush=True)
            found[job.test, job.kernel] += ran
            write(found, versions, machine, arguments.out)
    except (OSError, AttributeError, ImportError) as error:
        parser.error(f"{error}; this was written for {', '.join(WRITTEN_FOR)}")
    counts = Counter(outcome.result for ran in found.values() for _, outcome in ran)
    said = ", ".join(f"{counts[each]} {each}" for each in ("passed", "failed", "skipped"))
    print(f"{said} in {time.monotonic() - began:.0f} s")
    return 1 if counts["failed"] else 2 if time.monotonic() > until else 0


def write(
    found: dict[tuple[Listed, str], Ran],
    versions: dict[str, str],
    machine: dict[str, Any],
    path: Path,
) -> None:
    """Write the results so far, because the machine may be lost before the end."""
    lines = []
    for (test, kernel), ran in found.items():
        counts = Counter(outcome.result for _, outcome in ran)
        reasons = Counter(outcome.sentence for _, outcome in ran if outcome.result == "skipped")
        lines.append(
            {
                "library": test.library,
                "version": versions[test.library],
                "file": test.file,
                "test": test.name,
                "kernel": kernel,
                "against": test.against,
                "passed": counts["passed"],
                "failed": counts["failed"],
                "skipped": counts["skipped"],
                "reasons": [f"{reason} ({n})" for reason, n in reasons.most_common(3)],
                **machine,
            }
        )
    results.write_lines(lines, COLUMNS, path)


if __name__ == "__main__":
    sys.exit(main())
