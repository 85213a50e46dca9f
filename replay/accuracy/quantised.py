"""The error of honest 8-bit attention on one call, as a standard for quantised kernels.

A call is computed in two plain 8-bit ways, both coarser than published kernels. A kernel's error in
a head or a row is compared with the larger error of these two ways:

- INT8: query and key have a scale per 128 rows, value a scale per channel, and probabilities a
  scale per row. SageAttention 1 and 2 (Zhang et al. 2024) have finer scales.
- FP8 (e4m3): each key head has one scale, as in FlashAttention-3 (Shah et al. 2024) and Transformer
  Engine.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn.functional import pad

from capture.call.attention_call import AttentionCall
from capture.call.per_head import numbers_of_heads
from replay.accuracy.reference import weights
from replay.accuracy.thresholds import QuantisedThresholds

FP8 = torch.float8_e4m3fn
FP8_MAX = torch.finfo(FP8).max
FP8_ROUNDOFF = 2.0**-4
"""Half the distance between neighbouring e4m3 numbers, relative to the smaller number."""
INT8_MAX = 127.0
GROUP = 128
"""Number of rows of a query or key that share a scale in INT8."""
MINIMUM_ROWS = 32
"""Minimum number of rows for a reliable standard error of their mean."""
STANDARD_ERRORS = 4.0
SHARED_ERRORS = 2.0
"""Factors on the two parts of the margin that `_ratio` adds to a relative L1."""
SHARE_OF_OTHER_HEADS = 0.5
SMALLEST_SHARE = 0.5
"""Floor for the limit on the relative L1 error, in units of `FP8_ROUNDOFF`. Plain 8-bit
attention has no error on values that happen to be FP8 numbers."""
ROW_ROUNDOFFS = 2.0
"""Error that any row may have in addition to that of plain 8-bit attention, in units of
`FP8_ROUNDOFF`."""


@dataclass(frozen=True)
class QuantisedNoise:
    """Errors of n ways to compute a call in 8 bits."""

    whole: Tensor
    """(2, n): relative L1 of the whole output, and its margin, which is infinite for few rows."""
    heads: Tensor
    """(2, n, B, Hq): relative L1 of each head, and its margin."""
    rows: Tensor
    """(n, B, Hq, 1): the error of a head's worst row in units of `size`, with a margin."""
    size: Tensor
    """(B, Hq, Sq): √(‖o‖² + Σⱼ pⱼ²‖vⱼ‖²) of each row."""

    def whole_limit(self, thresholds: QuantisedThresholds) -> float:
        """Return the largest allowed relative L1 of the whole output."""
        return float(_limit(self.whole, thresholds))

    def head_limits(self, thresholds: QuantisedThresholds) -> Tensor:
        """Return the largest allowed relative L1 of each head: (B, Hq), at least `whole_limit`."""
        return _limit(self.heads, thresholds).clamp_min(self.whole_limit(thresholds))

    def row_limits(self, thresholds: QuantisedThresholds) -> Tensor:
        """Return the largest allowed ‖output - reference‖ of each row: (B, Hq, Sq)."""
        factors = ROW_ROUNDOFFS * FP8_ROUNDOFF + thresholds.row_factor * self.rows.amax(dim=0)
        return self.size * factors

    @classmethod
    def of(cls, call: AttentionCall, reference: Tensor, size: Tensor) -> QuantisedNoise:
        """Compute the errors of the call in each of the 8-bit ways.

        Args:
            reference: (B, Hq, Sq, Dv), on the call's device.
            size: the field `size`, on the call's device.
        """
        reference, size = reference.to(torch.float64), size.to(torch.float64)
        signal = reference.abs().sum(-1)
        absolute, lengths = (
            torch.stack(errors)
            for errors in zip(*(_errors(call, reference, way) for way in WAYS), strict=True)
        )
        worst = _or(lengths / size, 0.0).amax(dim=3, keepdim=True)
        of_all = worst.amax(dim=(1, 2), keepdim=True)
        batch, heads, length, width = reference.shape
        # The worst of few rows is an uncertain estimate, so a kernel may exceed it by more.
        if length < MINIMUM_ROWS:
            worst = of_all.expand_as(worst) * (1 + (batch * heads * length) ** -0.5)
        else:
            worst = torch.maximum(worst, SHARE_OF_OTHER_HEADS * of_all) * (1 + length**-0.5)
        whole = _ratio(absolute.flatten(1), signal.flatten(), batch * call.shape.kv_heads * width)
        return cls(whole, _ratio(absolute, signal, width), worst, size)


def to_int8(tensor: Tensor, largest: Tensor) -> Tensor:
    """Round to INT8, with the scale that maps `largest` to 127, and convert back."""
    scale = _scale(largest, INT8_MAX)
    return (tensor / scale).round_().mul_(scale)


def to_fp8(tensor: Tensor, largest: Tensor) -> Tensor:
    """Round to e4m3, with the scale that maps `largest` to e4m3's maximum, and convert back."""
    scale = _scale(largest, FP8_MAX)
    return (tensor / scale).to(FP8).to(tensor.dtype).mul_(scale)


def _scale(largest: Tensor, most: float) -> Tensor:
    return largest.clamp_min(torch.finfo(torch.float32).tiny) / most


def _in_groups(tensor: Tensor) -> Tensor:
    """Round to INT8, with a scale per `GROUP` rows of a head, and convert back."""
    length = tensor.shape[2]
    groups = pad(tensor, (0, 0, 0, -length % GROUP)).unflatten(2, (-1, GROUP))
    rounded = to_int8(groups, groups.abs().amax(dim=(3, 4), keepdim=True))
    return rounded.flatten(2, 3)[:, :, :length]


