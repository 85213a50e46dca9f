"""Emulates block-sparse attention in PyTorch, for machines without the kernel.

The kernel `emulated-block-sparse` chooses blocks as `triton-block-sparse` does, and masks all other
keys. It is slower than dense attention, so only its errors are meaningful. Importing this file
registers it, with the same options.
"""

from __future__ import annotations

from functools import partial

from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention

from attention_kernels.sparse.block_policy import BlockPolicy, kept_blocks
from capture.call.attention_call import AttentionCall
from capture.hooks.interceptor import Arguments
from replay.kernels.adapters.triton_block_sparse import policy_of
from replay.kernels.chosen_keys import mask_of_blocks
from replay.kernels.constraints import all_of, no_causal, no_dropout, no_mask
from replay.kernels.registry import Kernel, register
from replay.kernels.wrapping import drop_in
from replay.sparsity.kernel import SparseKernel
from replay.sparsity.pace import Pace

NAME = "emulated-block-sparse"
ROWS = KEYS = 64
"""Number of queries in a tile and of keys in a block."""

LIMITS = (no_dropout, no_mask, no_causal)


def _chosen(call: AttentionCall, policy: BlockPolicy) -> Tensor:
    kept = kept_blocks(call.query, call.key, policy, ROWS, KEYS, scale=call.scale)
    return mask_of_blocks(kept, ROWS, KEYS, call)


def _attend(call: Arguments, policy: BlockPolicy) -> Tensor:
    tensors = call.query, call.key, call.value
    mask = _chosen(AttentionCall(*tensors, scale=call.scale), policy)
    return scaled_dot_product_attention(
        *tensors, attn_mask=mask, scale=call.scale, enable_gqa=call.enable_gqa
    )


def _kernel(keep: str = "", mass: str = "", window: str = "", grid: str = "") -> Kernel:
    policy = policy_of(keep, mass, window, grid)
    return Kernel(
        NAME,
        drop_in(partial(_attend, policy=policy), LIMITS),
        "sparse",
        unsupported=all_of(*LIMITS),
        default=False,
        chosen=partial(_chosen, policy=policy),
        options=_kernel,
    )


register(_kernel())

EMULATED = SparseKernel(NAME, lambda call: (ROWS, KEYS), lambda *timed: Pace(0.0, 1.0))
"""The kernel for a tuning, as if its time were in proportion to the blocks that it visits."""
