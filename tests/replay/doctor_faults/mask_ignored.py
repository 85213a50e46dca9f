"""Kernels that attend to masked keys."""

import functools
import math
from collections.abc import Callable

import torch
from arguments import attend, attend_in_float32, bias_of, for_each_head, with_sdpa_signature
from torch import Tensor


def drops_mask(is_dropped: Callable[[Tensor, Tensor, Tensor], bool]):
    """Give a condition on (query, key, mask) SDPA's signature: attention without such masks."""

    @with_sdpa_signature
    @functools.wraps(is_dropped)
    def attention(query, key, value, attn_mask, is_causal, scale) -> Tensor:
        if attn_mask is not None and is_dropped(query, key, attn_mask):
            attn_mask = None
        return attend(query, key, value, attn_mask, is_causal, scale)

    return attention


@drops_mask
def never_passed_on(query, key, mask) -> bool:
    """A wrapper accepts a mask, although its kernel does not support masks."""
    return True


@with_sdpa_signature
def result_discarded(query, key, value, attn_mask, is_causal, scale) -> Tensor:
    """Calls `masked_fill` instead of `masked_fill_`, and discards the result."""
    bias = bias_of(query, key, None, is_causal)
    key, value = for_each_head(query, key, value)
    scores = query.float() @ key.float().mT * scale + bias
    if attn_mask is not None and attn_mask.dtype == torch.bool:
        scores.masked_fill(~attn_mask, -math.inf)
    elif attn_mask is not None:
        scores += attn_mask
    return (scores.softmax(-1) @ value.float()).to(query.dtype)


@drops_mask
def only_of_booleans(query, key, mask) -> bool:
    """A float mask takes the branch for calls without a mask."""
    return mask.dtype != torch.bool


@drops_mask
def only_of_full_shape(query, key, mask) -> bool:
    """The kernel requires (B, H, Sq, Sk); the wrapper drops masks of other shapes."""
    return mask.shape != (*query.shape[:3], key.shape[2])


@drops_mask
def by_its_first_row(query, key, mask) -> bool:
    """Takes the fast path for masks that mask no key, but inspects only one row."""
    return mask.dtype == torch.bool and bool(mask[0, 0, 0].all())


@drops_mask
def not_of_cross_attention(query, key, mask) -> bool:
    """Applies masks only in self-attention, where Sq = Sk."""
    return query.shape[2] != key.shape[2]


@drops_mask
def not_of_long_sequences(query, key, mask) -> bool:
    """With more than 128 keys, a fused kernel runs without the mask."""
    return key.shape[2] > 128


@with_sdpa_signature
def not_of_grouped_heads(query, key, value, attn_mask, is_causal, scale) -> Tensor:
    """The path for grouped heads folds groups into the queries, and loses the mask."""
    if query.shape[1] == key.shape[1]:
        return attend(query, key, value, attn_mask, is_causal, scale)
    batch, heads, q_len, width = query.shape
    group = heads // key.shape[1]
    folded = query.reshape(batch, key.shape[1], group * q_len, width)
    bias = bias_of(query, key, None, is_causal).repeat(1, 1, group, 1)
    output = attend_in_float32(folded, key, value, bias, scale)
    return output.reshape(batch, heads, q_len, value.shape[3])
