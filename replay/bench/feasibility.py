"""The check, before a replay starts, that this machine can replay the requested shapes."""

from __future__ import annotations

import torch

from replay.timing import flops
from replay.timing.machine import available_bytes, cpu_flops_per_second
from replay.workloads.call_sizes import ShapeError
from replay.workloads.random_calls import Spec

PATIENCE_SECONDS = 1800
"""Longest expected duration of a run on a CPU; longer runs are refused."""


def check_size(specs: list[Spec], device: torch.device, kernels: int) -> None:
    """Refuse shapes that do not fit into this machine's memory or would take very long.

    The memory includes query, key, value and output, the float64 reference with its temporaries,
    and a copy of the inputs for comparison. The time is limited only on a CPU. The time includes
    the reference and about ten runs of every kernel, at the rate of float32 matrix products.

    Raises:
        ShapeError: a shape is too large; the message names the `--max-seq` that fits.
    """
    memory = available_bytes(device)
    rate = cpu_flops_per_second() if device.type == "cpu" else None

    def fits(chosen: list[Spec]) -> bool:
        needed = max(_bytes_needed(spec) for spec in chosen)
        # All query-key pairs count, because most kernels compute masked ones too.
        work = sum(flops.flops(spec.without_values()) for spec in chosen) * (5 + 10 * kernels)
        seconds = work / rate if rate else 0.0
        return needed <= memory and seconds <= PATIENCE_SECONDS

    if fits(specs):
        return
    lengths = sorted({spec.longest for spec in specs}, reverse=True)
    for length in lengths[1:]:
        if fits([spec for spec in specs if spec.longest <= length]):
            raise ShapeError(
                f"too large for this machine ({device}, {memory / 1e9:.0f} GB free): "
                f"--max-seq {length} fits"
            )
    raise ShapeError(
        f"too large for this machine ({device}, {memory / 1e9:.0f} GB free): even the shortest, "
        f"{lengths[-1]} long, does not fit; use a GPU, or `replay random` with a smaller shape"
    )


def _bytes_needed(spec: Spec) -> int:
    mask_rows = {"none": 0, "padding": spec.batch}.get(spec.mask, spec.q_len)
    moved = flops.bytes_moved(spec.without_values()) + mask_rows * spec.kv_len
    output_elements = spec.batch * spec.q_heads * spec.q_len * spec.v_head_dim
    return 3 * moved + output_elements * 8 * 2 + 2**30
