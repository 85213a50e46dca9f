"""transformers' attention registry: `ALL_ATTENTION_FUNCTIONS.get_interface(…)(module, q, k, v, …)`.

Models look up their function at each call: `eager`, which each model's file defines;
`flash_attention_2` and similar; `flex_attention`; or a registered name. The function that the
look-up returns is wrapped, so that the name, which also selects the kind of mask, stays the same.
`sdpa` calls SDPA, so it is not wrapped here.
"""

from __future__ import annotations

import contextlib
import functools
import sys
from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from capture.call.attention_variant import PLAIN, AttentionVariant, Window
from capture.hooks.entry_points import continuous_batching, flex_attention
from capture.hooks.entry_points.wrapper import (
    BSHD_AND_WEIGHTS,
    OutputLayout,
    Translate,
    int_or_none,
    wrapped,
)
from capture.hooks.interceptor import Arguments, Handler

ENTRY_POINT = "transformers"
_MODELING = "transformers.modeling_utils"

_HARMLESS = {
    *("module", "query", "key", "value", "attention_mask", "scaling", "dropout", "is_causal"),
    *("sliding_window", "softcap", "s_aux", "sinks", "position_bias", "kwargs", "cache"),
}
"""Arguments of `eager_attention_forward` functions that are translated."""


@contextlib.contextmanager
def follow(handler: Handler) -> Iterator[None]:
    """Pass calls of the registry's functions to `handler` until the exit."""
    modeling = sys.modules.get(_MODELING)
    interface = getattr(modeling, "AttentionInterface", None)
    if interface is None:
        yield
        return
    wrappers: dict[tuple[str | None, object], Callable[..., Any]] = {}

    def with_handler(name: str | None, function: Callable[..., Any]) -> Callable[..., Any]:
        translate, of_batch = _translation(name, function), _batch_translation(name, function)
        is_left = translate is None and (of_batch is None or torch.compiler.is_compiling())
        if is_left or function in wrappers.values():
            return function
        if (name, function) not in wrappers:
            called = flex_attention.as_compiled(function) if translate is _flex else function
            wrapper = function if translate is None else wrapped(called, translate, handler)
            if of_batch is not None:
                wrapper = continuous_batching.with_updated_cache(
                    function, of_batch, handler, wrapper
                )
            wrappers[name, function] = wrapper
        return wrappers[name, function]

    def get_interface(self: Any, attn_implementation: str, default: Callable[..., Any]) -> Any:
        return with_handler(
            attn_implementation, originals["get_interface"](self, attn_implementation, default)
        )

    def getitem(self: Any, key: str) -> Any:
        return with_handler(key, looked_up(self, key))

    looked_up = interface.__getitem__
    replacements = {"get_interface": get_interface, "__getitem__": getitem}
    # In older versions models look up functions with `[name]`.
    originals = {name: vars(interface).get(name) for name in replacements}
    if originals["get_interface"] is None:
        del replacements["get_interface"]
    for name, replacement in replacements.items():
        setattr(interface, name, replacement)
    try:
        yield
    finally:
        for name in replacements:
            if originals[name] is None:
                delattr(interface, name)
            else:
                setattr(interface, name, originals[name])


def _translation(name: str | None, function: Callable[..., Any]) -> Translate | None:
    defined_in = getattr(function, "__module__", "")
    if name == "sdpa" or defined_in == "transformers.integrations.sdpa_attention":
        return None
    if defined_in == "transformers.integrations.flash_attention":
        return functools.partial(_flash, name or "flash_attention_2")
    if name is not None and name.startswith("flash_attention"):
        return functools.partial(_flash, name)
    if defined_in == "transformers.integrations.flex_attention" or name == "flex_attention":
        return _flex
    return _eager(function, name)


def _batch_translation(name: str | None, function: Callable[..., Any]) -> Translate | None:
    """Return the translation of calls whose cache was updated; None for other functions."""
    defined_in = getattr(function, "__module__", "")
    if defined_in == "transformers.integrations.flash_attention":
        return functools.partial(_flash_batch, name or "flash_attention_2")
    return continuous_batching.MASKED.get(defined_in)


