"""Times kernels on the shapes of published comparisons, with random values (needs a GPU).

    python -m benchmarks.published_shapes [--kernels NAMES] [--env NAME=PYTHON] [--out FILE]

Writes `benchmarks/results/published_shapes.csv`.
"""

from __future__ import annotations

from benchmarks.sweep import Group, cold, parser, sweep
from replay.workloads.random_calls import Spec, suite
from replay.workloads.workload import random_workloads

LONGEST = 80_000


def main() -> None:
    arguments = parser(
        __doc__, "torch-flash,torch-cudnn,torch-efficient,torch-default", "published_shapes.csv"
    ).parse_args()
    calls = [
        call
        for name in ("flux", "cogvideo", "llama", "aiter")
        for call in random_workloads(name, suite(name, "bfloat16", LONGEST), seed=0)
    ]
    calls += random_workloads("random", [Spec(4, 24, 24, 4250, 4250, 64, 64)], seed=0)
    sweep([Group(arguments.kernels, cold(calls))], arguments)


if __name__ == "__main__":
    main()
