"""Options of an attention call that SDPA does not have, and their effect on the visible keys.

The score of query i and key j is `scale · q·k`, capped to `softcap · tanh(score / softcap)`, plus
`attn_mask`. Causality and window are relative to the diagonal, key i + δ for query i. As in SDPA, δ
is 0. With `bottom_right`, δ is Sk - Sq as in FlashAttention, which aligns the last query with the
last key. A causal query sees the keys up to the diagonal. A window (left, right) limits a query to
the keys from `left` before the diagonal to `right` after it. A sink is an additional score of its
head without a value, so it only takes weight. In a packed call the sequences are concatenated, and
queries see only keys of their own sequence. Keys may lie in pages (`capture.call.pages`), and 8-bit
tensors may have scales (`capture.call.per_head`).
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, NamedTuple, Protocol

import torch
from torch import Tensor

from capture.call.per_head import SCALES, scaled_text

Window = tuple[int | None, int | None]
"""Numbers of keys that a query sees before and after the diagonal; None means all."""

FEATURES = {
    "bottom-right": "causal mask aligned bottom right",
    "window": "sliding window",
    "softcap": "soft cap",
    "sinks": "attention sinks",
    "packed": "packed sequences",
    "key-lengths": "number of valid keys per sequence",
    "paged": "page table",
    "scaled": "scaled 8-bit values",
}
"""Features that a kernel may support beyond SDPA, with their descriptions."""

VARIANT_TENSORS = {
    "sinks": 1,
    "cu_seqlens_q": 1,
    "cu_seqlens_k": 1,
    "seqused_k": 1,
    "page_table": 2,
    "query_scale": 1,
    "key_scale": 1,
    "value_scale": 1,
}
"""Tensors of a call that SDPA does not have, with the number of dimensions of each."""


@dataclass(frozen=True)
class AttentionVariant:
    """Options of a call that SDPA does not have and that are not tensors (default: none).

    Raises:
        ValueError: `softcap`, by which kernels divide, is not positive.
    """

    bottom_right: bool = False
    window: Window = (None, None)
    softcap: float | None = None
    max_seqlen_q: int | None = None
    """Maximum number of queries in a sequence of a packed call, as given by the caller.

    Kernels do not write the outputs of queries above this number. Recordings are checked for such
    queries. Calls in memory are not checked, because the check would wait for the GPU.
    """
    max_seqlen_k: int | None = None

    def __post_init__(self) -> None:
        if self.softcap is not None and not 0 < self.softcap < 1e30:
            raise ValueError(
                f"soft cap {self.softcap:g}: must be a positive number, or None for no cap, which "
                "in FlashAttention is 0"
            )

    def arguments(self) -> dict[str, Any]:
        """Return the options that are set, by name."""
        return {name: value for name, value in vars(self).items() if value != _DEFAULTS[name]}

    def __str__(self) -> str:
        """Format as `window 1023/0, soft cap 50`, without the maximum lengths."""
        left, right = ("∞" if side is None else str(side) for side in self.window)
        return ", ".join(
            part
            for part, is_set in (
                ("bottom right", self.bottom_right),
                (f"window {left}/{right}", self.window != (None, None)),
                (f"soft cap {self.softcap:g}" if self.softcap else "", self.softcap),
            )
            if is_set
        )

    @classmethod
    def from_json(cls, data: Any) -> AttentionVariant:
        """Read the JSON that `arguments` returned."""
        if not isinstance(data, dict) or not data.keys() <= _DEFAULTS.keys():
            raise ValueError("a variant of attention that this version does not know")
        window = data.get("window", [None, None])
        lengths = [data.get("max_seqlen_q"), data.get("max_seqlen_k")]
        softcap = data.get("softcap")
        if not isinstance(window, list | tuple) or len(window) != 2:
            raise ValueError("a window must have a left and a right side")
        numbers = (*window, *lengths)
        if any(type(number) not in (int, type(None)) for number in numbers):
            raise ValueError("window and lengths must be whole numbers or null")
        if any(number is not None and not 0 <= number < 2**48 for number in numbers):
            raise ValueError("a window or length is out of range")
        if type(softcap) not in (int, float, type(None)):
            raise ValueError("a soft cap must be a positive number")
        if type(data.get("bottom_right", False)) is not bool:
            raise ValueError("bottom_right must be true or false")
        return cls(**{**data, "window": tuple(window)})


_DEFAULTS = vars(AttentionVariant())

PLAIN = AttentionVariant()
"""Variant without additional options, which is SDPA's own."""


