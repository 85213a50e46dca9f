"""Kernels that read or write another sequence of a batch or of a packed call."""

import torch
from arguments import attend, with_sdpa_signature
from torch import Tensor

from replay import register_kernel


def _packed(query, key, value, starts, starts_k, ends_k) -> Tensor:
    """Attend from each packed sequence's queries to keys from one number to before another."""
    parts = []
    for first, last, *keys in zip(starts[:-1], starts[1:], starts_k, ends_k, strict=True):
        inputs = query[:, :, first:last], *(each[:, :, slice(*keys)] for each in (key, value))
        parts.append(attend(*inputs, None, False, query.shape[3] ** -0.5))
    return torch.cat(parts, 2)


@register_kernel("planted-inclusive-end", features=("packed",), default=False)
def end_included(query, key, value, *, cu_seqlens_q=None, cu_seqlens_k=None):
    """Tests `key <= end`, so each sequence sees the first key of the next."""
    starts, ends = cu_seqlens_k[:-1], cu_seqlens_k[1:] + 1
    return _packed(query, key, value, cu_seqlens_q, starts, ends)


@register_kernel("planted-one-table", features=("packed",), default=False)
def keys_begin_where_queries_do(query, key, value, *, cu_seqlens_q=None, cu_seqlens_k=None):
    """Takes the right number of keys, but from the position at which the queries begin."""
    starts = cu_seqlens_q[:-1]
    return _packed(query, key, value, cu_seqlens_q, starts, starts + cu_seqlens_k.diff())


@with_sdpa_signature
def one_prompt_for_all(query, key, value, attn_mask, is_causal, scale) -> Tensor:
    """Cross-attention reads the first prompt for each sequence of the batch."""
    if query.shape[2] != key.shape[2]:
        key, value = key[:1].expand_as(key), value[:1].expand_as(value)
    return attend(query, key, value, attn_mask, is_causal, scale)


@with_sdpa_signature
def guidance_in_other_order(query, key, value, attn_mask, is_causal, scale) -> Tensor:
    """Computes both halves of guidance, and joins them in the other order."""
    output = attend(query, key, value, attn_mask, is_causal, scale)
    return output.flip(0) if query.shape[0] == 2 else output


@with_sdpa_signature
def unpadded_without_a_first_zero(query, key, value, attn_mask, is_causal, scale) -> Tensor:
    """Padding is removed, but the cumulated lengths lack the zero at the front."""
    if attn_mask is None:
        return attend(query, key, value, attn_mask, is_causal, scale)
    lengths = [int(row.sum()) for row in attn_mask[:, 0, 0]]
    parts = [torch.cat([t[i, :, :n] for i, n in enumerate(lengths)], 1) for t in (key, value)]
    output, start = torch.empty_like(query), 0
    for number, length in enumerate(lengths):
        start += length
        places = torch.arange(start, start + length) % sum(lengths)
        own = (part[None, :, places] for part in parts)
        output[number] = attend(query[number][None], *own, None, is_causal, scale)[0]
    return output
