"""Kernels on the shapes that published comparisons use, random values (a GPU's work).

    python -m benchmarks.published_shapes [--kernels NAMES] [--env NAME=PYTHON] [--out FILE]

Writes `benchmarks/results/published_shapes.csv`.
"""

from __future__ import annotations

import argparse
import tempfile
from pathlib import Path

from benchmarks import results
from benchmarks.full_size import run

SHAPES = (
    "--suite flux",
    "--suite cogvideo",
    "--suite llama",
    "--suite aiter --max-seq 80000",
    "--random -b 4 -hq 24 -sq 4250 -d 64",
)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0] if __doc__ else None)
    parser.add_argument(
        "--kernels", default="torch-flash,torch-cudnn,torch-efficient,torch-default"
    )
    parser.add_argument("--out", type=Path, default=results.DIRECTORY / "published_shapes.csv")
    parser.add_argument("--env", action="append", default=[], metavar="NAME=PYTHON")
    arguments = parser.parse_args()
    environments = " ".join(f"--env {each}" for each in arguments.env)
    rows = []
    with tempfile.TemporaryDirectory() as scratch:
        for number, shape in enumerate(SHAPES):
            file = Path(scratch) / f"{number}.jsonl"
            run(
                f"replay {shape} --kernels {arguments.kernels} --json {file} "
                f"--metric time,throughput,accuracy --max-seconds 2 {environments}"
            )
            rows += [row for row in results.read_jsonl(file) if row["status"] != "unavailable"]
    results.write(rows, arguments.out)


if __name__ == "__main__":
    main()
