"""A backend of diffusers' attention dispatcher: `model.set_attention_backend("attention_kernels")`.

Models whose processors call SDPA themselves, such as CogVideoX and Stable Diffusion 3, do not use
the dispatcher.
"""

from __future__ import annotations

from functools import partial
from typing import Any

from torch import Tensor

from attention_kernels.integrations import NAME, PRECISIONS
from attention_kernels.operators import attention


def register() -> None:
    from diffusers.models.attention_dispatch import AttentionBackendName, _AttentionBackendRegistry

    for name, precision in PRECISIONS.items():
        if name not in AttentionBackendName._value2member_map_:
            _add_member(AttentionBackendName, name)
        function = partial(dispatched, precision=precision)
        _AttentionBackendRegistry.register(AttentionBackendName(name))(function)


def dispatched(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attn_mask: Tensor | None = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    scale: float | None = None,
    enable_gqa: bool = False,
    return_lse: bool = False,
    _parallel_config: Any = None,
    precision: str = "exact",
) -> Any:
    """Return the output (B, Sq, Hq, Dv), and with `return_lse` the log-sum-exp (B, Hq, Sq).

    Args:
        query, key, value: (B, Sq, Hq, D), (B, Sk, Hkv, D) and (B, Sk, Hkv, Dv).
        attn_mask: (B, Sk) of keys, or broadcasts to (B, Hq, Sq, Sk).

    Raises:
        NotImplementedError: attention is parallel over sequences, or is refused by
            `attention_kernels.attention`.
    """
    if _parallel_config is not None:
        raise NotImplementedError(f"{NAME} has no parallel attention over sequences")
    if attn_mask is not None and attn_mask.ndim == 2:
        attn_mask = attn_mask[:, None, None]
    found = attention(
        query.transpose(1, 2),
        key.transpose(1, 2),
        value.transpose(1, 2),
        attn_mask,
        dropout_p,
        is_causal,
        scale,
        enable_gqa,
        precision=precision,
        return_lse=return_lse,
    )
    output, lse = found if return_lse else (found, None)
    output = output.transpose(1, 2)
    return (output, lse) if return_lse else output


def _add_member(names: Any, value: str) -> None:
    """Add a member to an enumeration of strings, because diffusers looks backends up as members."""
    member = str.__new__(names, value)
    member._name_, member._value_ = value.upper(), value
    member.__objclass__ = names
    member._sort_order_ = len(names._member_names_)
    names._member_names_.append(member._name_)
    names._member_map_[member._name_] = member
    names._value2member_map_[value] = member
    type.__setattr__(names, member._name_, member)