class CallOptions(Protocol):
    """Object with the fields of a call: the model's arguments, or a recorded call."""

    @property
    def query(self) -> Tensor: ...
    @property
    def key(self) -> Tensor: ...
    @property
    def is_causal(self) -> bool: ...
    @property
    def sinks(self) -> Tensor | None: ...
    @property
    def cu_seqlens_q(self) -> Tensor | None: ...
    @property
    def seqused_k(self) -> Tensor | None: ...
    @property
    def page_table(self) -> Tensor | None: ...
    @property
    def query_scale(self) -> Tensor | None: ...
    @property
    def key_scale(self) -> Tensor | None: ...
    @property
    def value_scale(self) -> Tensor | None: ...
    @property
    def variant(self) -> AttentionVariant: ...


def features(call: CallOptions) -> tuple[str, ...]:
    """Return the names from `FEATURES` that a kernel must support beyond SDPA for a call."""
    variant, packed, asked = call.variant, call.cu_seqlens_q is not None, []
    if variant is not PLAIN:
        has_window = variant.window != (None, None)
        if variant.bottom_right and (call.is_causal or has_window):
            unequal = packed or call.seqused_k is not None
            if unequal or call.query.shape[-2] != call.key.shape[-2]:
                asked.append("bottom-right")
        if has_window:
            asked.append("window")
        if variant.softcap is not None:
            asked.append("softcap")
    if call.sinks is not None:
        asked.append("sinks")
    if packed:
        asked.append("packed")
    if call.page_table is not None:
        asked.append("paged")
    elif call.seqused_k is not None:
        asked.append("key-lengths")
    if is_scaled(call):
        asked.append("scaled")
    return tuple(asked)


def is_scaled(call: CallOptions) -> bool:
    return not (call.query_scale is call.key_scale is call.value_scale is None)


def output_dtype(call: CallOptions) -> torch.dtype:
    """Return the dtype of the output: the query's, or bfloat16 if the query has a scale.

    FlashAttention 3 returns bfloat16 for queries in 8 bits.
    """
    return call.query.dtype if call.query_scale is None else torch.bfloat16


def beyond(call: CallOptions) -> str:
    """Describe a call's options that SDPA does not have: `window 1023/0, sinks`; empty for none.

    The number of packed sequences over pages is left out, as it differs between an engine's steps.
    """
    packed, is_paged = call.cu_seqlens_q, call.page_table is not None
    count = "" if packed is None or is_paged else f"{packed.shape[0] - 1} "
    scales = [name for name in SCALES.values() if getattr(call, name) is not None]
    parts = [
        str(call.variant),
        "sinks" if call.sinks is not None else "",
        f"{count}packed sequences" if packed is not None else "",
        "key lengths" if call.seqused_k is not None and not is_paged else "",
        f"pages of {call.key.shape[-2]}" if is_paged else "",
        scaled_text(scales, str(call.key.dtype).removeprefix("torch.")),
    ]
    return ", ".join(filter(None, parts))


def beyond_arguments(call: CallOptions) -> dict[str, Any]:
    """Return the options that SDPA does not have and that change a call's result."""
    asked = features(call)
    given = call.variant.arguments() if asked else {}
    if "bottom-right" not in asked:
        given.pop("bottom_right", None)
    tensors = {name: getattr(call, name) for name in VARIANT_TENSORS}
    given_tensors = {name: tensor for name, tensor in tensors.items() if tensor is not None}
    return {**given_tensors, **given}


