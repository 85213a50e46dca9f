"""Calls that ask what SDPA has no argument for, small enough for any kernel's check."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from capture.call import AttentionCall
from capture.variant import Variant
from tests.factories import normal, random_call

LENGTHS_Q, LENGTHS_K = torch.tensor([0, 5, 16]).int(), torch.tensor([0, 9, 24]).int()

CALLS: dict[str, AttentionCall] = {
    "bottom-right": random_call(is_causal=True, variant=Variant(bottom_right=True)),
    "bottom-right, square": random_call(
        q_len=13, kv_len=13, is_causal=True, variant=Variant(bottom_right=True)
    ),
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


def _calls(head_dim: int, dtype: torch.dtype) -> dict[str, AttentionCall]:
    sizes = {"head_dim": head_dim, "dtype": dtype, "q_heads": 4, "kv_heads": 2}
    even = torch.tensor([0, 5, 16]).int()
    packed = {"q_len": 16, "kv_len": 24, "cu_seqlens_q": LENGTHS_Q, "cu_seqlens_k": LENGTHS_K}
    same = {"q_len": 16, "kv_len": 16, "cu_seqlens_q": even, "cu_seqlens_k": even.clone()}
    lengths = {"batch": 2, "kv_len": 40, "seqused_k": torch.tensor([17, 40]).int()}
    mask = torch.arange(16) < torch.tensor([[5], [16]])
    padded = {"batch": 2, "kv_len": 16, "attn_mask": mask[:, None, None]}
    bottom_right = Variant(bottom_right=True)
    left = Variant(window=(4, None), bottom_right=True)
    sinks = {"sinks": normal(4, seed=7, dtype=torch.bfloat16)}
    asked: dict[str, dict[str, Any]] = {
        "bottom right": {"q_len": 9, "kv_len": 21, "is_causal": True, "variant": bottom_right},
        "bottom right, batch": {"batch": 2, "is_causal": True, "variant": bottom_right},
        "bottom right, decode": {"q_len": 1, "is_causal": True, "variant": bottom_right},
        "top left": {"is_causal": True, "variant": Variant(softcap=2.0)},
        "window, causal": {"q_len": 16, "kv_len": 16, "is_causal": True, "variant": left},
        "window, causal, longer keys": {"is_causal": True, "variant": left},
        "window, decode": {"q_len": 1, "kv_len": 21, "is_causal": True, "variant": left},
        "window, left": {"variant": left},
        "window, both ways": {"variant": Variant(window=(3, 2), bottom_right=True)},
        "window, left and none after": {"variant": Variant(window=(3, 0), bottom_right=True)},
        "window, top left": {"variant": Variant(window=(3, 2))},
        "window, padded": {**padded, "variant": left},
        "soft cap, padded": {**padded, "variant": Variant(softcap=0.5)},
        "soft cap": {"variant": Variant(softcap=0.5)},
        "soft cap, scale, batch": {"batch": 2, "scale": 0.3, "variant": Variant(softcap=2.0)},
        "soft cap, decode": {"q_len": 1, "variant": Variant(softcap=0.5)},
        "sinks": sinks,
        "sinks, window": {**sinks, "is_causal": True, "variant": left},
        "packed": packed,
        "packed, bottom right": {**packed, "is_causal": True, "variant": bottom_right},
        "packed, top left": {**packed, "is_causal": True},
        "packed, even": {**same, "is_causal": True},
        "packed, window": {**packed, "is_causal": True, "variant": left},
        "packed, soft cap": {**packed, "variant": Variant(softcap=0.5, max_seqlen_q=11)},
        "packed, key lengths": {**packed, "seqused_k": torch.tensor([7, 15]).int()},
        "key lengths": lengths,
        "key lengths, decode": {**lengths, "q_len": 1},
        "key lengths, bottom right": {**lengths, "is_causal": True, "variant": bottom_right},
        "key lengths, window": {**lengths, "is_causal": True, "variant": left},
    }
    return {kind: random_call(**{**sizes, **changes}) for kind, changes in asked.items()}


LIBRARY_CALLS = _calls(64, torch.float16)
"""In half precision, for kernels of other libraries; some are aligned as none of them is."""


def visible(call: AttentionCall) -> Tensor:
    """(B, Sq, Sk) bool, one pair at a time by the definitions."""
    batch, q_len, kv_len = call.shape.batch, call.shape.q_len, call.shape.kv_len
    cu_q = [0, q_len] if call.cu_seqlens_q is None else call.cu_seqlens_q.tolist()
    cu_k = [0, kv_len] if call.cu_seqlens_k is None else call.cu_seqlens_k.tolist()
    left, right = call.variant.window
    seen = torch.zeros(batch, q_len, kv_len, dtype=torch.bool)
    for b in range(batch):
        for n in range(len(cu_q) - 1):
            queries, keys = cu_q[n + 1] - cu_q[n], cu_k[n + 1] - cu_k[n]
            if call.seqused_k is not None:
                keys = int(call.seqused_k[n if call.cu_seqlens_q is not None else b])
            shift = keys - queries if call.variant.bottom_right else 0
            for i in range(queries):
                for j in range(keys):
                    seen[b, cu_q[n] + i, cu_k[n] + j] = (
                        (not call.is_causal or j <= i + shift)
                        and (left is None or j >= i + shift - left)
                        and (right is None or j <= i + shift + right)
                    )
    return seen
