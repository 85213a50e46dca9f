"""Errors of a call's attention over rounded caches."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

import torch

from capture.call.attention_call import AttentionCall
from replay.accuracy.cache_formats import CacheFormat, stored
from replay.accuracy.errors import compare
from replay.accuracy.nonfinite import visible_blocks
from replay.accuracy.reference import attention


@dataclass(frozen=True)
class CacheError:
    """Error of the output of one call over a cache of one format.

    Both outputs are computed in float64 from the recorded query, the exact one also from the
    recorded keys and values.
    """

    call: str
    layer: str
    """Dotted path of the module that made the call."""
    phase: str
    format: str
    cosine: float
    """Cosine similarity of the flattened outputs."""
    relative_l1: float
    """Σ|output - exact| / Σ|exact|."""
    rmse: float
    """Root of the mean squared error."""


def cache_errors(
    name: str, call: AttentionCall, formats: Sequence[CacheFormat], report: Callable[[str], None]
) -> list[CacheError]:
    """Compare the outputs of a call over rounded caches with that over the recorded one.

    Keys that no query sees are ignored: they do not count for the scales that keys share.

    Args:
        name: name of the call.
        report: called with each format before it is computed.

    Raises:
        ValueError: the recorded cache is in 8 bits, or a query sees NaN or infinite keys or values.
    """
    if call.key.dtype.itemsize == 1:
        dtype = str(call.key.dtype).removeprefix("torch.")
        raise ValueError(f"its cache was in {dtype}: record the model with a cache in 16 bits")
    call = _without_hidden_keys(_gathered(call))
    if not all(bool(torch.isfinite(each).all()) for each in (call.key, call.value)):
        raise ValueError("a query sees NaN or infinite keys or values: see `replay doctor`")
    exact, found = attention(call), []
    for chosen in formats:
        report(chosen.name)
        errors = compare(attention(stored(call, chosen.key, chosen.value)), exact)
        place = name, call.origin.module, call.origin.phase, chosen.name
        found.append(CacheError(*place, errors.cosine, errors.relative_l1, errors.rmse))
    return found


def _gathered(call: AttentionCall) -> AttentionCall:
    """Return the call without pages; values that lie in their keys (absorbed MLA) stay there."""
    whole = call.without_pages()
    if not call.value_is_in_key:
        return whole
    return replace(whole, value=whole.key[..., : whole.value.shape[-1]])


def _without_hidden_keys(call: AttentionCall) -> AttentionCall:
    """Return the call with zeros for the keys and values that no query sees."""
    seen = torch.zeros(call.key.shape[:3], dtype=torch.bool, device=call.device)
    for block in visible_blocks(call):
        seen[block.batch, block.kv_head] |= block.visible.any(0).any(0)
    hidden = ~seen[..., None]
    return stored(
        call, lambda key: key.masked_fill(hidden, 0), lambda value: value.masked_fill(hidden, 0)
    )
