"""SDPA's arguments in the form that a kernel receives from its wrapper."""

import functools
import math
from collections.abc import Callable, Iterable, Iterator

import torch
from torch import Tensor


def with_sdpa_signature(attend: Callable[..., Tensor]):
    """Give a function of (query, key, value, attn_mask, is_causal, scale) SDPA's signature.

    The scale is a number. Further keywords are passed on.
    """

    @functools.wraps(attend)
    def attention(
        query: Tensor,
        key: Tensor,
        value: Tensor,
        attn_mask: Tensor | None = None,
        dropout_p: float = 0.0,
        is_causal: bool = False,
        *,
        scale: float | None = None,
        enable_gqa: bool = False,
        **features: bool,
    ) -> Tensor:
        return attend(query, key, value, attn_mask, is_causal, scale_of(query, scale), **features)

    return attention


def with_sdpa_arguments(attend: Callable[[Tensor, Tensor, Tensor, Tensor, float], Tensor]):
    """Give a function of (query, key, value, bias, scale) SDPA's signature.

    `key` and `value` are expanded to as many heads as `query`, and copied only if necessary. `bias`
    is float32, (B or 1, H or 1, Sq, Sk): the mask's bias, -inf for masked keys.
    """

    @with_sdpa_signature
    @functools.wraps(attend)
    def attention(query, key, value, attn_mask, is_causal, scale) -> Tensor:
        bias = bias_of(query, key, attn_mask, is_causal)
        return attend(query, *for_each_head(query, key, value), bias, scale)

    return attention


def attend(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attn_mask: Tensor | None,
    is_causal: bool,
    scale: float,
) -> Tensor:
    """Compute the plain formula with SDPA's mask."""
    bias = bias_of(query, key, attn_mask, is_causal)
    return attend_in_float32(query, *for_each_head(query, key, value), bias, scale)


def bias_of(query: Tensor, key: Tensor, attn_mask: Tensor | None, is_causal: bool) -> Tensor:
    """Return the bias of the scores: float32, (B or 1, H or 1, Sq, Sk)."""
    q_len, kv_len = query.shape[2], key.shape[2]
    bias = torch.zeros(1, 1, q_len, kv_len, device=query.device)
    if is_causal:
        bias = bias.masked_fill(~torch.ones_like(bias, dtype=torch.bool).tril(), -math.inf)
    if attn_mask is None:
        return bias
    if attn_mask.dtype == torch.bool:
        return bias.masked_fill(~attn_mask, -math.inf)
    return bias + attn_mask.float()


def for_each_head(query: Tensor, key: Tensor, value: Tensor) -> tuple[Tensor, Tensor]:
    """Return key and value with as many heads as the query."""
    group = query.shape[1] // key.shape[1]
    if group == 1:
        return key, value
    return key.repeat_interleave(group, 1), value.repeat_interleave(group, 1)


def scale_of(query: Tensor, scale: float | None) -> float:
    """Return the factor that the scores are multiplied by."""
    return query.shape[-1] ** -0.5 if scale is None else scale


def tiles(length: int, size: int) -> Iterator[slice]:
    """Yield slices of `size`; the last may be shorter."""
    return (slice(start, min(start + size, length)) for start in range(0, length, size))


def attend_in_float32(
    query: Tensor, key: Tensor, value: Tensor, bias: Tensor, scale: float
) -> Tensor:
    """Compute the plain formula: (B, H, Sq, Dv) in the query's dtype."""
    scores = query.float() @ key.float().mT * scale + bias
    return (scores.softmax(-1) @ value.float()).to(query.dtype)


def online_softmax(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    bias: Tensor,
    scale: float,
    size: int = 64,
    accumulator: torch.dtype = torch.float32,
) -> Tensor:
    """Compute attention over tiles of `size` keys, with the usual rescaling."""
    shape = query.shape[:3]
    largest, total = torch.full((*shape, 1), -1e30), torch.zeros(*shape, 1)
    summed = torch.zeros(*shape, value.shape[3], dtype=accumulator)
    for keys in tiles(key.shape[2], size):
        scores = query.float() @ key[:, :, keys].float().mT * scale + bias[..., keys]
        now = torch.maximum(largest, scores.amax(-1, keepdim=True))
        weights, rescale = (scores - now).exp(), (largest - now).exp()
        total = total * rescale + weights.sum(-1, keepdim=True)
        added = weights @ value[:, :, keys].float()
        summed = (summed.float() * rescale + added).to(accumulator)
        largest = now
    return (summed.float() / total.clamp_min(1e-30)).to(query.dtype)


def split_softmax(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    bias: Tensor,
    scale: float,
    splits: Iterable[slice],
    least: float = -math.inf,
) -> Tensor:
    """Compute attention over splits of the keys, and merge with factors of at least exp(least)."""
    maxima, totals, sums = [], [], []
    for keys in splits:
        scores = query.float() @ key[:, :, keys].float().mT * scale + bias[..., keys]
        maxima.append(scores.amax(-1, keepdim=True).clamp_min(-1e30))
        weights = (scores - maxima[-1]).exp()
        totals.append(weights.sum(-1, keepdim=True))
        sums.append(weights @ value[:, :, keys].float())
    largest = torch.stack(maxima)
    factors = (largest - largest.amax(0)).clamp_min(least).exp()
    merged = (factors * torch.stack(sums)).sum(0) / (factors * torch.stack(totals)).sum(0)
    return merged.to(query.dtype)