def _flash_batch(
    name: str, module: Any, query: Tensor, key: Tensor, value: Tensor, *args: Any, **kwargs: Any
) -> tuple[Arguments, OutputLayout]:
    """Translate a batch of packed sequences, or of one query each with its keys in pages."""
    backend = _FLASH_KERNELS.get(name, f"transformers.{name}")
    table = kwargs.pop("block_table", None)
    if table is not None:
        return continuous_batching.paged(backend, query, key, value, table, **kwargs)
    if continuous_batching.is_padded(query, key, **kwargs):
        return continuous_batching.refused_as_padded(backend, query, key, value)
    return _flash(name, module, query, key, value, *args, **kwargs)


def _eager(function: Callable[..., Any], name: str | None) -> Translate:
    """Return the translation of calls of a function that takes an additive or bool mask."""
    code = getattr(function, "__code__", None)
    names = set(code.co_varnames[: code.co_argcount + code.co_kwonlyargcount]) if code else set()
    has_sinks = code is not None and ("sinks" in code.co_names or "sinks" in names)
    is_own = getattr(function, "__name__", "") == "eager_attention_forward"

    def translate(
        module: Any,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        attention_mask: Tensor | None,
        scaling: float | None = None,
        dropout: float = 0.0,
        **others: Any,
    ) -> tuple[Arguments, OutputLayout]:
        mask = attention_mask
        if mask is not None:
            mask = mask[..., : key.shape[-2]]
        bias = others.get("position_bias") if "position_bias" in names or not is_own else None
        if bias is not None:
            mask = bias if mask is None else bias + mask
        # A model's own function applies only its mask. Registered functions follow transformers'
        # SDPA function, which is causal without a mask.
        is_causal = False
        if not is_own and mask is None and query.shape[2] > 1:
            asked = others.get("is_causal")
            is_causal = bool(getattr(module, "is_causal", True) if asked is None else asked)
        softcap = others.get("softcap") if "softcap" in names or not is_own else None
        sinks = None
        if has_sinks or not is_own:
            given = [others[name] for name in ("s_aux", "sinks") if others.get(name) is not None]
            sinks = given[0] if given else getattr(module, "sinks", None) if has_sinks else None
        return _arguments(
            (query, key, value, mask),
            dropout_p=dropout if module.training else 0.0,
            is_causal=is_causal,
            scale=scaling,
            backend="eager" if is_own else f"transformers.{name}",
            sinks=sinks,
            variant=AttentionVariant(softcap=softcap) if softcap else PLAIN,
            refusal=_refusal(others, names - _HARMLESS),
            returns=_returns(module, others),
        )

    return translate


def _flash(
    name: str,
    module: Any,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    dropout: float = 0.0,
    scaling: float | None = None,
    sliding_window: int | None = None,
    softcap: float | None = None,
    is_causal: bool | None = None,
    s_aux: Tensor | None = None,
    **others: Any,
) -> tuple[Arguments, OutputLayout]:
    causal = bool(module.is_causal if is_causal is None else is_causal) and query.shape[2] > 1
    window: Window = (None, None)
    if sliding_window is not None and key.shape[2] > sliding_window:
        window = (sliding_window - 1, sliding_window - 1)
    mask, packed = None, _NOT_PACKED
    if attention_mask is not None:
        mask = attention_mask[:, None, None, : key.shape[2]]
    else:
        packed = _packed(query, others)
    starts_q, starts_k, longest_q, longest_k = packed
    return _arguments(
        (query, key, value, mask),
        dropout_p=dropout,
        is_causal=causal,
        scale=scaling,
        backend=_FLASH_KERNELS.get(name, f"transformers.{name}"),
        sinks=s_aux,
        variant=AttentionVariant(
            bottom_right=causal or window != (None, None),
            window=window,
            softcap=softcap or None,
            max_seqlen_q=longest_q,
            max_seqlen_k=longest_k,
        ),
        refusal=_refusal(others, {"indices", "block_indices"}),
        returns=_returns(module, others),
        cu_seqlens_q=starts_q,
        cu_seqlens_k=starts_k,
    )


