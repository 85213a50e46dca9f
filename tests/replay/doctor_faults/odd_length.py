"""Kernels that are wrong at lengths that are not multiples of their tiles."""

import math

import torch
from arguments import attend_in_float32, online_softmax, split_softmax, tiles, with_sdpa_arguments
from torch import Tensor
from torch.nn.functional import pad


def _up(length: int, size: int) -> int:
    return -(-length // size) * size


@with_sdpa_arguments
def padded_keys_counted(query, key, value, bias, scale) -> Tensor:
    """Keys and values are padded to tiles of 64 with zeros, whose scores of 0 are not masked."""
    more = _up(key.shape[2], 64) - key.shape[2]
    key, value = (pad(each, (0, 0, 0, more)) for each in (key, value))
    return attend_in_float32(query, key, value, pad(bias, (0, more)), scale)


@with_sdpa_arguments
def tail_keys_dropped(query, key, value, bias, scale) -> Tensor:
    """Online softmax over `keys // 64` tiles, which drops the last keys."""
    whole = max(key.shape[2] // 64 * 64, min(key.shape[2], 64))
    key, value, bias = key[:, :, :whole], value[:, :, :whole], bias[..., :whole]
    return online_softmax(query, key, value, bias, scale)


@with_sdpa_arguments
def tail_queries_dropped(query, key, value, bias, scale) -> Tensor:
    """The output is filled with zeros, and only whole tiles of 16 queries are computed."""
    output = query.new_zeros(*query.shape[:3], value.shape[3])
    rows = slice(query.shape[2] // 16 * 16 or query.shape[2])
    output[:, :, rows] = attend_in_float32(query[:, :, rows], key, value, bias[:, :, rows], scale)
    return output


@with_sdpa_arguments
def last_tile_moved_back(query, key, value, bias, scale) -> Tensor:
    """The last 64 keys are read in place of a shorter tile, so some keys count twice."""
    if key.shape[2] > 64:
        starts = range(0, key.shape[2], 64)
        places = [min(start, key.shape[2] - 64) + torch.arange(64) for start in starts]
        every = torch.cat(places)
        key, value, bias = key[:, :, every], value[:, :, every], bias[..., every]
    return attend_in_float32(query, key, value, bias, scale)


@with_sdpa_arguments
def bound_includes_one_more(query, key, value, bias, scale) -> Tensor:
    """Tests `offset <= length` instead of `<`, so one key of the zero padding is visible."""
    length = key.shape[2]
    more = _up(length, 128 if length > 64 else 64) - length
    key, value = (pad(each, (0, 0, 0, more)) for each in (key, value))
    bias = pad(bias, (0, more), value=-math.inf)
    if more:
        bias[..., length] = 0.0
    return attend_in_float32(query, key, value, bias, scale)


@with_sdpa_arguments
def equal_splits(query, key, value, bias, scale) -> Tensor:
    """Split-KV in four parts of `keys // 4`, which omits the remaining keys."""
    each = key.shape[2] // 4
    return split_softmax(query, key, value, bias, scale, tiles(4 * each, each))


@with_sdpa_arguments
def last_tile_of_queries_misplaced(query, key, value, bias, scale) -> Tensor:
    """The last tile is computed for the last 64 queries, but stored at the next tile boundary."""
    output = attend_in_float32(query, key, value, bias, scale)
    q_len, left = query.shape[2], query.shape[2] % 64
    if left and q_len > 64:
        output[:, :, -left:] = output[:, :, q_len - 64 : q_len - 64 + left].clone()
    return output


@with_sdpa_arguments
def last_key_repeated(query, key, value, bias, scale) -> Tensor:
    """Loads beyond the end are clamped to the last key, which then counts several times."""
    places = torch.arange(_up(key.shape[2], 16)).clamp_max(key.shape[2] - 1)
    key, value, bias = key[:, :, places], value[:, :, places], bias[..., places]
    return attend_in_float32(query, key, value, bias, scale)


@with_sdpa_arguments
def tail_mask_in_every_tile(query, key, value, bias, scale) -> Tensor:
    """The columns that the last tile lacks are masked in all tiles."""
    length = key.shape[2]
    left = length % 64 or 64
    bias = bias.clone()
    for keys in tiles(length, 64):
        bias[..., keys.start + left : keys.stop] = -math.inf
    return attend_in_float32(query, key, value, bias, scale)