class KeyRanges(NamedTuple):
    """Keys that causality, window and sequences make visible, from `first` up to `end`."""

    first: Tensor
    """(1, Sq) or (B, Sq) int64."""
    end: Tensor
    """(1, Sq) or (B, Sq) int64: the key after the last visible key.

    If a query sees no key, `end` is at most `first`.
    """

    def of(self, batch: int) -> tuple[Tensor, Tensor]:
        """Return `first` and `end` of one batch element, (Sq,)."""
        row = min(batch, self.first.shape[0] - 1)
        return self.first[row], self.end[row]


class QueryPositions(NamedTuple):
    """Position of each query in its sequence, which determines causality and window."""

    begin: Tensor
    """(1, Sq) or (B, Sq) int64: first key of the query's sequence."""
    length: Tensor
    """Number of valid keys of the query's sequence."""
    diagonal: Tensor
    """Key on the query's diagonal, counted from `begin`; it may lie outside the sequence."""


def query_positions(
    q_len: int,
    kv_len: int,
    device: torch.device,
    *,
    bottom_right: bool = False,
    cu_seqlens_q: Tensor | None = None,
    cu_seqlens_k: Tensor | None = None,
    seqused_k: Tensor | None = None,
) -> QueryPositions:
    """Return the position of each query in its sequence.

    Args:
        cu_seqlens_q: (N + 1,) first query of each packed sequence, then the total.
        cu_seqlens_k: (N + 1,) first key of each packed sequence, then the total.
        seqused_k: (B,), or (N,) if packed: number of valid keys of each sequence.
    """
    rows = torch.arange(q_len, device=device)
    if cu_seqlens_q is not None and cu_seqlens_k is not None:
        starts_q, starts_k = (each.to(device, torch.int64) for each in (cu_seqlens_q, cu_seqlens_k))
        sequence = torch.searchsorted(starts_q[1:-1].contiguous(), rows, right=True)
        begin, lengths_q, lengths_k = starts_k[:-1], starts_q.diff(), starts_k.diff()
        if seqused_k is not None:
            lengths_k = torch.minimum(lengths_k, seqused_k.to(lengths_k))
        position = (rows - starts_q[sequence])[None]
        begin, lengths_q, lengths_k = (
            each[sequence][None] for each in (begin, lengths_q, lengths_k)
        )
    else:
        position = rows[None]
        lengths_k = torch.tensor([[kv_len]], device=device)
        if seqused_k is not None:
            lengths_k = seqused_k.to(device, torch.int64)[:, None]
        lengths_q, begin = torch.full_like(lengths_k, q_len), torch.zeros_like(lengths_k)
    diagonal = position + (lengths_k - lengths_q if bottom_right else 0)
    return QueryPositions(*torch.broadcast_tensors(begin, lengths_k, diagonal))


def key_ranges(
    q_len: int,
    kv_len: int,
    device: torch.device,
    *,
    is_causal: bool = False,
    variant: AttentionVariant = PLAIN,
    **sequences: Tensor | None,
) -> KeyRanges:
    """Return the keys that each query sees, without the effect of an `attn_mask`.

    Args:
        q_len: number of queries.
        kv_len: number of keys.
        sequences: bounds of sequences, as for `query_positions`.
    """
    begin, end, diagonal = query_positions(
        q_len, kv_len, device, bottom_right=variant.bottom_right, **sequences
    )
    first = torch.zeros_like(diagonal)
    left, right = variant.window
    if is_causal:
        right = 0 if right is None else min(right, 0)
    if left is not None:
        first = (diagonal - left).clamp(min=0)
    if right is not None:
        end = torch.minimum(end, diagonal + right + 1)
    return KeyRanges(begin + first, begin + torch.maximum(end, first))
