"""Kernels that return unwritten memory, in all or part of the output."""

import functools
from collections.abc import Callable
from typing import Any

import torch
from arguments import (
    attend,
    attend_in_float32,
    bias_of,
    tiles,
    with_sdpa_arguments,
    with_sdpa_signature,
)
from torch import Tensor


def writes(part: Callable[[Tensor, Tensor, Tensor, Tensor], Any]):
    """Give a function SDPA's signature that returns the index of the part to write.

    The function gets query, key, value and bias.
    """

    @with_sdpa_signature
    @functools.wraps(part)
    def attention(query, key, value, attn_mask, is_causal, scale) -> Tensor:
        output = query.new_empty(*query.shape[:3], value.shape[3])
        written = part(query, key, value, bias_of(query, key, attn_mask, is_causal))
        output[written] = attend(query, key, value, attn_mask, is_causal, scale)[written]
        return output

    return attention


@writes
def heads_in_fours(query, key, value, bias) -> Any:
    """A program computes four heads, and `heads // 4` programs are launched."""
    return slice(None), slice(query.shape[1] // 4 * 4)


@writes
def batches_in_twos(query, key, value, bias) -> Any:
    """The grid has two batches, for conditional and unconditional inputs."""
    return slice(2)


@writes
def first_head_of_a_group(query, key, value, bias) -> Any:
    """A program per key head writes only one of the query heads that share it."""
    return slice(None), slice(None, None, query.shape[1] // key.shape[1])


@writes
def as_wide_as_the_query(query, key, value, bias) -> Any:
    """Stores as many columns as the query has, though values are wider."""
    return ..., slice(query.shape[3])


@writes
def tiles_beyond_the_grid(query, key, value, bias) -> Any:
    """Two persistent programs of 64 queries that never fetch a second tile."""
    return ..., slice(2 * 64), slice(None)


@writes
def tiles_taken_for_padding(query, key, value, bias) -> Any:
    """Tiles of queries that see none of the first 32 keys return before they store anything."""
    rows = tiles(query.shape[2], 32)
    seeing = [each for each in rows if bool((bias[:, :, each, :32] > -torch.inf).any())]
    return ..., torch.cat([torch.arange(query.shape[2])[each] for each in seeing]), slice(None)


@writes
def as_many_rows_as_keys(query, key, value, bias) -> Any:
    """The number of tiles of queries is computed from the number of keys."""
    return ..., slice(key.shape[2]), slice(None)


@with_sdpa_arguments
def written_to_a_copy(query, key, value, bias, scale) -> Tensor:
    """`reshape` of a transposed tensor is a view for one batch, and a copy for two."""
    batch, heads, q_len, _ = query.shape
    output = query.new_empty(batch, q_len, heads, value.shape[3]).transpose(1, 2)
    flat = output.reshape(batch * heads, q_len, value.shape[3])
    flat.copy_(attend_in_float32(query, key, value, bias, scale).flatten(0, 1))
    return output
