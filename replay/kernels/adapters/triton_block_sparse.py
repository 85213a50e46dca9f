"""Our block-sparse attention: each tile of queries attends to chosen blocks of keys.

The drop-in chooses blocks and attends to them. The core attends to blocks that are chosen already.
Options are the fields of `attention_kernels.sparse.block_policy.BlockPolicy`, one policy a kernel:

    triton-block-sparse[keep=0.3]                          share of the blocks
    triton-block-sparse[keep=0.25/1/0.5]                   one share for each query head
    triton-block-sparse[mass=0.9]                          sum of the blocks' pooled weights
    triton-block-sparse[window=2x6x6,grid=13x30x45]        frames x rows x columns
    triton-block-sparse[mass=0.9,skip=0.001]               skips blocks of small weights

These kernels do not run by default, because users must decide which blocks may be left out.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import TYPE_CHECKING, Any

from torch import Tensor

from capture.call.attention_call import AttentionCall
from capture.call.block_mask import block_mask
from replay.kernels.constraints import (
    AnyCall,
    Constraint,
    max_head_dim,
    no_causal,
    no_dropout,
    no_mask,
    up_to_float32,
)
from replay.kernels.libraries import TRITON, imported
from replay.kernels.registry import Kernel, register
from replay.kernels.wrapping import adapt, at_once

if TYPE_CHECKING:
    from attention_kernels.sparse.block_policy import BlockPolicy
    from attention_kernels.tiles.visited_blocks import VisitedBlocks

DEFAULT_KEEP = "0.5"
LIMITS = (no_dropout, no_mask, up_to_float32, max_head_dim(256))


def policy_of(keep: str = "", mass: str = "", window: str = "", grid: str = "") -> BlockPolicy:
    """Return the policy that a kernel's options describe; without options, half of the blocks.

    Numbers for query heads are separated by `/`, and numbers of frames, rows and columns by `x`.

    Raises:
        ValueError: a text is not of this form, or the options are not those of one policy.
    """
    from attention_kernels.sparse.block_policy import BlockPolicy

    if not (keep or mass or window or grid):
        keep = DEFAULT_KEEP
    return BlockPolicy(
        _shares("keep", keep) if keep else None,
        _shares("mass", mass) if mass else None,
        _triple("window", window) if window else None,
        _triple("grid", grid) if grid else None,
    )


def _shares(name: str, text: str) -> tuple[float, ...]:
    try:
        return tuple(map(float, text.split("/")))
    except ValueError:
        raise ValueError(
            f"{name} must be a number, or one for each query head such as 0.25/1/0.5, got {text!r}"
        ) from None


def _triple(name: str, text: str) -> tuple[int, int, int]:
    numbers = text.split("x")
    if len(numbers) != 3 or not all(map(str.isdecimal, numbers)):
        raise ValueError(f"{name} must be FRAMESxROWSxCOLUMNS, such as 13x30x45, got {text!r}")
    frames, rows, columns = map(int, numbers)
    return frames, rows, columns


def _choose(call: AnyCall, policy: BlockPolicy) -> VisitedBlocks:
    choose_blocks = imported("attention_kernels.sparse.block_choice", "choose_blocks")
    return choose_blocks(
        call.query, call.key, call.value, policy, is_causal=call.is_causal, scale=call.scale
    )


def _prepare(
    call: AnyCall, policy: BlockPolicy, skip: float | None, return_map: bool = False
) -> Callable[[], Any]:
    attend = imported("attention_kernels.sparse.block_sparse", "block_sparse_attention")
    return partial(
        attend,
        call.query,
        call.key,
        call.value,
        _choose(call, policy),
        is_causal=call.is_causal,
        scale=call.scale,
        skip=skip,
        return_map=return_map,
    )


def _chosen(call: AttentionCall, policy: BlockPolicy, skip: float | None) -> Tensor:
    """Return the blocks in the output: chosen ones, without the skipped ones."""
    block_sizes = imported("attention_kernels.sparse.block_sparse", "block_sizes")
    map_of = imported("attention_kernels.sparse.block_choice", "map_of")
    rows, keys = block_sizes(call.query, call.key, call.value)
    if skip is None:
        kept = map_of(_choose(call, policy), keys)
    else:
        _, kept = _prepare(call, policy, skip, return_map=True)()
    return block_mask(kept, rows, keys)


def _can_skip(call: AttentionCall) -> str | None:
    can_skip = imported("attention_kernels.sparse.block_sparse", "can_skip")
    return None if can_skip(call.query) else "has `skip` only in float32 on a Hopper GPU"


def _skip_of(text: str) -> float:
    try:
        skip = float(text)
    except ValueError:
        raise ValueError(f"skip must be a number, got {text!r}") from None
    if not 0 < skip < 1:
        raise ValueError(f"skip must be more than 0 and less than 1, got {text}")
    return skip


def _chooses(policy: BlockPolicy) -> Constraint:
    def check(call: AttentionCall) -> str | None:
        shape = call.shape
        return policy.refuses(shape.q_heads, shape.q_len, shape.kv_len, is_causal=call.is_causal)

    return check


def _block_sparse_kernel(
    keep: str = "", mass: str = "", window: str = "", grid: str = "", skip: str = ""
) -> Kernel:
    if skip and not (keep or mass or window or grid):
        keep = "1"
    policy, least = policy_of(keep, mass, window, grid), _skip_of(skip) if skip else None
    prepare = partial(_prepare, policy=policy, skip=least)
    limits = (*LIMITS, *([no_causal] if window else []), _chooses(policy))
    limits += (_can_skip,) if skip else ()
    return adapt(
        "triton-block-sparse",
        TRITON,
        at_once(prepare),
        limits,
        "ours: exact attention to the blocks of keys that pooled scores or a window choose",
        prepare=prepare,
        accuracy_class="sparse",
        default=False,
        chosen=partial(_chosen, policy=policy, skip=least),
        options=_block_sparse_kernel,
    )


register(_block_sparse_kernel())
