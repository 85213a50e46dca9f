"""Times block-sparse attention beside dense attention (needs a GPU; a minute and a half).

    python -m benchmarks.attention_kernels.block_sparse [--only flux ...] [--out FILE]

The kernels take turns in shuffled rounds with a cold L2, on random values. The core attends to
blocks that are chosen already, and the drop-in chooses them first. Its speed per block is dense
time × share of the blocks visited / time: 1 if the time falls with the number of blocks. SpargeAttn
(8 bits) runs where it is installed. Writes `benchmarks/results/block_sparse.csv`, a line for each
call, policy and part, and prints its table.
"""

from __future__ import annotations

import statistics
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import torch
from torch import Tensor

from attention_kernels.operators import attention
from attention_kernels.sparse.block_choice import choose_blocks
from attention_kernels.sparse.block_policy import BlockPolicy
from attention_kernels.sparse.block_sparse import block_sparse_attention
from attention_kernels.tiles.visited_blocks import VisitedBlocks
from benchmarks.gpu import MACHINE, timed, write_measured
from benchmarks.tables.speed import block_sparse
from replay.kernels.registry import find
from replay.timing.statistics import paired_speedup
from replay.workloads.random_calls import Spec

ROUNDS = 15
DENSITIES = (1.0, 0.75, 0.5, 0.3, 0.1)
CALLS = {
    "cogvideo": Spec(2, 30, 30, 17776, 17776, 64, 64),
    "flux": Spec(1, 24, 24, 4608, 4608, 128, 128),
    "8k": Spec(1, 24, 24, 8192, 8192, 128, 128),
    "8k-causal": Spec(1, 32, 8, 8192, 8192, 128, 128, is_causal=True),
    "32k": Spec(1, 24, 24, 32768, 32768, 128, 128),
}
WINDOWS = {
    "cogvideo": BlockPolicy(window=(3, 8, 45), grid=(13, 30, 45)),
    "flux": BlockPolicy(window=(0, 12, 64), grid=(1, 64, 64)),
}
SPARGE = ("sparge[topk=0.5]", "sparge[topk=0.25]")
COLUMNS = (
    *("call", "policy", "kernel", "part", "visited", "ms", "dense, ms"),
    *("speed per block", "low", "high"),
    *MACHINE,
)
OURS = "triton-block-sparse"


def policies(name: str) -> dict[str, BlockPolicy]:
    """Return the policies that are timed on a call, by name."""
    found = {f"keep={density}": BlockPolicy(keep=density) for density in DENSITIES}
    found["mass=0.5"] = BlockPolicy(mass=0.5)
    heads = CALLS[name].q_heads
    found["keep by head"] = BlockPolicy(keep=tuple((1.0, 0.3, 0.1)[i % 3] for i in range(heads)))
    return found | ({"window": WINDOWS[name]} if name in WINDOWS else {})


def main() -> None:
    print(block_sparse(write_measured(__doc__, "block_sparse.csv", COLUMNS, lines, CALLS)))


def lines(name: str, device: torch.device) -> Iterator[dict[str, Any]]:
    """Yield the lines of a call."""
    spec = CALLS[name]
    call = spec.call(device, torch.Generator(device).manual_seed(0))
    tensors = call.query, call.key, call.value
    is_causal = spec.is_causal
    attend = partial(block_sparse_attention, *tensors, is_causal=is_causal)
    runs: dict[tuple[str, str, str], Callable[[], object]] = {
        ("", "attention", ""): partial(attention, **call.arguments())
    }
    shares: dict[str, float] = {}
    for policy, rule in policies(name).items():
        choose = partial(choose_blocks, *tensors, rule, is_causal=is_causal)
        visited = choose()
        counts = visited.counts.expand(spec.batch, spec.q_heads, -1, -1)
        shares[policy] = float(counts.sum())
        runs[policy, OURS, "core"] = partial(attend, visited)
        runs[policy, OURS, "drop-in"] = partial(_chosen_first, attend, choose)
    everything = max(shares.values())  # `keep=1.0` visits all blocks
    runs["keep=0.5", OURS, "choice"] = partial(
        choose_blocks, *tensors, BlockPolicy(keep=0.5), is_causal=is_causal
    )
    for sparge in map(find, SPARGE):
        if sparge.unavailable(device) is None and sparge.refuses(call) is None:
            topk = sparge.name.partition("=")[2].removesuffix("]")
            policy = f"keep={topk}"
            runs[policy, "sparge", "drop-in"] = partial(sparge.attention, **call.arguments())
            shares.setdefault(policy, float(topk) * everything)
    samples = timed(runs, device, ROUNDS, 0.4)
    dense, *others = samples
    for key in others:
        policy, kernel, part = key
        share = shares[policy] / everything
        line: dict[str, Any] = {
            "call": name,
            "policy": policy,
            "kernel": kernel,
            "part": part,
            "visited": share,
            "ms": statistics.median(samples[key].ms),
            "dense, ms": statistics.median(samples[dense].ms),
        }
        if part != "choice":
            speedup = paired_speedup(samples[dense].ms, samples[key].ms)
            line |= {
                "speed per block": share * speedup.ratio,
                "low": None if speedup.low is None else share * speedup.low,
                "high": None if speedup.high is None else share * speedup.high,
            }
        yield line


def _chosen_first(attend: Callable[..., Tensor], choose: Callable[[], VisitedBlocks]) -> Tensor:
    return attend(choose())


if __name__ == "__main__":
    main()
