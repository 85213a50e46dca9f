"""What an attention call can ask that SDPA has no argument for, and which keys it then sees.

The score of query i and key j is `scale · q·k`, then `softcap · tanh(score / softcap)`, then plus
`attn_mask`. Causality and window follow a diagonal, i + δ: δ is 0, as in SDPA, or with
`bottom_right`, as in FlashAttention, Sk - Sq, which puts the last query beside the last key. A
causal query sees keys up to the diagonal, a window (left, right) those from `left` before it to
`right` after it. A sink is one more score of its head, without a value: it only takes weight. In a
packed call the sequences lie behind one another, and none sees another's keys. Keys may lie in
pages (`capture.call.pages`).
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, NamedTuple, Protocol

import torch
from torch import Tensor

Window = tuple[int | None, int | None]
"""Keys that a query sees before and after the diagonal; None for all of that side."""

FEATURES = {
    "bottom-right": "causal mask aligned bottom right",
    "window": "sliding window",
    "softcap": "soft cap",
    "sinks": "attention sinks",
    "packed": "packed sequences",
    "key-lengths": "number of valid keys per sequence",
    "paged": "page table",
}
"""What a kernel may know beyond SDPA, in words."""


VARIANT_TENSORS = {
    "sinks": 1,
    "cu_seqlens_q": 1,
    "cu_seqlens_k": 1,
    "seqused_k": 1,
    "page_table": 2,
}
"""A call's tensors beyond SDPA's, and how many dimensions each has."""


@dataclass(frozen=True)
class AttentionVariant:
    """The plain options of a call beyond SDPA's arguments; the default asks for nothing.

    Raises:
        ValueError: `softcap` is not positive: no kernel could divide by it.
    """

    bottom_right: bool = False
    window: Window = (None, None)
    softcap: float | None = None
    max_seqlen_q: int | None = None
    """The longest sequence of a packed call, as its caller stated it, or more.

    Kernels answer no more queries of a sequence: the outputs of others are what their memory held.
    Recordings are checked; calls are not, which would wait for the GPU.
    """
    max_seqlen_k: int | None = None

    def __post_init__(self) -> None:
        if self.softcap is not None and not 0 < self.softcap < 1e30:
            raise ValueError(
                f"soft cap {self.softcap:g}: must be a positive number, or None for no cap, which "
                "in FlashAttention is 0"
            )

    def arguments(self) -> dict[str, Any]:
        """The options that are set, by name."""
        return {name: value for name, value in vars(self).items() if value != _DEFAULTS[name]}

    def __str__(self) -> str:
        """`window 1023/0, soft cap 50`; the longest sequences are left out."""
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
        """Read what `arguments` gave.

        Raises:
            ValueError: it is no such thing.
        """
        if not isinstance(data, dict) or not data.keys() <= _DEFAULTS.keys():
            raise ValueError("a variant of attention that this version does not know")
        window = data.get("window", [None, None])
        lengths = [data.get("max_seqlen_q"), data.get("max_seqlen_k")]
        softcap = data.get("softcap")
        if not isinstance(window, list | tuple) or len(window) != 2:
            raise ValueError("a window has a left and a right side")
        if any(type(each) not in (int, type(None)) for each in (*window, *lengths)):
            raise ValueError("window and lengths are whole numbers or null")
        if any(each is not None and not 0 <= each < 2**48 for each in (*window, *lengths)):
            raise ValueError("a window or length is out of range")
        if type(softcap) not in (int, float, type(None)):
            raise ValueError("a soft cap is a positive number")
        if type(data.get("bottom_right", False)) is not bool:
            raise ValueError("bottom_right is true or false")
        return cls(**{**data, "window": tuple(window)})


_DEFAULTS = vars(AttentionVariant())

PLAIN = AttentionVariant()
"""SDPA itself."""


class CallOptions(Protocol):
    """A call, made or recorded."""

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
    def variant(self) -> AttentionVariant: ...


def features(call: CallOptions) -> tuple[str, ...]:
    """What a kernel must know beyond SDPA to answer a call, of `FEATURES`."""
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
    return tuple(asked)


def beyond(call: CallOptions) -> str:
    """What a call asks beyond SDPA, in a phrase: `window 1023/0, sinks`; empty for nothing."""
    packed, is_paged = call.cu_seqlens_q, call.page_table is not None
    parts = [
        str(call.variant),
        "sinks" if call.sinks is not None else "",
        f"{packed.shape[0] - 1} packed sequences" if packed is not None else "",
        "key lengths" if call.seqused_k is not None and not is_paged else "",
        f"pages of {call.key.shape[-2]}" if is_paged else "",
    ]
    return ", ".join(filter(None, parts))


def beyond_arguments(call: CallOptions) -> dict[str, Any]:
    """What a call asks beyond SDPA as keyword arguments: those that change what is computed."""
    asked = features(call)
    given = call.variant.arguments() if asked else {}
    if "bottom-right" not in asked:
        given.pop("bottom_right", None)
    tensors = {name: getattr(call, name) for name in VARIANT_TENSORS}
    return {**{name: each for name, each in tensors.items() if each is not None}, **given}


class KeyRanges(NamedTuple):
    """The keys that causality, window and sequences leave each query: those from first to end."""

    first: Tensor
    """(1, Sq) or (B, Sq) int64."""
    end: Tensor
    """The same; not after `first` where no key is left."""

    def of(self, batch: int) -> tuple[Tensor, Tensor]:
        """Both of one batch element, (Sq,)."""
        row = min(batch, self.first.shape[0] - 1)
        return self.first[row], self.end[row]


class QueryPositions(NamedTuple):
    """What causality and window are relative to, for each query."""

    begin: Tensor
    """(1, Sq) or (B, Sq) int64: the first key of its sequence."""
    length: Tensor
    """How many keys of that sequence count."""
    diagonal: Tensor
    """The key, counted from `begin`, that it lies beside; maybe none."""


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
    """Where each query stands in its sequence; arguments as of `key_ranges`."""
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
    cu_seqlens_q: Tensor | None = None,
    cu_seqlens_k: Tensor | None = None,
    seqused_k: Tensor | None = None,
) -> KeyRanges:
    """Which keys each query sees, before any `attn_mask`.

    Args:
        q_len: queries in all; `kv_len` keys in all.
        cu_seqlens_q: (N + 1,) where each of N packed sequences begins; `cu_seqlens_k` its keys.
        seqused_k: (B,), or (N,) if packed: keys of each sequence that count, from the first.
    """
    begin, end, diagonal = query_positions(
        q_len,
        kv_len,
        device,
        bottom_right=variant.bottom_right,
        cu_seqlens_q=cu_seqlens_q,
        cu_seqlens_k=cu_seqlens_k,
        seqused_k=seqused_k,
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
