"""Continuous batching of transformers: packed sequences, whose earlier keys lie in a paged cache.

The attention functions of `generate_batch` first write the new keys to the cache, and read all keys
of the batch from it. Here the cache is updated before the call, as the function itself would do,
because only then is it known which keys the call has. The function then runs without the cache.

Functions with a mask get one that separates the sequences. Such a call is packed if the lengths of
the sequences say the same as the mask.
"""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor
from torch.utils.weak import WeakTensorKeyDictionary

from capture.call.attention_variant import AttentionVariant, Window, key_ranges
from capture.call.mask_structure import shows_exactly
from capture.hooks.entry_points.wrapper import (
    BSHD_AND_WEIGHTS,
    OutputLayout,
    Translate,
    wrapped,
)
from capture.hooks.interceptor import Arguments, Handler, is_inside

EAGER = "transformers.integrations.eager_paged"
"""Module of the function without fused kernels, which demands a cache."""


class _UpdatedCache:
    """Cache of a function whose arguments already are the keys and values to attend to."""

    def update(
        self, key_states: Tensor, value_states: Tensor, **others: Any
    ) -> tuple[Tensor, Tensor]:
        return key_states, value_states


def with_updated_cache(
    function: Callable[..., Any],
    translate: Translate,
    handler: Handler,
    without_cache: Callable[..., Any],
) -> Callable[..., Any]:
    """Return a function whose calls pass through `handler` after the update of their cache.

    Args:
        function: attention function of transformers.
        translate: translation of a call after the update, which has added to the arguments.
        without_cache: function for all other calls.
    """
    attend = wrapped(function, translate, handler)
    updated = {"cache": _UpdatedCache()} if function.__module__ == EAGER else {}

    @functools.wraps(function)
    def wrapper(module: Any, query: Any, key: Any, value: Any, *args: Any, **kwargs: Any) -> Any:
        cache = kwargs.get("cache")
        if cache is None or torch.compiler.is_compiling() or is_inside():
            return without_cache(module, query, key, value, *args, **kwargs)
        captures = query.is_cuda and torch.cuda.is_current_stream_capturing()
        if captures or not _is_known(getattr(type(cache), "update", None)):
            return without_cache(module, query, key, value, *args, **kwargs)
        del kwargs["cache"]
        key, value = cache.update(
            key_states=key, value_states=value, layer_idx=module.layer_idx, kwargs=kwargs
        )
        return attend(module, query, key, value, *args, **kwargs, **updated)

    return wrapper


@functools.lru_cache(maxsize=64)
def _is_known(update: Any) -> bool:
    """Return whether a cache's `update` has the form used here; older versions have others."""
    names = ["self", "key_states", "value_states", "layer_idx", "kwargs"]
    return update is not None and [*inspect.signature(update).parameters] == names


def _masked(
    backend: str,
    module: Any,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor,
    *,
    cu_seq_lens_q: Tensor,
    cu_seq_lens_k: Tensor,
    max_length_q: int,
    max_length_k: int,
    scaling: float | None = None,
    dropout: float = 0.0,
    sliding_window: int | None = None,
    position_bias: Tensor | None = None,
    **others: Any,
) -> tuple[Arguments, OutputLayout] | None:
    """Translate a batch with a mask; None for a call that SDPA receives with its mask."""
    sinks = None
    if backend == "eager":  # this function ignores the other two
        sinks, dropout, position_bias = getattr(module, "sinks", None), 0.0, None
    options: dict[str, Any] = {
        "dropout_p": dropout,
        "scale": scaling,
        "sinks": None if sinks is None else sinks.detach(),
        "entry_point": "transformers",
        "backend": backend,
    }
    window = (None if sliding_window is None else sliding_window - 1, None)
    starts = cu_seq_lens_q, cu_seq_lens_k
    if position_bias is None and is_what_lengths_say(attention_mask, *starts, window):
        arguments = Arguments.of(
            query,
            key,
            value,
            None,
            is_causal=True,
            cu_seqlens_q=cu_seq_lens_q,
            cu_seqlens_k=cu_seq_lens_k,
            variant=AttentionVariant(
                bottom_right=True,
                window=window,
                max_seqlen_q=max_length_q,
                max_seqlen_k=max_length_k,
            ),
            **options,
        )
    elif backend == "eager":
        arguments = Arguments.of(query, key, value, attention_mask, **options)
    else:
        return None
    return arguments, BSHD_AND_WEIGHTS


MASKED: dict[str, Translate] = {
    EAGER: functools.partial(_masked, "eager"),
    "transformers.integrations.sdpa_attention": functools.partial(_masked, "transformers.sdpa"),
}
"""Translations of functions that take a mask, by their module."""


