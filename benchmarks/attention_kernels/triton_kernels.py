"""Compares our Triton kernels with the fastest third-party ones, on random values (needs a GPU).

    python -m benchmarks.attention_kernels.triton_kernels [--phase decode] [--env NAME=PYTHON] ...

Times prefill and decode at the shapes of docs/kernel-speed.md, decode with a cold and a warm
L2, and writes `benchmarks/results/triton_kernels.csv`. A single phase writes its own file, such as
`triton_decode.csv`. The phase `head-dims`, prefill at head dimensions other than 64 and 128, runs
only if it is named.
"""

from __future__ import annotations

from typing import Any

from benchmarks import results
from benchmarks.sweep import cold, parser, sweep
from replay.workloads.random_calls import Spec
from replay.workloads.workload import random_workloads

PREFILL = (
    Spec(1, 24, 24, 4608, 4608, 128, 128),
    Spec(2, 30, 30, 17776, 17776, 64, 64),
    Spec(1, 32, 32, 4096, 4096, 128, 128, is_causal=True),
    Spec(1, 32, 8, 8192, 8192, 128, 128, is_causal=True),
    Spec(4, 24, 24, 4250, 4250, 64, 64),
    Spec(8, 64, 16, 1024, 1024, 64, 64, is_causal=True),
    Spec(1, 5, 5, 75600, 75600, 128, 128),
    Spec(16, 32, 32, 512, 512, 128, 128, is_causal=True),
    Spec(1, 32, 32, 16384, 16384, 128, 128, is_causal=True),
)
HEAD_DIMS = (
    Spec(1, 24, 24, 4608, 4608, 96, 96),
    Spec(1, 32, 32, 4096, 4096, 96, 96, is_causal=True),
    Spec(1, 128, 128, 4096, 4096, 192, 128, is_causal=True),
    Spec(2, 128, 128, 1024, 1024, 192, 128, is_causal=True),
    Spec(1, 16, 8, 8192, 8192, 256, 256, is_causal=True),
    Spec(1, 16, 8, 8192, 8192, 256, 256),
)
DECODE = (
    Spec(8, 32, 8, 1, 32768, 128, 128),
    Spec(8, 64, 16, 1, 1024, 64, 64),
    Spec(4, 32, 8, 1, 32000, 256, 256),
)
PEERS = "torch-flash,torch-cudnn"
PREFILL_KERNELS = (
    f"{PEERS},sage1,flashinfer-fa3,fa4,triton-fa2,triton-fa3,triton-sage,triton-fp8,triton-sage-fp8"
)
HEAD_DIMS_KERNELS = "torch-cudnn,torch-flash,fa4,flashinfer-fa3,triton-fa2,triton-fa3,triton-fp8"
DECODE_KERNELS = (
    f"{PEERS},flashinfer-decode,"
    "triton-decode,triton-decode-int8,triton-decode-fp8,"
    "triton-paged-decode,triton-paged-decode-int8,triton-paged-decode-fp8,"
    "triton-sparse-decode,triton-paged-sparse-decode"
)


TOGETHER = ("decode", "prefill")
"""Phases that run by default."""


def main() -> None:
    taking = parser(__doc__, "", "triton_kernels.csv", seconds=0.5)
    taking.add_argument(
        "--phase", choices=(*TOGETHER, "head-dims"), help=f"default: {' and '.join(TOGETHER)}"
    )
    taking.set_defaults(out=None)
    arguments = taking.parse_args()
    phases = (arguments.phase,) if arguments.phase else TOGETHER
    if arguments.out is None:
        name = (arguments.phase or "kernels").replace("-", "_")
        arguments.out = results.DIRECTORY / f"triton_{name}.csv"
    sweeps = {
        "decode": (
            DECODE_KERNELS,
            [
                *cold(random_workloads("decode-cold", list(DECODE), seed=0)),
                *((call, "warm") for call in random_workloads("decode-warm", list(DECODE), seed=0)),
            ],
        ),
        "prefill": (PREFILL_KERNELS, cold(random_workloads("prefill", list(PREFILL), seed=0))),
        "head-dims": (
            HEAD_DIMS_KERNELS,
            cold(random_workloads("head-dims", list(HEAD_DIMS), seed=0)),
        ),
    }
    rows: list[dict[str, Any]] = []
    for phase in phases:
        kernels, calls = sweeps[phase]
        sweep(calls, arguments.kernels or kernels, arguments, rows)


if __name__ == "__main__":
    main()
