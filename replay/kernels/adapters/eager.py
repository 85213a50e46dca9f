"""Attention of models without a fused kernel, in plain PyTorch, with all features of a call.

`eager` is the attention of a model's own code: a matrix of all scores, a softmax in float32, and a
second product. `torch-masked` is SDPA with causality, window and sequences converted to a mask, as
in models that use features for which SDPA has no argument. Both kernels first copy paged keys into
contiguous memory, and convert scaled 8-bit values to the dtype of the output.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from capture.call.attention_variant import FEATURES, is_scaled, output_dtype
from capture.call.per_head import SCALES, true_values
from replay.kernels.constraints import AnyCall, all_of, no_dropout
from replay.kernels.layout import in_layout
from replay.kernels.registry import Kernel, register
from replay.kernels.wrapping import at_once, drop_in


def _plain(call: AnyCall) -> AnyCall:
    """Return a call with true values and without pages."""
    call = _gathered(call)
    if not is_scaled(call):
        return call
    changed: dict[str, Any] = dict.fromkeys(SCALES.values())
    for name, scale in SCALES.items():
        changed[name] = true_values(getattr(call, name), getattr(call, scale), output_dtype(call))
    return in_layout(call, lambda tensor: tensor)._replace(**changed)


def _gathered(call: AnyCall) -> AnyCall:
    """Return a call whose paged keys are copied into one contiguous piece per sequence."""
    table, lengths = call.page_table, call.seqused_k
    if table is None or lengths is None:
        return call
    sequences, page_size = table.shape[0], call.key.shape[2]
    most = max(-(-int(lengths.max()) // page_size), 1)
    # Entries after a sequence's last page may be arbitrary numbers.
    table = torch.where(
        torch.arange(most, device=table.device) * page_size < lengths[:, None], table[:, :most], 0
    )
    key_BHSD, value_BHSD = (
        torch.cat([pool[pages.long()] for pages in table.unbind(1)], dim=2)
        for pool in (call.key, call.value)
    )
    starts_k = None
    if call.cu_seqlens_q is not None:
        key_BHSD, value_BHSD = (
            torch.cat(each.unbind(0), dim=1)[None] for each in (key_BHSD, value_BHSD)
        )
        starts_k = torch.arange(sequences + 1, device=table.device) * (most * page_size)
    return in_layout(call, lambda tensor: tensor)._replace(
        key=key_BHSD, value=value_BHSD, page_table=None, cu_seqlens_k=starts_k
    )


def _seen(call: AnyCall) -> Tensor | None:
    """Return visible keys, apart from `attn_mask`: (B or 1, 1, Sq, Sk) bool; None for all keys."""
    q_len, kv_len, device = call.query.shape[2], call.key.shape[2], call.query.device
    if not (call.is_causal or call.features):
        return None
    query, key = torch.arange(q_len, device=device)[:, None], torch.arange(kv_len, device=device)
    shift: int | Tensor = kv_len - q_len if call.variant.bottom_right else 0
    seen = torch.ones(1, 1, q_len, kv_len, dtype=torch.bool, device=device)
    used = call.seqused_k
    if call.cu_seqlens_q is not None and call.cu_seqlens_k is not None:
        starts_q, starts_k = call.cu_seqlens_q.to(device), call.cu_seqlens_k.to(device)
        of_query = torch.repeat_interleave(starts_q.diff(), output_size=q_len)
        of_key = torch.repeat_interleave(starts_k.diff(), output_size=kv_len)
        ends = starts_k[1:] if used is None else starts_k[:-1] + used.to(starts_k)
        seen &= (of_query[:, None] == of_key) & (key < ends[of_key])
        shifts = ends - starts_q[1:] if call.variant.bottom_right else (starts_k - starts_q)[:-1]
        shift = shifts[of_query][:, None]
    elif used is not None:
        lengths = used.to(device)[:, None, None, None]
        seen = seen & (key < lengths)
        shift = lengths - q_len if call.variant.bottom_right else 0
    left, right = call.variant.window
    if call.is_causal:
        right = 0 if right is None else min(right, 0)
    if left is not None:
        seen = seen & (key >= query + shift - left)
    if right is not None:
        seen = seen & (key <= query + shift + right)
    return seen


def _mask(call: AnyCall) -> Tensor | None:
    """Combine the call's mask with `_seen`."""
    seen, mask = _seen(call), call.attn_mask
    if seen is None or mask is None:
        return mask if seen is None else seen
    return mask & seen if mask.dtype == torch.bool else mask.masked_fill(~seen, -math.inf)


def _eager(call: AnyCall) -> Tensor:
    call = _plain(call)
    query, key, value = call.query, call.key, call.value
    if query.shape[1] != key.shape[1]:
        group = query.shape[1] // key.shape[1]
        key, value = (each.repeat_interleave(group, dim=1) for each in (key, value))
    scale = query.shape[-1] ** -0.5 if call.scale is None else call.scale
    scores = query @ key.mT * scale
    if call.variant.softcap is not None:
        scores = torch.tanh(scores / call.variant.softcap) * call.variant.softcap
    mask = _mask(call)
    if mask is not None and mask.dtype == torch.bool:
        scores = scores.masked_fill(~mask, -math.inf)
    elif mask is not None:
        scores = scores + mask
    if call.sinks is not None:
        column = call.sinks.to(scores)[:, None, None].expand(*scores.shape[:3], 1)
        scores = torch.cat([scores, column], dim=-1)
    weights = F.softmax(scores, dim=-1, dtype=torch.float32)
    if mask is not None and call.sinks is None:
        weights = weights.masked_fill((scores == -math.inf).all(dim=-1, keepdim=True), 0.0)
    return weights[..., : key.shape[2]].to(value.dtype) @ value


def _may_see_nothing(call: AnyCall) -> bool:
    """Return True if lengths or the diagonal can mask all keys of a query."""
    has_lengths = call.cu_seqlens_q is not None or call.seqused_k is not None
    return has_lengths or call.query.shape[2] > call.key.shape[2]


def _prepare_masked(call: AnyCall) -> Callable[[], Tensor]:
    call = _plain(call)
    mask = _mask(call)
    # SDPA's backends disagree about rows without visible keys, which some calls have.
    without = None
    if mask is not None and mask.dtype == torch.bool and _may_see_nothing(call):
        without = ~mask.any(dim=-1, keepdim=True)

    def run() -> Tensor:
        output = F.scaled_dot_product_attention(
            call.query,
            call.key,
            call.value,
            mask,
            scale=call.scale,
            **({"enable_gqa": True} if call.enable_gqa else {}),
        )
        return output if without is None else output.masked_fill(without, 0.0)

    return run


def _is_beyond_sdpa(call: AnyCall) -> str | None:
    return None if call.features else "only for options beyond SDPA; torch-default runs this call"


register(
    Kernel(
        "eager",
        drop_in(_eager, (no_dropout,), FEATURES),
        unsupported=no_dropout,
        default=False,
        about="matmul, softmax, matmul in plain PyTorch, like models' own code",
        library="torch",
        differentiable=True,
        features=frozenset(FEATURES),
    )
)
register(
    Kernel(
        "torch-masked",
        drop_in(at_once(_prepare_masked), (no_dropout,), FEATURES.keys() - {"softcap", "sinks"}),
        unsupported=all_of(no_dropout, _is_beyond_sdpa),
        prepare=_prepare_masked,
        default=False,
        about="SDPA with window and sequences expressed as a mask",
        library="torch",
        differentiable=True,
        features=frozenset(FEATURES.keys() - {"softcap", "sinks"}),
    )
)
