"""FlashAttention 3: the module `flash_attn_interface`, built from `hopper/` of its repository.

Beyond SDPA, the library supports the bottom-right diagonal, windows and soft caps. `fa3-varlen`
supports packed sequences and key lengths. `fa3-kvcache` supports key lengths and keys in pages,
also with packed queries. `fa3-mla` is the same function for absorbed MLA: the columns of query and
key that the value shares are its arguments `qv` and `v_cache`.

`fa3-fp8` quantises query, key and value to float8_e4m3fn, with one scale for every batch element
and key head (the shape of `q_descale`, `k_descale` and `v_descale`). The drop-in includes this
quantisation; the core does not. The library's output is bfloat16; the drop-in converts it to the
dtype that SDPA would return. `fa3-kvcache-fp8` is `fa3-kvcache` for queries and caches that are
already in float8_e4m3fn, with the scales of the call.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from capture.call.per_head import SCALES
from capture.hooks.interceptor import Arguments
from replay.kernels import constraints as limits
from replay.kernels.constraints import AnyCall
from replay.kernels.flash_attention import KNOWN, options, output_of, varlen_arguments
from replay.kernels.layout import Packed, bshd, in_layout, on_bshd, on_packed
from replay.kernels.libraries import Library
from replay.kernels.wrapping import at_once, register_adapted

LIBRARY = Library(
    module="flash_attn_interface",
    package="flash_attn_3",
    install="git clone https://github.com/Dao-AILab/flash-attention && "
    "pip install --no-build-isolation ./flash-attention/hopper",
    functions=("flash_attn_func",),
    runs_on=lambda capability: capability == (9, 0),
    needs="9.0",
)

FP8 = torch.float8_e4m3fn
LARGEST_FP8 = torch.finfo(FP8).max


_limits = (
    limits.no_dropout,
    limits.half_precision,
    limits.deepseek_value_dim,
    limits.max_head_dim(256),
)


def _run(call: Arguments, **descale: Tensor) -> Tensor:
    # Some versions before 3.0.0b1 also return the log-sum-exp.
    return output_of(
        LIBRARY.load().flash_attn_func(call.query, call.key, call.value, **options(call), **descale)
    )


def _run_varlen(call: AnyCall, packed: Packed) -> Tensor:
    return output_of(LIBRARY.load().flash_attn_varlen_func(**varlen_arguments(call, packed)))


def _run_cached(call: Arguments, **more: Tensor) -> Tensor:
    given = {"cache_seqlens": call.seqused_k, "page_table": call.page_table}
    lengths: dict[str, Any] = {name: each for name, each in given.items() if each is not None}
    query, offsets = call.query, call.cu_seqlens_q
    if offsets is not None:
        longest = call.variant.max_seqlen_q
        longest = int(offsets.diff().max()) if longest is None else longest
        query, lengths = query[0], {**lengths, "cu_seqlens_q": offsets, "max_seqlen_q": longest}
    output = output_of(
        LIBRARY.load().flash_attn_with_kvcache(
            query, call.key, call.value, **lengths, **more, **options(call)
        )
    )
    return output if offsets is None else output[None]


def _run_latent(call: Arguments) -> Tensor:
    (query, query_tail), (_, key_tail) = (
        each.tensor_split([limits.LATENT_DIM], dim=-1) for each in (call.query, call.key)
    )
    return _run_cached(call._replace(query=query_tail, key=key_tail), qv=query)


def _run_scaled(call: Arguments) -> Tensor:
    offsets = call.cu_seqlens_q
    sequences = call.query.shape[0] if offsets is None else offsets.shape[0] - 1
    given = {name: getattr(call, scale) for name, scale in SCALES.items()}
    descales = {f"{name[0]}_descale": each.expand(sequences, -1) for name, each in given.items()}
    return _run_cached(call, **descales)


def quantise(tensor_BSHD: Tensor, kv_heads: int) -> tuple[Tensor, Tensor]:
    """Return a tensor in float8, and the (B, Hkv) factors that restore it."""
    grouped = tensor_BSHD.unflatten(2, (kv_heads, -1))
    largest = grouped.abs().amax(dim=(1, 3, 4)).float()
    descale = (largest / LARGEST_FP8).clamp(min=torch.finfo(torch.float32).tiny)
    quantised = (grouped / descale[:, None, :, None, None]).to(FP8)
    return quantised.flatten(2, 3), descale


def _prepare_fp8(call: AnyCall) -> Callable[[], Tensor]:
    """Prepare FlashAttention 3 on float8 copies of query, key and value."""
    laid_out, kv_heads = in_layout(call, bshd), call.key.shape[1]
    query, q_descale = quantise(laid_out.query, kv_heads)
    key, k_descale = quantise(laid_out.key, kv_heads)
    value, v_descale = quantise(laid_out.value, kv_heads)
    quantised = laid_out._replace(query=query, key=key, value=value)
    descales = {"q_descale": q_descale, "k_descale": k_descale, "v_descale": v_descale}
    return lambda: _run(quantised, **descales).transpose(1, 2)


def _attend_fp8(call: Arguments) -> Tensor:
    return _prepare_fp8(call)().to(call.query.dtype)


_attend, _prepare = on_bshd(_run)
register_adapted(
    "fa3",
    LIBRARY,
    _attend,
    (*_limits, limits.no_mask, limits.multiple_of_8, limits.causal_only_square),
    "FlashAttention 3 (Hopper)",
    prepare=_prepare,
    features=KNOWN,
    differentiable=True,
)
register_adapted(
    "fa3-fp8",
    LIBRARY,
    _attend_fp8,
    (*_limits, limits.no_mask, limits.head_dim_multiple_of(16), limits.causal_only_square),
    "FlashAttention 3 in float8, a scale for each batch element and key head",
    prepare=_prepare_fp8,
    accuracy_class="quantised",
    features=KNOWN,
)
_prepare_varlen = on_packed(_run_varlen)
register_adapted(
    "fa3-varlen",
    replace(LIBRARY, functions=("flash_attn_varlen_func",)),
    at_once(_prepare_varlen),
    (*_limits, limits.multiple_of_8, *limits.PADDED_OR_PACKED),
    "FlashAttention 3 on packed sequences, and on padded batches, packed by their mask",
    prepare=_prepare_varlen,
    features=(*KNOWN, "packed", "key-lengths"),
    differentiable=True,
)
_CACHED = replace(LIBRARY, functions=("flash_attn_with_kvcache",))
_attend_cached, _prepare_cached = on_bshd(_run_cached)
register_adapted(
    "fa3-kvcache",
    _CACHED,
    _attend_cached,
    (
        *_limits,
        limits.no_mask,
        limits.multiple_of_8,
        limits.packed_in_pages_only,
        limits.decode_or_key_lengths,
        limits.causal_only_square,
    ),
    "FlashAttention 3's decode over a key/value cache",
    prepare=_prepare_cached,
    features=(*KNOWN, "key-lengths", "packed", "paged"),
)
_attend_scaled, _prepare_scaled = on_bshd(_run_scaled)
register_adapted(
    "fa3-kvcache-fp8",
    _CACHED,
    _attend_scaled,
    (
        limits.dtypes(FP8),
        limits.needs_scales,
        limits.same_value_dim,
        limits.max_head_dim(256),
        limits.head_dim_multiple_of(16),
        limits.no_dropout,
        limits.no_mask,
        limits.packed_in_pages_only,
        limits.decode_or_key_lengths,
        limits.causal_only_square,
    ),
    "FlashAttention 3's decode over a key/value cache in float8 with scales",
    prepare=_prepare_scaled,
    accuracy_class="quantised",
    features=(*KNOWN, "key-lengths", "packed", "paged", "scaled"),
)
_attend_latent, _prepare_latent = on_bshd(_run_latent)
register_adapted(
    "fa3-mla",
    _CACHED,
    _attend_latent,
    (limits.head_dims(576), limits.decode_or_key_lengths, *limits.ABSORBED_MLA),
    "FlashAttention 3's decode with absorbed latent attention",
    prepare=_prepare_latent,
    features=("bottom-right", "key-lengths", "paged"),
    packed_decode=True,
)
