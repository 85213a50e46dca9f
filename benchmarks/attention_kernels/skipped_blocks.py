"""Times block-sparse attention that skips blocks of small weights (needs a GPU; half a minute).

    python -m benchmarks.attention_kernels.skipped_blocks [--out FILE]

Every block is visited, and the keys of some blocks have scores so low that these are skipped. The
kernels take turns in shuffled rounds with a cold L2. Prints the time of the portable kernel / that
of dense attention, which on Hopper is another kernel. Writes
`benchmarks/results/skipped_blocks.csv`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import partial
from typing import Any
from unittest.mock import patch

import torch
from torch import Tensor

from attention_kernels.operators import attention
from attention_kernels.sparse import block_sparse
from attention_kernels.sparse.block_choice import visited_of
from benchmarks.gpu import MACHINE, timed, write_measured
from replay.timing.statistics import paired_speedup

HEADS, LENGTH = 16, 8192
KEPT = (1.0, 0.5, 0.25, 0.1)
"""Shares of the blocks whose scores are not low."""
SKIP = 1e-4
COLUMNS = ("head_dim", "computed", "time ratio", *MACHINE)


HEAD_DIMS = ("64", "128", "256")


def lines(head_dim: str, device: torch.device) -> Iterator[dict[str, Any]]:
    """Yield a line without `skip`, and a line for each of KEPT."""
    shape = 1, HEADS, LENGTH, int(head_dim)
    query, key, value = (torch.randn(shape, device=device, dtype=torch.bfloat16) for _ in range(3))
    rows, keys = block_sparse.block_sizes(query, key, value)
    tiles, blocks = -(-LENGTH // rows), -(-LENGTH // keys)
    every = torch.ones(1, 1, tiles, blocks, dtype=torch.bool, device=device)
    visited = visited_of(every, query, key, value)
    query[..., 0] = 8.0
    runs: dict[str, Callable[[], object]] = {"dense": partial(attention, query, key, value)}
    computed = {"no skip": 1.0}
    attend = block_sparse.block_sparse_attention
    runs["no skip"] = partial(attend, query, key, value, visited)
    for share in KEPT:
        low = torch.arange(blocks, device=device) * 0.618 % 1 >= share
        low[0] = False
        keys_of_share = key.clone()
        keys_of_share[..., 0] = torch.where(low.repeat_interleave(keys)[:LENGTH], -40.0, 0.0)
        run = partial(attend, query, keys_of_share, value, visited, skip=SKIP)
        name = f"skip, {share:.0%} kept"
        runs[name], computed[name] = run, float(run(return_map=True)[1].float().mean())
    samples = timed(runs, device, 15, 0.3)
    for name, share in computed.items():
        ratio = 1 / paired_speedup(samples["dense"].ms, samples[name].ms).ratio
        yield {"head_dim": head_dim, "computed": f"{share:.2f}", "time ratio": f"{ratio:.2f}"}


def main() -> None:
    # On Hopper, the module takes another kernel, and refuses `skip`.
    with patch.multiple(block_sparse, can_skip=_always, _is_for_hopper=_never):
        write_measured(__doc__, "skipped_blocks.csv", COLUMNS, lines, HEAD_DIMS)


def _always(query: Tensor) -> bool:
    return True


def _never(query: Tensor, value: Tensor) -> bool:
    return False


if __name__ == "__main__":
    main()