def paged(
    backend: str,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    table: Tensor,
    *,
    k_cache: Tensor,
    v_cache: Tensor,
    cu_seq_lens_q: Tensor,
    cu_seq_lens_k: Tensor,
    scaling: float | None = None,
    softcap: float | None = None,
    s_aux: Tensor | None = None,
    **others: Any,
) -> tuple[Arguments, OutputLayout]:
    """Translate a batch of one query each, and write the new keys and values to their pages.

    The kernel of flash-attn writes the same values to the same places.

    Args:
        query: (1, Hq, N, D).
        key: new key of each sequence, (1, Hkv, N, D), as is `value`.
        table: (N, n) pages of each sequence.
        k_cache: pool of pages (P, page_size, Hkv, D), as is `v_cache`.
    """
    if is_padded(query, None, cu_seq_lens_q):
        return refused_as_padded(backend, query, key, value)
    lengths = cu_seq_lens_k.diff()
    last, page_size = (lengths - 1).long(), k_cache.shape[1]
    pages = table.gather(1, (last // page_size)[:, None])[:, 0].long()
    for pool, states in ((k_cache, key), (v_cache, value)):
        pool[pages, last % page_size] = states[0].transpose(0, 1).to(pool.dtype)
    arguments = Arguments.of(
        query.transpose(0, 2),
        k_cache.transpose(1, 2),
        v_cache.transpose(1, 2),
        None,
        scale=scaling,
        sinks=None if s_aux is None else s_aux.detach(),
        seqused_k=lengths,
        page_table=table,
        variant=AttentionVariant(softcap=softcap or None),
        entry_point="transformers",
        backend=backend,
    )
    return arguments, _ONE_QUERY_EACH


_ONE_QUERY_EACH = replace(
    BSHD_AND_WEIGHTS,
    to_sdpa=lambda output: output.transpose(0, 1).transpose(1, 2),
    from_sdpa=lambda output: output.transpose(1, 2).transpose(0, 1).contiguous(),
)
"""Layout of N sequences with one query each, whose outputs are returned as (1, N, Hq, Dv)."""


def refused_as_padded(
    backend: str, query: Tensor, key: Tensor, value: Tensor
) -> tuple[Arguments, OutputLayout]:
    """Return a call that is only counted, since no sequence has its last queries or keys."""
    arguments = Arguments.of(query, key, value, None, entry_point="transformers", backend=backend)
    return arguments._replace(refusal="a batch padded for CUDA graphs"), BSHD_AND_WEIGHTS


_totals: WeakTensorKeyDictionary = WeakTensorKeyDictionary()
"""Last elements of the starts of sequences, which all layers share."""


def is_padded(
    query: Tensor,
    key: Tensor | None,
    cu_seq_lens_q: Tensor,
    cu_seq_lens_k: Tensor | None = None,
    **others: Any,
) -> bool:
    """Return whether a batch has more queries or keys (1, H, S, D) than its sequences.

    Waits for the GPU, once for each batch.
    """
    for states, starts in ((query, cu_seq_lens_q), (key, cu_seq_lens_k)):
        if states is None or starts is None:
            continue
        if starts not in _totals:
            _totals[starts] = int(starts[-1])
        if _totals[starts] != states.shape[2]:
            return True
    return False


_says_the_same: WeakTensorKeyDictionary = WeakTensorKeyDictionary()
"""Windows with which a mask says the same as the lengths, and others; all layers share a mask."""


def is_what_lengths_say(
    attn_mask: Tensor, starts_q: Tensor, starts_k: Tensor, window: Window
) -> bool:
    """Return whether a mask is that of packed sequences, causal and aligned bottom right.

    Waits for the GPU, once for each mask.

    Args:
        attn_mask: mask for Sq queries and Sk keys, added to the scores.
        starts_q: (N + 1,) first query of each sequence, then the total.
        starts_k: (N + 1,) first key of each sequence, then the total.
    """
    known: dict[Window, bool] = _says_the_same.setdefault(attn_mask, {})
    if window not in known:
        known[window] = _compare(attn_mask, starts_q, starts_k, window)
    return known[window]


def _compare(attn_mask: Tensor, starts_q: Tensor, starts_k: Tensor, window: Window) -> bool:
    q_len, kv_len = int(starts_q[-1]), int(starts_k[-1])
    if attn_mask.shape[-2:] != (q_len, kv_len):  # a padded batch has a larger mask
        return False
    ranges = key_ranges(
        q_len,
        kv_len,
        attn_mask.device,
        is_causal=True,
        variant=AttentionVariant(bottom_right=True, window=window),
        cu_seqlens_q=starts_q,
        cu_seqlens_k=starts_k,
    )
    return shows_exactly(attn_mask, ranges, kv_len)
