"""Kernels that are wrong if several query heads share a key head."""

import math

import torch
from arguments import attend, attend_in_float32, bias_of, with_sdpa_signature
from torch import Tensor


def _group(query: Tensor, key: Tensor) -> int:
    return query.shape[1] // key.shape[1]


@with_sdpa_signature
def head_modulo(query, key, value, attn_mask, is_causal, scale) -> Tensor:
    """Repeats the key heads as a whole, so neighbouring query heads have different key heads."""
    key, value = (each.repeat(1, _group(query, key), 1, 1) for each in (key, value))
    return attend(query, key, value, attn_mask, is_causal, scale)


@with_sdpa_signature
def group_of_a_power_of_two(query, key, value, attn_mask, is_causal, scale) -> Tensor:
    """Divides the head's number by the group's size, rounded up to a power of two."""
    size = 1 << (_group(query, key) - 1).bit_length()
    heads = torch.arange(query.shape[1]) // size
    return attend(query, key[:, heads], value[:, heads], attn_mask, is_causal, scale)


@with_sdpa_signature
def values_repeated_as_a_whole(query, key, value, attn_mask, is_causal, scale) -> Tensor:
    """Repeats keys with `repeat_interleave` and values with `repeat`."""
    group = _group(query, key)
    key, value = key.repeat_interleave(group, 1), value.repeat(1, group, 1, 1)
    return attend(query, key, value, attn_mask, is_causal, scale)


@with_sdpa_signature
def rows_unfolded_in_other_order(query, key, value, attn_mask, is_causal, scale) -> Tensor:
    """Folds a group's heads into rows, (head, token), and unfolds them as (token, head)."""
    batch, heads, length, width = query.shape
    group = _group(query, key)
    folded = query.reshape(batch, heads // group, group * length, width)
    bias = bias_of(query, key, attn_mask, is_causal).repeat(1, 1, group, 1)
    output = attend_in_float32(folded, key, value, bias, scale)
    output = output.reshape(batch, heads // group, length, group, -1).transpose(2, 3)
    return output.reshape(batch, heads, length, -1)


@with_sdpa_signature
def folded_row_taken_for_position(query, key, value, attn_mask, is_causal, scale) -> Tensor:
    """Folds a group's heads into rows, and compares the row's number with the key's."""
    group = _group(query, key)
    if not is_causal or group == 1:
        return attend(query, key, value, attn_mask, is_causal, scale)
    heads, rows = torch.arange(query.shape[1]) % group, torch.arange(query.shape[2]) * group
    sees = torch.arange(key.shape[2]) <= (heads[:, None] + rows)[..., None]
    bias = torch.zeros(sees.shape).masked_fill(~sees, -math.inf)
    return attend(query, key, value, bias, False, scale)
