"""Kernels of vLLM's backends FLASH_ATTN and TRITON_ATTN, in vLLM's Python environment.

`vllm-flash-attn` is vLLM's build of FlashAttention, in the version that vLLM chooses for the GPU.
`vllm-flash-attn-fp8` is the same function (version 3) for queries and caches that are already in
float8_e4m3fn, with the scales of the call. `vllm-triton` is vLLM's Triton kernel for batches. The
core gets what vLLM prepares once for all layers of a step, such as FlashAttention 3's schedule.

vLLM is imported when one of them first runs: the import takes seconds, and changes PyTorch's
compiler for all kernels of the process.
"""

from __future__ import annotations

import importlib.util
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from capture.call.per_head import SCALES
from replay.kernels import constraints as limits
from replay.kernels.constraints import AnyCall
from replay.kernels.flash_attention import KNOWN, varlen_arguments
from replay.kernels.layout import Packed
from replay.kernels.libraries import Library, imported
from replay.kernels.wrapping import at_once, register_adapted

LIBRARY = Library(
    module="vllm.vllm_flash_attn",
    package="vllm",
    install="run replay in vLLM's environment (pip install vllm)",
)
SEGMENTS, MOST_PROGRAMS = 16, 128
"""Parts of the keys that TRITON_ATTN computes separately in decode, and the product of sequences
and key heads up to which it does so (`vllm/v1/attention/backends/triton_attn.py`, 0.22.1)."""


def _unavailable(device: torch.device) -> str | None:
    if reason := LIBRARY.wrong_device(device):
        return reason
    return None if importlib.util.find_spec("vllm") else f"not installed: {LIBRARY.install}"


def _pages_or_packed_keys(call: AnyCall) -> str | None:
    if call.page_table is not None or (call.cu_seqlens_k is not None and call.seqused_k is None):
        return None
    return "for keys in pages, or packed keys of the lengths `cu_seqlens_k` alone"


def _prepare_flash_attn(call: AnyCall) -> Callable[[], Tensor]:
    flash_attn, packed = LIBRARY.load(), Packed.of(call)
    heads, head_dim = packed.query_THD.shape[1:]
    choose = imported("vllm.v1.attention.backends.fa_utils", "get_flash_attn_version")
    arguments = varlen_arguments(call, packed)
    arguments["fa_version"] = choose(head_size=head_dim)
    if call.sinks is not None:
        arguments["s_aux"] = call.sinks
    sequences = packed.q_offsets.shape[0] - 1
    for name, scale in SCALES.items():
        if (given := getattr(call, scale)) is not None:
            arguments[f"{name[0]}_descale"] = given.expand(sequences, -1)
    if packed.page_table is not None:
        arguments["block_table"] = arguments.pop("page_table")
        if arguments["fa_version"] == 3:
            arguments["scheduler_metadata"] = flash_attn.get_scheduler_metadata(
                batch_size=sequences,
                max_seqlen_q=packed.longest_query,
                max_seqlen_k=packed.longest_key,
                num_heads_q=heads,
                num_heads_kv=packed.key_THD.shape[-2],
                headdim=head_dim,
                cache_seqlens=packed.seqused_k,
                qkv_dtype=call.query.dtype,
                cu_seqlens_q=packed.q_offsets,
                page_size=packed.key_THD.shape[1],
                causal=call.is_causal,
                window_size=arguments.get("window_size", (-1, -1)),
            )
    return lambda: packed.unpack(flash_attn.flash_attn_varlen_func(**arguments))


def _prepare_triton(call: AnyCall) -> Callable[[], Tensor]:
    module = "vllm.v1.attention.ops.triton_unified_attention"
    attend, packed = imported(module, "unified_attention"), Packed.of(call)
    query, cap, left = packed.query_THD, call.variant.softcap, call.variant.window[0]
    heads, head_dim = query.shape[1:]
    few = MOST_PROGRAMS // packed.key_THD.shape[2]
    width = 1 << (head_dim - 1).bit_length()
    parts, maximum, total = (
        query.new_empty(few, heads, SEGMENTS, *last, dtype=torch.float32)
        for last in ((width,), (), ())
    )
    scale: Any = head_dim**-0.5 if call.scale is None else call.scale

    def run() -> Tensor:
        output = torch.empty_like(query)
        attend(
            q=query,
            k=packed.key_THD,
            v=packed.value_THD,
            out=output,
            cu_seqlens_q=packed.q_offsets,
            max_seqlen_q=packed.longest_query,
            seqused_k=packed.seqused_k,
            max_seqlen_k=packed.longest_key,
            softmax_scale=scale,
            causal=True,
            window_size=(-1, -1) if left is None else (left, 0),
            block_table=packed.page_table,
            softcap=0.0 if cap is None else cap,
            q_descale=None,
            k_descale=None,
            v_descale=None,
            seq_threshold_3D=few,
            num_par_softmax_segments=SEGMENTS,
            softmax_segm_output=parts,
            softmax_segm_max=maximum,
            softmax_segm_expsum=total,
            sinks=call.sinks,
        )
        return packed.unpack(output)

    return run


_flash_limits = (
    limits.no_dropout,
    limits.no_mask,
    limits.deepseek_value_dim,
    limits.max_head_dim(256),
    limits.multiple_of_8,
    limits.bfloat16_sinks,
    limits.causal_only_square,
    _pages_or_packed_keys,
)
register_adapted(
    "vllm-flash-attn",
    LIBRARY,
    at_once(_prepare_flash_attn),
    (limits.half_precision, *_flash_limits),
    "FlashAttention in vLLM, over packed keys or pages",
    prepare=_prepare_flash_attn,
    unavailable=_unavailable,
    features=(*KNOWN, "sinks", "packed", "key-lengths", "paged"),
)
register_adapted(
    "vllm-flash-attn-fp8",
    LIBRARY,
    at_once(_prepare_flash_attn),
    (limits.dtypes(torch.float8_e4m3fn), limits.needs_scales, *_flash_limits),
    "FlashAttention 3 in vLLM over a float8 cache with scales",
    prepare=_prepare_flash_attn,
    unavailable=_unavailable,
    accuracy_class="quantised",
    features=(*KNOWN, "sinks", "packed", "key-lengths", "paged", "scaled"),
)
register_adapted(
    "vllm-triton",
    LIBRARY,
    at_once(_prepare_triton),
    (
        limits.no_dropout,
        limits.no_mask,
        limits.half_precision,
        limits.same_value_dim,
        limits.needs_pages,
        limits.needs_causal,
        limits.causal_only_square,
    ),
    "vLLM's Triton kernel for batches over pages",
    prepare=_prepare_triton,
    unavailable=_unavailable,
    features=(*KNOWN, "sinks", "packed", "key-lengths", "paged"),
)