class Way(NamedTuple):
    """Way to round a call of one key head; each function rounds float32 values to 8 bits."""

    query_and_key: Callable[[Tensor], Tensor]
    value: Callable[[Tensor], Tensor]
    rounded: Callable[[Tensor], Tensor]
    """Function that rounds probabilities (G, rows, keys) with a row maximum of `most`; the function
    may work in place."""
    most: float


WAYS = (
    Way(
        _in_groups,
        lambda value: to_int8(value, value.abs().amax(dim=2, keepdim=True)),
        Tensor.round_,
        INT8_MAX,
    ),
    Way(
        lambda tensor: to_fp8(tensor, tensor.abs().amax()),
        lambda value: to_fp8(value, value.abs().amax()),
        lambda weights: weights.to(FP8).to(weights.dtype),
        FP8_MAX,
    ),
)


def _errors(call: AttentionCall, reference: Tensor, way: Way) -> tuple[Tensor, Tensor]:
    """Compute the call in 8 bits; return Σ|error| and ‖error‖ of each row (B, Hq, Sq)."""
    call = call.without_pages()
    absolute = torch.zeros(reference.shape[:3], dtype=torch.float64, device=reference.device)
    lengths = torch.zeros_like(absolute)
    if not call.shape.kv_len:  # the output is zero in any precision
        return absolute, lengths
    group = call.shape.q_heads // call.shape.kv_heads
    for batch in range(call.shape.batch):
        for kv_head in range(call.shape.kv_heads):
            heads = slice(kv_head * group, (kv_head + 1) * group)
            part = _of_one_key_head(call, batch, heads, kv_head)
            part = part.with_tensors(
                {
                    "query": way.query_and_key(part.query),
                    "key": way.query_and_key(part.key),
                    "value": way.value(part.value),
                }
            )
            # TF32 rounds by 2⁻¹¹, whereas 8 bits round by 2⁻⁴ (e4m3) or 2⁻⁸ of the largest value.
            # The error of a head's worst row may change by a tenth; verdicts stay equal (tests).
            for block in weights(part, torch.float32, allow_tf32=True):
                scale = _scale(block.weights.amax(dim=-1, keepdim=True), way.most)
                levels = way.rounded(block.weights.div_(scale))
                found = (
                    block.product(levels, block.value).mul_(scale).to(call.dtype).to(torch.float64)
                )
                error = found - reference[batch, heads, block.rows]
                absolute[batch, heads, block.rows] = error.abs().sum(-1)
                lengths[batch, heads, block.rows] = torch.linalg.vector_norm(error, dim=-1)
    return absolute, lengths


def _of_one_key_head(call: AttentionCall, batch: int, heads: slice, kv_head: int) -> AttentionCall:
    """Return a float32 call of the query heads that belong to one key head of one batch."""
    mask = call.attn_mask
    if mask is not None:
        mask = mask[(None,) * (4 - mask.ndim)]
        mask = mask if mask.shape[0] == 1 else mask[batch : batch + 1]
        mask = mask if mask.shape[1] == 1 else mask[:, heads]
    used, packed = call.seqused_k, call.cu_seqlens_q is not None
    batches, kv_heads = slice(batch, batch + 1), slice(kv_head, kv_head + 1)
    stored = {
        "query": call.query[batches, heads],
        "key": call.key[batches, kv_heads],
        "value": call.value[batches, kv_heads],
        **numbers_of_heads(call.tensors(), heads, kv_heads),
    }
    part = call.with_tensors(stored).without_scales()
    query, key, value = (each.to(torch.float32) for each in (part.query, part.key, part.value))
    if used is not None and not packed:  # unused keys could be NaN, which would enter every scale
        is_key = torch.arange(key.shape[2], device=key.device)[:, None] < used[batch]
        key, value = (tensor.where(is_key, 0.0) for tensor in (key, value))
    return replace(
        part,
        query=query,
        key=key,
        value=value,
        attn_mask=mask,
        seqused_k=None if used is None else used if packed else used[batch : batch + 1],
        output=None,
    )


def _ratio(absolute: Tensor, signal: Tensor, numbers: int) -> Tensor:
    """Return Σabsolute / Σsignal over the last dimension, stacked with its margin.

    The margin has two parts. The first is the standard error of a ratio estimator (Cochran 1977,
    "Sampling Techniques", chapter 6), as if rows were independent. The second covers the errors
    that rows share through the values: the length of n normal numbers varies by 1/√2n.

    Args:
        numbers: the number n of values.
    """
    count, total = signal.shape[-1], signal.sum(-1)
    found = absolute.sum(-1) / total
    if count < MINIMUM_ROWS:
        return torch.stack([found, torch.full_like(found, math.inf)])
    residuals = absolute - found[..., None] * signal
    error = (residuals.square().sum(-1) * count / (count - 1)).sqrt() / total
    shared = found / math.sqrt(2 * numbers)
    return torch.stack([found, STANDARD_ERRORS * error + SHARED_ERRORS * shared])


def _limit(figures: Tensor, thresholds: QuantisedThresholds) -> Tensor:
    """Return the largest limit among the n ways, from their relative L1 and margin (2, n, …)."""
    found, margin = figures
    limits = thresholds.noise_factor * found + margin
    return _or(limits, math.inf).amax(dim=0).clamp_min(SMALLEST_SHARE * FP8_ROUNDOFF)


def _or(tensor: Tensor, instead: float) -> Tensor:
    return tensor.masked_fill(~tensor.isfinite(), instead)
