"""Kernels that apply a mask, but not as SDPA defines it."""

import functools
import math
from collections.abc import Callable

import torch
from arguments import (
    attend,
    attend_in_float32,
    for_each_head,
    online_softmax,
    tiles,
    with_sdpa_signature,
)
from torch import Tensor


def with_own_mask(misread: Callable[..., Tensor]):
    """Give a function of (query, key, value, mask, scale) SDPA's signature.

    The function handles only calls with a mask; other calls are computed correctly.
    """

    @with_sdpa_signature
    @functools.wraps(misread)
    def attention(query, key, value, attn_mask, is_causal, scale) -> Tensor:
        if attn_mask is None:
            return attend(query, key, value, None, is_causal, scale)
        return misread(query, *for_each_head(query, key, value), attn_mask, scale)

    return attention


def _as_bias(mask: Tensor) -> Tensor:
    """Return the float32 bias that SDPA adds for a mask."""
    if mask.dtype != torch.bool:
        return mask.float()
    return torch.zeros(mask.shape).masked_fill(~mask, -math.inf)


@with_own_mask
def inverted(query, key, value, mask, scale) -> Tensor:
    """True means "masked", as in `nn.MultiheadAttention`."""
    bias = _as_bias(~mask if mask.dtype == torch.bool else mask)
    return attend_in_float32(query, key, value, bias, scale)


@with_own_mask
def boolean_added(query, key, value, mask, scale) -> Tensor:
    """A bool mask is converted to numbers and added: 1 for visible keys, 0 for masked keys."""
    return attend_in_float32(query, key, value, mask.float(), scale)


@with_own_mask
def bias_as_boolean(query, key, value, mask, scale) -> Tensor:
    """Converts an additive mask with `.bool()`, which gives True for -inf."""
    return attend_in_float32(query, key, value, _as_bias(mask.bool()), scale)


@with_own_mask
def transposed(query, key, value, mask, scale) -> Tensor:
    """Mask rows are read as keys; only a square, asymmetric mask reveals the fault."""
    if mask.shape[-1] == mask.shape[-2]:
        mask = mask.mT
    return attend_in_float32(query, key, value, _as_bias(mask), scale)


@with_own_mask
def padding_of_queries(query, key, value, mask, scale) -> Tensor:
    """A padding mask (B, 1, 1, Sk) is broadcast along the keys: it masks queries."""
    if mask.shape[-2] == 1 and query.shape[2] == key.shape[2]:
        mask = mask.mT.expand(*mask.shape[:2], query.shape[2], key.shape[2])
    bias = _as_bias(mask).clamp_min(torch.finfo(torch.float32).min)
    return attend_in_float32(query, key, value, bias, scale)


@with_own_mask
def shifted_by_one(query, key, value, mask, scale) -> Tensor:
    """The mask's column j is read for key j + 1, since a class token was once prepended."""
    return attend_in_float32(query, key, value, _as_bias(mask.roll(1, -1)), scale)


@with_own_mask
def first_of_batch(query, key, value, mask, scale) -> Tensor:
    """The mask's batch stride is assumed to be 0."""
    return attend_in_float32(query, key, value, _as_bias(mask[:1]), scale)


@with_own_mask
def first_of_heads(query, key, value, mask, scale) -> Tensor:
    """The mask's head stride is assumed to be 0."""
    return attend_in_float32(query, key, value, _as_bias(mask[:, :1]), scale)


@with_own_mask
def scaled_too(query, key, value, mask, scale) -> Tensor:
    """The bias is scaled with the scores: (QKᵀ + bias) · scale."""
    scores = (query.float() @ key.float().mT + _as_bias(mask)) * scale
    return (scores.softmax(-1) @ value.float()).to(query.dtype)


@with_own_mask
def in_base_two(query, key, value, mask, scale) -> Tensor:
    """Scores are multiplied by log₂e for `exp2`, but the bias is not."""
    scores = query.float() @ key.float().mT * (scale * math.log2(math.e)) + _as_bias(mask)
    weights = torch.exp2(scores - scores.amax(-1, keepdim=True))
    return (weights @ value.float() / weights.sum(-1, keepdim=True)).to(query.dtype)


@with_own_mask
def not_quite_masked(query, key, value, mask, scale) -> Tensor:
    """-20 is added to masked scores before scaling; at 1/√32 the keys keep 3 % of their weight."""
    scores = query.float() @ key.float().mT
    if mask.dtype == torch.bool:
        scores = (scores + torch.where(mask, 0.0, -20.0)) * scale
    else:
        scores = scores * scale + mask
    return (scores.softmax(-1) @ value.float()).to(query.dtype)


@with_own_mask
def first_columns_for_all_tiles(query, key, value, mask, scale) -> Tensor:
    """Online softmax that advances the pointer to the keys, but not the pointer to the mask."""
    bias = _as_bias(mask).expand(-1, -1, query.shape[2], key.shape[2])
    parts = [bias[..., : keys.stop - keys.start] for keys in tiles(key.shape[2], 64)]
    return online_softmax(query, key, value, torch.cat(parts, -1), scale)


@with_sdpa_signature
def head_of_the_group(query, key, value, attn_mask, is_causal, scale) -> Tensor:
    """With grouped heads, the mask is indexed by the key head."""
    group = query.shape[1] // key.shape[1]
    if attn_mask is not None and attn_mask.shape[1] > 1:
        attn_mask = attn_mask[:, : key.shape[1]].repeat_interleave(group, 1)
    return attend(query, key, value, attn_mask, is_causal, scale)
