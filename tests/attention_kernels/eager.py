"""Expected results of our kernels, computed by the textbook formula in float64."""

import math
from typing import NamedTuple

import torch
from torch import Tensor


class Attended(NamedTuple):
    """Attention's output and the log-sum-exp."""

    output: Tensor
    """(B, Hq, Sq, Dv) float64."""
    lse: Tensor
    """(B, Hq, Sq) float64: log of each row's sum of exponentials, -inf if all keys are masked."""


def scores(
    query: Tensor,
    key: Tensor,
    attn_mask: Tensor | None = None,
    is_causal: bool = False,
    scale: float | None = None,
) -> Tensor:
    """Return scale · QKᵀ + mask, (B, Hq, Sq, Sk) float64, -inf where a key is masked.

    True in a bool mask means attend; a float mask is added. `is_causal` is aligned top left and may
    be combined with a mask.
    """
    group = query.shape[1] // key.shape[1]
    scale = query.shape[-1] ** -0.5 if scale is None else scale
    score = query.double() * scale @ key.double().repeat_interleave(group, dim=1).mT
    if attn_mask is not None and attn_mask.dtype == torch.bool:
        attn_mask = torch.zeros_like(attn_mask, dtype=torch.float64).masked_fill(
            ~attn_mask, -math.inf
        )
    if attn_mask is not None:
        score = score + attn_mask
    if is_causal:
        later = torch.ones(score.shape[-2:], dtype=torch.bool, device=score.device).triu(1)
        score = score.masked_fill(later, -math.inf)
    return score


def attend(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attn_mask: Tensor | None = None,
    is_causal: bool = False,
    scale: float | None = None,
) -> Attended:
    """Return softmax(scale · QKᵀ + mask) · V, with zeros for queries whose keys are all masked."""
    group = query.shape[1] // key.shape[1]
    score = scores(query, key, attn_mask, is_causal, scale)
    nothing = (score == -math.inf).all(dim=-1, keepdim=True)
    weights = torch.softmax(score, dim=-1).masked_fill(nothing, 0.0)
    output = weights @ value.double().repeat_interleave(group, dim=1)
    return Attended(output, torch.logsumexp(score, dim=-1))
