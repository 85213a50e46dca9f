"""Calls that ask what SDPA has no argument for, small enough for any kernel's check."""

from __future__ import annotations

import torch

from capture.call import AttentionCall
from capture.variant import Variant
from tests.factories import normal, random_call

LENGTHS_Q, LENGTHS_K = torch.tensor([0, 5, 16]).int(), torch.tensor([0, 9, 24]).int()

CALLS: dict[str, AttentionCall] = {
    "bottom-right": random_call(is_causal=True, variant=Variant(bottom_right=True)),
    "window": random_call(q_len=16, kv_len=16, is_causal=True, variant=Variant(window=(3, None))),
    "window both ways": random_call(
        q_len=9, kv_len=16, variant=Variant(window=(4, 2), bottom_right=True)
    ),
    "softcap": random_call(variant=Variant(softcap=0.5)),
    "softcap and mask": random_call(variant=Variant(softcap=0.5), attn_mask=normal(9, 13) > 0),
    "sinks": random_call(q_heads=4, kv_heads=2, sinks=normal(4, seed=7)),
    "sinks and window": random_call(
        q_len=16, kv_len=16, is_causal=True, sinks=normal(2, seed=7), variant=Variant(window=(2, 0))
    ),
    "packed": random_call(q_len=16, kv_len=24, cu_seqlens_q=LENGTHS_Q, cu_seqlens_k=LENGTHS_K),
    "packed, causal bottom right": random_call(
        q_len=16,
        kv_len=24,
        is_causal=True,
        cu_seqlens_q=LENGTHS_Q,
        cu_seqlens_k=LENGTHS_K,
        variant=Variant(bottom_right=True, max_seqlen_q=11, max_seqlen_k=15),
    ),
    "packed, causal top left": random_call(
        q_len=16,
        kv_len=24,
        is_causal=True,
        cu_seqlens_q=LENGTHS_Q,
        cu_seqlens_k=LENGTHS_K,
        variant=Variant(window=(2, None)),
    ),
    "key-lengths": random_call(batch=2, seqused_k=torch.tensor([4, 13]).int()),
    "key-lengths, bottom right": random_call(
        batch=2,
        q_len=3,
        is_causal=True,
        seqused_k=torch.tensor([4, 13]).int(),
        variant=Variant(bottom_right=True),
    ),
}