_Packed = tuple[Tensor | None, Tensor | None, int | None, int | None]
"""First query and first key of each sequence, then the maximum numbers of queries and keys."""
_NOT_PACKED: _Packed = (None, None, None, None)


def _packed(query: Tensor, others: dict[str, Any]) -> _Packed:
    """Find packed sequences as transformers' `_flash_attention_forward` does.

    Either the arguments contain the starts of the sequences, or the position ids of a batch of one
    restart at each sequence.
    """
    names = ("cu_seq_lens_q", "cu_seq_lens_k", "max_length_q", "max_length_k")
    starts_q, starts_k, *longest = (others.get(name) for name in names)
    if starts_q is not None and starts_k is not None:
        longest_q, longest_k = map(int_or_none, longest)
        return starts_q, starts_k, longest_q, longest_k
    positions = others.get("position_ids")
    batch, _, q_len, _ = query.shape
    if positions is None or batch != 1 or q_len == 1 or positions.numel() != q_len:
        return _NOT_PACKED
    positions = positions.flatten()
    first = positions.min()
    if torch.equal(positions, first + torch.arange(q_len, device=positions.device)):
        return _NOT_PACKED
    (begins,) = torch.where(positions == first)
    starts = torch.cat([begins, begins.new_tensor([q_len])]).int()
    longest_of_all = int(starts.diff().max())
    return starts, starts, longest_of_all, longest_of_all


_FLASH_KERNELS = {
    "flash_attention_2": "fa2",
    "flash_attention_3": "fa3",
    "flash_attention_4": "fa4",
}


def _flex(
    module: Any,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Any,
    scaling: float | None = None,
    softcap: float | None = None,
    s_aux: Tensor | None = None,
    position_bias: Tensor | None = None,
    **others: Any,
) -> tuple[Arguments, OutputLayout]:
    mask, refusal = flex_attention.mask_of(attention_mask, query, key)
    if position_bias is not None:
        mask, refusal = None, refusal or "a position bias with FlexAttention"
    return _arguments(
        (query, key, value, mask),
        scale=scaling,
        backend="flex",
        sinks=s_aux,
        variant=AttentionVariant(softcap=softcap) if softcap else PLAIN,
        refusal=refusal or _refusal(others, {"indices", "block_indices"}),
        returns=_returns(module, others),
    )[0], _FLEX_OUTPUT


_FLEX_OUTPUT = replace(BSHD_AND_WEIGHTS, is_learned=False)
"""Layout of a function that would first compile, and that returns a log-sum-exp as the weights."""


def _arguments(
    tensors: tuple[Any, ...], *, sinks: Tensor | None, refusal: str, **options: Any
) -> tuple[Arguments, OutputLayout]:
    if sinks is not None and sinks.numel() != tensors[0].shape[1]:
        sinks, refusal = None, refusal or "takes a sink for each query"
    return Arguments.of(
        *tensors,
        sinks=None if sinks is None else sinks.flatten(),
        entry_point=ENTRY_POINT,
        refusal=refusal,
        **options,
    ), BSHD_AND_WEIGHTS


def _refusal(others: dict[str, Any], unknown: set[str]) -> str:
    """Return why SDPA's arguments cannot express a call; empty if they can."""
    if others.get("cache") is not None or others.get("block_table") is not None:
        return "a paged key/value cache"
    given = sorted(name for name in unknown if others.get(name) is not None)
    return f"takes {', '.join(given)}" if given else ""


def _returns(module: Any, others: dict[str, Any]) -> str:
    """Return the results that a model requests in addition to the output; empty for none."""
    asked = others.get("output_attentions")
    if asked is None:
        asked = getattr(getattr(module, "config", None), "output_attentions", False)
    return "attention weights" if asked else ""
