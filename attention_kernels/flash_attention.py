"""FlashAttention's functions, with the names, order of arguments and layouts of version 2.8.

FlashAttention 3's `page_table` and `seqused_k`, FlashAttention 4's `learnable_sink` and `out` are
taken by keyword. Causal masks and windows are aligned bottom right: with Sq queries and Sk keys,
the diagonal key of query i is key i + Sk - Sq. A query that sees no key gets zeros and a
log-sum-exp of -inf (FlashAttention 2 gives +inf).

`flash_attn_func` and `flash_attn_varlen_func` are differentiable, except over pages. With
`deterministic`, gradients have the same bits in every run. The log-sum-exp has a gradient too.

Arguments that only affect speed have no effect. Calls are checked before anything runs, from
shapes and types alone: the values of lengths, offsets and page tables are not read, because that
would wait for the GPU.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from attention_kernels.decode.cache_update import append_to_cache
from attention_kernels.flash_arguments import (
    batch_of,
    check_features,
    check_new,
    check_room,
    check_sizes,
    descales_of,
    either,
    longest_of,
    placed,
    window,
)
from attention_kernels.flash_operators import (
    append,
    attend_packed,
    attend_to_kv_cache,
    check_cache_call,
    kvcache,
    varlen,
)
from attention_kernels.gradients import check_gradients, needs_gradients, refuse_gradients
from attention_kernels.launch.shape_checks import check_integers
from attention_kernels.operators import attention, is_traced
from attention_kernels.options import AttentionOptions


def flash_attn_func(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    dropout_p: float = 0.0,
    softmax_scale: float | None = None,
    causal: bool = False,
    window_size: Sequence[int | None] = (-1, -1),
    softcap: float = 0.0,
    alibi_slopes: Tensor | None = None,
    deterministic: bool = False,
    return_attn_probs: bool = False,
    *,
    learnable_sink: Tensor | None = None,
    s_aux: Tensor | None = None,
    out: Tensor | None = None,
    **other: Any,
) -> Any:
    """Return attention of a batch, (B, Sq, Hq, Dv).

    Args:
        q: (B, Sq, Hq, D) in float16, bfloat16 or float32, any strides.
        k, v: (B, Sk, Hkv, D) and (B, Sk, Hkv, Dv), Hkv a divisor of Hq.
        softmax_scale: factor of the scores; None for 1/√D.
        causal: mask the keys after the bottom-right diagonal.
        window_size: numbers of visible keys before and after the diagonal; -1 for all.
        softcap: replace each score by `softcap · tanh(score / softcap)`; 0 for none.
        deterministic: compute gradients with the same bits in every run.
        return_attn_probs: return a tuple of the output, the log-sum-exp (B, Hq, Sq) in float32,
            sinks included, and None in place of FlashAttention's dropout mask.
        learnable_sink: (Hq,), one extra logit per head, which takes softmax weight but has no
            value. vLLM calls it `s_aux`.
        out: (B, Sq, Hq, Dv), to which the output is copied; it is then returned.
        other: arguments of FlashAttention that have no effect here, or no value.

    Raises:
        NotImplementedError: an argument needs a feature that these kernels lack (`NOT_COMPUTED`),
            or no kernel supports the device, type or head dimension, or computes the gradients
            that are needed.
        ValueError: the arguments do not fit together.
        TypeError: an argument has another type, or FlashAttention has no such argument.
    """
    check_features(dropout_p=dropout_p, alibi_slopes=alibi_slopes, **other)
    sinks = either(learnable_sink=learnable_sink, s_aux=s_aux)
    options = AttentionOptions(
        True, window(window_size), softcap or None, deterministic=deterministic
    )
    check_sizes(q, k, v, (4, 4), sinks, out)
    result = attention(
        q.transpose(1, 2),
        k.transpose(1, 2),
        v.transpose(1, 2),
        is_causal=causal,
        scale=softmax_scale,
        enable_gqa=True,
        sinks=sinks,
        options=options,
        return_lse=return_attn_probs,
    )
    output, lse = result if return_attn_probs else (result, None)
    output = placed(output.transpose(1, 2).contiguous(), out)
    return (output, lse, None) if return_attn_probs else output


def flash_attn_varlen_func(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    cu_seqlens_q: Tensor,
    cu_seqlens_k: Tensor | None = None,
    max_seqlen_q: int | None = None,
    max_seqlen_k: int | None = None,
    dropout_p: float = 0.0,
    softmax_scale: float | None = None,
    causal: bool = False,
    window_size: Sequence[int | None] = (-1, -1),
    softcap: float = 0.0,
    alibi_slopes: Tensor | None = None,
    deterministic: bool = False,
    return_attn_probs: bool = False,
    block_table: Tensor | None = None,
    *,
    page_table: Tensor | None = None,
    seqused_k: Tensor | None = None,
    k_descale: Tensor | None = None,
    v_descale: Tensor | None = None,
    learnable_sink: Tensor | None = None,
    s_aux: Tensor | None = None,
    out: Tensor | None = None,
    **other: Any,
) -> Any:
    """Return attention within each sequence of a packed batch, (Tq, Hq, Dv).

    Pages are read in place, for any mixture of long and short sequences (`paged_batch`), with two
    exceptions on a Hopper GPU: equally long prefills first copy their pages to contiguous memory,
    at most 2 GiB, and long prefills over FP8 pages convert them to bfloat16, at most 512 MiB.

    Args:
        q: (Tq, Hq, D), the queries of all sequences, without padding.
        k, v: (Tk, Hkv, D) and (Tk, Hkv, Dv), or pages (P, page_size, Hkv, D) and
            (P, page_size, Hkv, Dv) with a `block_table`.
        cu_seqlens_q, cu_seqlens_k: (B + 1,) int32, start of each sequence and the end of all.
            `cu_seqlens_k` may be None with pages and `seqused_k`.
        max_seqlen_q: number of queries of the longest sequence, or more; None for Tq, which starts
            more programs. The output of further queries of a sequence is undefined.
        max_seqlen_k: number of keys of the longest sequence, or more; None for N · page_size, or,
            without pages, for Tk, which starts more programs of the backward pass. Further keys of
            a sequence may have gradients of zero.
        block_table: (B, N) int32, pages of each sequence. FlashAttention 3 calls it `page_table`.
        seqused_k: (B,) int32, number of valid keys of each sequence; None for all.
        k_descale, v_descale: float32, by which keys and values in pages of float8_e4m3fn or
            float8_e5m2 are multiplied; they broadcast to (B, Hkv). They have no effect in 16 bits.
        return_attn_probs: as for `flash_attn_func`, with a log-sum-exp (Hq, Tq).
        out: (Tq, Hq, Dv), to which the output is copied; it is then returned.

    The other arguments and the errors are those of `flash_attn_func`.
    """
    check_features(dropout_p=dropout_p, alibi_slopes=alibi_slopes, **other)
    sinks = either(learnable_sink=learnable_sink, s_aux=s_aux)
    options = AttentionOptions(True, window(window_size), softcap or None)
    table = either(block_table=block_table, page_table=page_table)
    check_sizes(q, k, v, (3, 3 if table is None else 4), sinks, out)
    batch = batch_of(cu_seqlens_q)
    check_integers("cu_seqlens_q", cu_seqlens_q, (batch + 1,), q.device)
    check_integers("cu_seqlens_k", cu_seqlens_k, (batch + 1,), q.device)
    check_integers("seqused_k", seqused_k, (batch,), q.device)
    longest = longest_of(q, max_seqlen_q)
    more = (softmax_scale, causal, *options.window, options.softcap, sinks)
    descales = descales_of(k, k_descale, v_descale)
    if table is not None:
        refuse_gradients(q, k, v, sinks)
        check_integers("block_table", table, (batch, table.shape[-1]), q.device)
        if seqused_k is None and cu_seqlens_k is not None:
            seqused_k = cu_seqlens_k.diff()
    attend: Any
    if table is not None and seqused_k is not None:
        attend = kvcache if is_traced(q) else attend_to_kv_cache
        output, lse = attend(
            q, k, v, seqused_k, table, cu_seqlens_q, longest, max_seqlen_k, *more, *descales
        )
    elif table is None and cu_seqlens_k is not None:
        if torch.is_autocast_enabled(q.device.type):
            q, k, v = (each.to(torch.get_autocast_dtype(q.device.type)) for each in (q, k, v))
        is_differentiated = needs_gradients(q, k, v, sinks)
        if is_differentiated:
            check_gradients(q, v, None)
        attend = varlen if is_differentiated or is_traced(q) else attend_packed
        longest_key = None
        if is_differentiated and max_seqlen_k is not None:
            longest_key = int(max_seqlen_k)
        output, lse = attend(
            q,
            k,
            v,
            cu_seqlens_q,
            cu_seqlens_k,
            longest,
            seqused_k,
            *more,
            longest_key,
            deterministic,
        )
    else:
        raise ValueError("cu_seqlens_k is None: needed except with pages and seqused_k")
    output = placed(output, out)
    return (output, lse, None) if return_attn_probs else output


def flash_attn_with_kvcache(
    q: Tensor,
    k_cache: Tensor,
    v_cache: Tensor,
    k: Tensor | None = None,
    v: Tensor | None = None,
    rotary_cos: Tensor | None = None,
    rotary_sin: Tensor | None = None,
    cache_seqlens: int | Tensor | None = None,
    cache_batch_idx: Tensor | None = None,
    cache_leftpad: Tensor | None = None,
    block_table: Tensor | None = None,
    softmax_scale: float | None = None,
    causal: bool = False,
    window_size: Sequence[int | None] = (-1, -1),
    softcap: float = 0.0,
    rotary_interleaved: bool = True,
    alibi_slopes: Tensor | None = None,
    num_splits: int = 0,
    return_softmax_lse: bool = False,
    *,
    page_table: Tensor | None = None,
    cu_seqlens_q: Tensor | None = None,
    cu_seqlens_k_new: Tensor | None = None,
    max_seqlen_q: int | None = None,
    k_descale: Tensor | None = None,
    v_descale: Tensor | None = None,
    learnable_sink: Tensor | None = None,
    s_aux: Tensor | None = None,
    out: Tensor | None = None,
    **other: Any,
) -> Any:
    """Append new keys and values to a cache, and return attention to it, (B, Sq, Hq, Dv).

    The cache is read in place, except where `flash_attn_varlen_func` copies or converts pages; a
    row that `cache_batch_idx` chooses is a page. Packed queries copy a contiguous cache whose
    sequences are not adjacent in memory.

    Args:
        q: (B, Sq, Hq, D), or packed, (Tq, Hq, D), with `cu_seqlens_q`.
        k_cache, v_cache: (B, S, Hkv, D) and (B, S, Hkv, Dv), or pages (P, page_size, Hkv, D) and
            (P, page_size, Hkv, Dv), with any strides. D and Dv are at most 256, or, for 16 queries
            or fewer, 640 and 512 if `v_cache` is the view `k_cache[..., :Dv]` (absorbed MLA).
        k, v: (B, Snew, Hkv, D) and (B, Snew, Hkv, Dv), or packed with `cu_seqlens_k_new`. They are
            written to the cache, which must have room for them, after its last tokens.
        cache_seqlens: number of tokens of each sequence before new ones are appended, (B,) int32 or
            one number for all; None for a full cache.
        cache_batch_idx: (B,) int32, rows of the cache, or of the block table; None for all rows in
            order.
        block_table: (B, N) int32, pages of each sequence. FlashAttention 3 calls it `page_table`.
        cu_seqlens_q, cu_seqlens_k_new: (B + 1,) int32, start of each sequence's queries or new
            tokens, and the end of all.
        max_seqlen_q: number of queries of the longest packed sequence, or more; None for Tq.
        k_descale, v_descale: float32, by which keys and values of an FP8 cache are
            multiplied, as for `flash_attn_varlen_func`. New keys and values must be in FP8 too.
        return_softmax_lse: return a tuple of the output and the log-sum-exp in float32, (B, Hq, Sq)
            or (Hq, Tq).
        out: to which the output is copied; it is then returned.

    The other arguments and the errors are those of `flash_attn_func`.
    """
    check_features(
        alibi_slopes=alibi_slopes,
        rotary_cos=rotary_cos,
        rotary_sin=rotary_sin,
        cache_leftpad=cache_leftpad,
        **other,
    )
    sinks = either(learnable_sink=learnable_sink, s_aux=s_aux)
    options = AttentionOptions(True, window(window_size), softcap or None)
    table = either(block_table=block_table, page_table=page_table)
    check_sizes(q, k_cache, v_cache, (4 if cu_seqlens_q is None else 3, 4), sinks, out)
    refuse_gradients(q, k_cache, v_cache, sinks)
    batch = q.shape[0] if cu_seqlens_q is None else batch_of(cu_seqlens_q)
    check_integers("cu_seqlens_q", cu_seqlens_q, (batch + 1,), q.device)
    check_integers("cache_batch_idx", cache_batch_idx, (batch,), q.device)
    if table is not None:
        rows = batch if cache_batch_idx is None else table.shape[0]
        check_integers("block_table", table, (rows, table.shape[-1]), q.device)
    elif cache_batch_idx is None and k_cache.shape[0] != batch:
        raise ValueError(f"a cache of {k_cache.shape[0]} sequences, queries of {batch}")
    if cache_batch_idx is not None:
        # A row of a contiguous cache is read as one page.
        table = cache_batch_idx[:, None] if table is None else table[cache_batch_idx]
    if cache_seqlens is None:
        if k is not None:
            raise ValueError("cache_seqlens is None: needed with k and v")
        cache_seqlens = k_cache.shape[1] * (1 if table is None else table.shape[1])
    tokens = cache_seqlens
    if isinstance(cache_seqlens, int | torch.SymInt):
        check_room(cache_seqlens, 0, k_cache, table)
        cache_seqlens = torch.full((batch,), cache_seqlens, dtype=torch.int32, device=q.device)
    check_integers("cache_seqlens", cache_seqlens, (batch,), q.device)
    longest = q.shape[1] if cu_seqlens_q is None else longest_of(q, max_seqlen_q)
    traced = is_traced(q)
    descales = descales_of(k_cache, k_descale, v_descale)
    if k is not None or v is not None:
        k, v = check_new(k, v, k_cache, v_cache, batch, cu_seqlens_k_new)
        refuse_gradients(k, v)
        if not traced:
            check_cache_call(q, k_cache, v_cache, batch, longest, table is not None, descales)
        check_room(tokens, 0 if cu_seqlens_k_new is not None else k.shape[1], k_cache, table)
        (append if traced else append_to_cache)(
            k_cache, v_cache, k, v, cache_seqlens, table, cu_seqlens_k_new
        )
        new = k.shape[1] if cu_seqlens_k_new is None else cu_seqlens_k_new.diff()
        cache_seqlens = cache_seqlens + new
    place = (k_cache, v_cache, cache_seqlens, table, cu_seqlens_q, longest, None)
    more = (softmax_scale, causal, *options.window, options.softcap, sinks)
    output, lse = (kvcache if traced else attend_to_kv_cache)(q, *place, *more, *descales)
    output = placed(output, out)
    return (output, lse) if return_softmax_lse else output
