"""Kernels that return unwritten memory, in all or part of the output."""

import torch
from arguments import (
    attend,
    attend_in_float32,
    tiles,
    with_sdpa_arguments,
    with_sdpa_signature,
)
from torch import Tensor


def _empty(query: Tensor, value: Tensor) -> Tensor:
    return query.new_empty(*query.shape[:3], value.shape[3])


def _rows(query, key, value, bias, scale, rows: slice) -> Tensor:
    """Compute attention for a slice of the queries."""
    return attend_in_float32(query[:, :, rows], key, value, bias[:, :, rows], scale)


@with_sdpa_arguments
def heads_in_fours(query, key, value, bias, scale) -> Tensor:
    """A program computes four heads, and `heads // 4` programs are launched."""
    output, done = _empty(query, value), query.shape[1] // 4 * 4
    found = attend_in_float32(query, key, value, bias, scale)
    output[:, :done] = found[:, :done]
    return output


@with_sdpa_arguments
def batches_in_twos(query, key, value, bias, scale) -> Tensor:
    """The grid has two batches, for conditional and unconditional inputs."""
    output = _empty(query, value)
    output[:2] = attend_in_float32(query, key, value, bias, scale)[:2]
    return output


@with_sdpa_signature
def first_head_of_a_group(query, key, value, attn_mask, is_causal, scale) -> Tensor:
    """A program per key head writes only one of the query heads that share it."""
    group = query.shape[1] // key.shape[1]
    output = _empty(query, value)
    output[:, ::group] = attend(query, key, value, attn_mask, is_causal, scale)[:, ::group]
    return output


@with_sdpa_arguments
def as_wide_as_the_query(query, key, value, bias, scale) -> Tensor:
    """Stores as many columns as the query has, though values are wider."""
    output, width = _empty(query, value), min(query.shape[3], value.shape[3])
    output[..., :width] = attend_in_float32(query, key, value, bias, scale)[..., :width]
    return output


@with_sdpa_arguments
def tiles_beyond_the_grid(query, key, value, bias, scale) -> Tensor:
    """Two persistent programs of 64 queries that never fetch a second tile."""
    output = _empty(query, value)
    for rows in tiles(min(query.shape[2], 128), 64):
        output[:, :, rows] = _rows(query, key, value, bias, scale, rows)
    return output


@with_sdpa_arguments
def written_to_a_copy(query, key, value, bias, scale) -> Tensor:
    """`reshape` of a transposed tensor is a view for one batch, and a copy for two."""
    batch, heads, q_len, _ = query.shape
    output = query.new_empty(batch, q_len, heads, value.shape[3]).transpose(1, 2)
    flat = output.reshape(batch * heads, q_len, value.shape[3])
    flat.copy_(attend_in_float32(query, key, value, bias, scale).flatten(0, 1))
    return output


@with_sdpa_arguments
def tiles_taken_for_padding(query, key, value, bias, scale) -> Tensor:
    """Tiles of queries that see none of the first 32 keys return before they store anything."""
    output = _empty(query, value)
    for rows in tiles(query.shape[2], 32):
        if bool((bias[:, :, rows, :32] == -torch.inf).all()):
            continue
        output[:, :, rows] = _rows(query, key, value, bias, scale, rows)
    return output


@with_sdpa_arguments
def as_many_rows_as_keys(query, key, value, bias, scale) -> Tensor:
    """The number of tiles of queries is computed from the number of keys."""
    output = _empty(query, value)
    for rows in tiles(min(query.shape[2], key.shape[2]), 64):
        output[:, :, rows] = _rows(query, key, value, bias, scale, rows)
    return output
