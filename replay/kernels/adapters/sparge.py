"""SpargeAttn (`spas_sage_attn`, built from source): SageAttention 2 on some of the blocks.

For every block of queries, `spas_sage2_attn_meansim_topk_cuda` keeps the share `topk` of the key
blocks with the highest pooled scores. Variants keep other shares; `topk=1.0` keeps all blocks. The
omitted blocks cause errors, which the accuracy columns show.

The function ignores a mask. Causal calls are refused too: causality is used only to choose blocks,
so the kernel does not mask inside the blocks on the diagonal. The choice of blocks does not support
grouped heads, and a sequence must have at least 128 tokens (one block).
"""

from __future__ import annotations

from functools import partial

from torch import Tensor

from capture.hooks.interceptor import Arguments
from replay.kernels import constraints as limits
from replay.kernels.layout import on_bhsd
from replay.kernels.libraries import Library
from replay.kernels.wrapping import register_adapted

LIBRARY = Library(
    module="spas_sage_attn",
    package="spas_sage_attn",
    install="pip install --no-build-isolation git+https://github.com/thu-ml/SpargeAttn",
    functions=("spas_sage2_attn_meansim_topk_cuda",),
)

DEFAULT_TOPK = 0.5


_limits = (
    limits.no_dropout,
    limits.half_precision,
    limits.no_mask,
    limits.no_causal,
    limits.no_gqa,
    limits.same_value_dim,
    limits.head_dims(64, 128),
    limits.min_length(128),
)


def _run(call: Arguments, topk: float) -> Tensor:
    return LIBRARY.load().spas_sage2_attn_meansim_topk_cuda(
        call.query,
        call.key,
        call.value,
        is_causal=False,
        scale=call.scale,
        topk=topk,
        tensor_layout="HND",
    )


for _topk in (None, 0.25, 0.5, 0.75, 1.0):
    _share = DEFAULT_TOPK if _topk is None else _topk
    register_adapted(
        "sparge" if _topk is None else f"sparge[topk={_topk}]",
        LIBRARY,
        on_bhsd(partial(_run, topk=_share)),
        _limits,
        f"SpargeAttn: SageAttention 2 on {_share:.0%} of the blocks",
        accuracy_class="quantised",
        variant_of="" if _topk is None else "sparge",
    )
