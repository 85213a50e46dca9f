"""Our Triton kernel for padded batches: it reads the keys that a padding mask leaves, in place.

Nothing is packed. The lengths are found on the GPU, without the host waiting for them; the core is
the call when they are known already, as for all layers of a model but the first.
"""

from __future__ import annotations

from collections.abc import Callable

from torch import Tensor

from replay.kernels.adapter import adapt, at_once
from replay.kernels.constraints import (
    AnyCall,
    max_head_dim,
    needs_mask,
    no_dropout,
    padding_mask_only,
    up_to_float32,
)
from replay.kernels.layout import padding_keys
from replay.kernels.library import TRITON
from replay.kernels.registry import register


def _prepare(call: AnyCall) -> Callable[[], Tensor]:
    from replay.kernels.triton.varlen import key_ranges, padded

    keys = padding_keys(call)
    assert keys is not None, "`needs_mask` has seen to it"
    ranges = key_ranges(keys)
    return lambda: padded(
        call.query, call.key, call.value, ranges, call.is_causal, scale=call.scale
    )


register(
    adapt(
        "triton-varlen",
        TRITON,
        at_once(_prepare),
        (no_dropout, up_to_float32, max_head_dim(256), needs_mask, padding_mask_only),
        "ours: padded batches in Triton, padding neither read nor computed",
        prepare=_prepare,
    )
)
