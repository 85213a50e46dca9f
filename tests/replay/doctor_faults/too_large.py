"""Kernels that are wrong beyond a number of sequences, keys or queries."""

import math

import torch
from arguments import attend_in_float32, with_sdpa_arguments
from torch import Tensor


@with_sdpa_arguments
def grid_of_65535(query, key, value, bias, scale) -> Tensor:
    """Launches at most 65,535 programs, one for each head of each sequence."""
    output = attend_in_float32(query, key, value, bias, scale)
    output.flatten(0, 1)[65_535:] = 0.0
    return output


@with_sdpa_arguments
def key_numbers_in_16_bits(query, key, value, bias, scale) -> Tensor:
    """Numbers of keys have 16 bits, so the 65,537th key is the first again."""
    places = torch.arange(key.shape[2]) % 65_536
    return attend_in_float32(query, key[:, :, places], value[:, :, places], bias, scale)


@with_sdpa_arguments
def scales_of_64_blocks(query, key, value, bias, scale) -> Tensor:
    """Values are stored relative to their block's maximum, in a table of 64 blocks of 64 keys."""
    maxima = value.float().abs().amax(-1, keepdim=True)
    restored = maxima.clone()
    restored[:, :, 64 * 64 :] = 1.0
    return attend_in_float32(query, key, value / maxima * restored, bias, scale)


@with_sdpa_arguments
def one_block_of_1024(query, key, value, bias, scale) -> Tensor:
    """A block of 1,024 threads computes a row of scores, one key for each thread."""
    keys = slice(1024)
    return attend_in_float32(query, key[:, :, keys], value[:, :, keys], bias[..., keys], scale)


@with_sdpa_arguments
def mask_buffer_of_512(query, key, value, bias, scale) -> Tensor:
    """The causal mask is a buffer of 512 positions, whose last row serves all later queries."""
    bias = bias.clone()
    if bool(bias.isinf().any()):
        bias[..., 512:, 512:] = -math.inf
    return attend_in_float32(query, key, value, bias, scale)
