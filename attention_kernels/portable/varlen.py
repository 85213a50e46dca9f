"""Attention over sequences of different lengths that does not read padding.

A padded batch is not copied: the kernel reads `k_lengths` keys from `k_starts` on. A packed batch
has its sequences concatenated, as in FlashAttention's `varlen` functions.
"""

from __future__ import annotations

import functools
from typing import Any, NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from attention_kernels.hopper.support import has_gluon_kernels
from attention_kernels.launch.launcher import Launch, named
from attention_kernels.launch.shape_checks import check_dimensions, check_shapes, vector
from attention_kernels.options import PLAIN, AttentionOptions, Lengths
from attention_kernels.portable.forward import forward


class KeyRanges(NamedTuple):
    """Valid keys of a padded batch."""

    starts: Tensor | None
    """(B,) int32, first valid key of each batch element; None for 0."""
    lengths: Tensor
    """(B,) int32, number of valid keys from the first on."""


def padded_prefill(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    keys: KeyRanges,
    is_causal: bool = False,
    *,
    scale: float | None = None,
    sinks: Tensor | None = None,
    options: AttentionOptions = PLAIN,
    return_lse: bool = False,
) -> Any:
    """Return `prefill` under a padding mask; padding tokens among the queries are computed too.

    Keys and values in the padding have no effect, even if they are NaN.

    Args:
        query, key, value: (B, Hq, Sq, D), (B, Hkv, Sk, D) and (B, Hkv, Sk, Dv) as for `prefill`.
        keys: valid keys, within [0, Sk]. This is not checked, because a check would wait for the
            GPU. A batch element without keys gets zeros.
        is_causal: aligned top left of the padded tensors, as in SDPA. With `bottom_right` in
            `options`, the diagonal key of the last query is the last valid key.
        scale, sinks, options, return_lse: as for `prefill`.

    Raises:
        ValueError: the shapes do not fit together, or a head dimension is larger than 256.
    """
    check_shapes(query.shape, key.shape, value.shape)
    batch, q_len = query.shape[0], query.shape[2]
    starts = vector("starts", keys.starts, batch)
    k_lengths = vector("lengths", keys.lengths, batch)
    lengths = Lengths("padded", batch, q_len, None, starts, k_lengths)
    output, lse = _attend(
        query, key, value, is_causal, scale, lengths, options, sinks, return_lse=return_lse
    )
    return output if lse is None else (output, lse)


def packed_prefill(
    query_THD: Tensor,
    key_THD: Tensor,
    value_THD: Tensor,
    q_offsets: Tensor,
    k_offsets: Tensor,
    longest_query: int,
    is_causal: bool = False,
    *,
    scale: float | None = None,
    seqused_k: Tensor | None = None,
    sinks: Tensor | None = None,
    options: AttentionOptions = PLAIN,
    return_lse: bool = False,
) -> Any:
    """Return attention within each sequence of a packed batch, (Tq, Hq, Dv).

    Args:
        query_THD, key_THD, value_THD: (Tq, Hq, D), (Tk, Hkv, D) and (Tk, Hkv, Dv).
        q_offsets, k_offsets: (B + 1,) int32, the start of each sequence and then the end of all;
            FlashAttention calls them `cu_seqlens`. The offsets are not checked, because a check
            would wait for the GPU.
        longest_query: number of queries of the longest sequence, or more. This is not checked: rows
            beyond `longest_query` are not written.
        is_causal: aligned top left of each sequence, or bottom right if `options` specifies it, as
            in FlashAttention.
        scale, sinks, options: as for `prefill`.
        seqused_k: (B,) int32, number of valid keys of each sequence, from its first; None for all.
        return_lse: return a tuple of the output and the log-sum-exp as in `prefill`, (Hq, Tq).

    Raises:
        ValueError: the shapes do not fit together, or a head dimension is larger than 256.
    """
    sizes = query_THD.shape, key_THD.shape, value_THD.shape
    check_dimensions("tokens, heads, head dimension", *sizes)
    query, key, value = (each.transpose(0, 1)[None] for each in (query_THD, key_THD, value_THD))
    batches = q_offsets.shape[0] - 1
    lengths = Lengths(
        "packed",
        batches,
        longest_query,
        vector("q_offsets", q_offsets, batches + 1),
        vector("k_offsets", k_offsets, batches + 1),
        vector("seqused_k", seqused_k, batches),
    )
    output, lse = _attend(
        query, key, value, is_causal, scale, lengths, options, sinks, return_lse=return_lse
    )
    output_THD = output[0].transpose(0, 1)
    return output_THD if lse is None else (output_THD, lse[0])


def _attend(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    is_causal: bool,
    scale: float | None,
    lengths: Lengths,
    options: AttentionOptions,
    sinks: Tensor | None,
    *,
    return_lse: bool,
) -> tuple[Tensor, Tensor | None]:
    """Run the Hopper kernel if it supports the call, else the portable kernel."""
    is_empty = 0 in (lengths.batches, lengths.longest_query)
    if has_gluon_kernels(query.device) and not is_empty:
        # Gluon is imported only if it may be used.
        from attention_kernels.hopper.hopper_prefill import forward_hopper, takes

        if takes(query, value, scale):
            return forward_hopper(
                query,
                key,
                value,
                is_causal,
                scale,
                lengths,
                return_lse,
                options=options,
                sinks=sinks,
            )
    return forward(
        query, key, value, None, is_causal, scale, lengths, return_lse, options=options, sinks=sinks
    )


BLOCK_KEYS = 1024


def key_ranges(keys: Tensor) -> KeyRanges:
    """Return the key ranges of a (B, Sk) bool tensor that is True for valid keys. The GPU computes
    them.

    The valid keys must be adjacent. This is not checked, because a check would wait for the GPU.
    """
    batch = keys.shape[0]
    ranges = keys.new_empty(2, batch, dtype=torch.int32)
    if batch:
        _planned(keys.shape, keys.stride(), keys.device)(keys.view(torch.uint8), ranges)
    starts, lengths = ranges.unbind()
    return KeyRanges(starts, lengths)


@functools.lru_cache(maxsize=1024)
def _planned(shape: tuple[int, int], strides: tuple[int, int], device: torch.device) -> Launch:
    batch, length = shape
    arguments: dict[str, int | None] = {"batches": batch, "length": length, "BLOCK": BLOCK_KEYS}
    arguments |= named("stride_", ("batch", "key"), strides)
    return Launch(_key_ranges, (batch, 1, 1), device, arguments)


@triton.jit
def _key_ranges(keys, ranges, batches, length, stride_batch, stride_key, BLOCK: tl.constexpr):
    """Store the first key and the number of keys of one batch element."""
    batch = tl.program_id(0)
    keys += batch.to(tl.int64) * stride_batch
    first = tl.full([BLOCK], 2147483647, tl.int32)
    count = tl.zeros([BLOCK], tl.int32)
    for start in range(0, length, BLOCK):
        places = start + tl.arange(0, BLOCK)
        counts = tl.load(keys + places.to(tl.int64) * stride_key, mask=places < length, other=0)
        first = tl.where(counts != 0, tl.minimum(first, places), first)
        count += (counts != 0).to(tl.int32)
    total = tl.sum(count, 0)
    tl.store(ranges + batch, tl.where(total > 0, tl.min(first, 0), 0))
    tl.store(ranges + batches + batch, total)
