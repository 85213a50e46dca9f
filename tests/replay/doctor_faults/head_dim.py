"""Kernels that are right for some numbers of channels only."""

import torch
from arguments import attend, with_sdpa_signature
from torch import Tensor
from torch.nn.functional import pad


@with_sdpa_signature
def scale_of_the_padding(query, key, value, attn_mask, is_causal, scale) -> Tensor:
    """Pads up to 64 or 128 channels, and scales by the padded number."""
    width = query.shape[3]
    more = (64 if width <= 64 else 128) - width
    if more > 0:
        query, key, scale = pad(query, (0, more)), pad(key, (0, more)), (width + more) ** -0.5
    return attend(query, key, value, attn_mask, is_causal, scale)


@with_sdpa_signature
def scores_of_128_channels(query, key, value, attn_mask, is_causal, scale) -> Tensor:
    """The tile of the scores has room for 128 channels; further channels are not added."""
    return attend(query[..., :128], key[..., :128], value, attn_mask, is_causal, scale)


@with_sdpa_signature
def next_row_in_the_padding(query, key, value, attn_mask, is_causal, scale) -> Tensor:
    """Tiles have a multiple of 16 channels, and the last loads run into the next token's."""
    more = -query.shape[3] % 16
    query, key = (torch.cat((each, each.roll(-1, 2)[..., :more]), 3) for each in (query, key))
    return attend(query, key, value, attn_mask, is_causal, scale)


@with_sdpa_signature
def whole_blocks_of_columns(query, key, value, attn_mask, is_causal, scale) -> Tensor:
    """Above 64 columns, only whole blocks of 64 are stored in an output of zeros."""
    output = attend(query, key, value, attn_mask, is_causal, scale)
    if value.shape[3] > 64:
        output[..., value.shape[3] // 64 * 64 :] = 0.0
    return output


@with_sdpa_signature
def channels_in_eights(query, key, value, attn_mask, is_causal, scale) -> Tensor:
    """Vectors of eight channels are multiplied, and the remaining channels are left out."""
    whole = query.shape[3] // 8 * 8
    return attend(query[..., :whole], key[..., :whole], value, attn_mask, is_causal, scale)
