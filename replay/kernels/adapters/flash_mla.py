"""FlashMLA: decoding with DeepSeek's absorbed latent attention, over keys in pages.

The library takes BSHD queries and pages of 64 keys, but no value: the value is the key's first 512
columns. A model makes the schedule (`get_mla_metadata`) once per step, for all layers. The drop-in
makes the schedule at every call, and the core gets a schedule. In the version of 2026, the first
call fills in the schedule.
"""

from __future__ import annotations

from collections.abc import Callable

from torch import Tensor

from replay.kernels import constraints as limits
from replay.kernels.constraints import AnyCall
from replay.kernels.layout import bshd
from replay.kernels.libraries import Library
from replay.kernels.wrapping import at_once, register_adapted

LIBRARY = Library(
    module="flash_mla",
    package="flash_mla",
    install="git clone --recursive https://github.com/deepseek-ai/FlashMLA && "
    "pip install --no-build-isolation ./FlashMLA",
    functions=("flash_mla_with_kvcache", "get_mla_metadata"),
    runs_on=lambda capability: capability == (9, 0),
    needs="9.0",
)


def _prepare(call: AnyCall) -> Callable[[], Tensor]:
    library, lengths = LIBRARY.load(), call.seqused_k
    _, q_heads, q_len, _ = call.query.shape
    kv_heads = call.key.shape[1]
    schedule, splits = library.get_mla_metadata(lengths, q_len * q_heads // kv_heads, kv_heads)
    query_BSHD, pages = bshd(call.query).contiguous(), bshd(call.key)

    def run() -> Tensor:
        output, _ = library.flash_mla_with_kvcache(
            query_BSHD,
            pages,
            call.page_table,
            lengths,
            limits.LATENT_DIM,
            schedule,
            splits,
            softmax_scale=call.scale,
            causal=call.is_causal,
        )
        output_BHSD: Tensor = output.transpose(1, 2)
        return output_BHSD

    return run


register_adapted(
    "flash-mla",
    LIBRARY,
    at_once(_prepare),
    (
        limits.head_dims(576, limits.LATENT_DIM),
        limits.needs_pages,
        limits.page_size_of(64),
        *limits.ABSORBED_MLA,
    ),
    "FlashMLA's decode with absorbed latent attention (Hopper)",
    prepare=_prepare,
    features=("bottom-right", "paged"),
    packed_decode=True,
)
