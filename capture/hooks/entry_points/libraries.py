"""Functions of kernel libraries, called directly: flash-attn 2, 3 and 4, FlashMLA, `varlen_attn`.

`NAMES` translates the names of their arguments. FlashMLA takes no value tensor, because the value
is the first `head_dim_v` columns of the key, in the same memory. A call with arguments that cannot
be translated is only counted.
"""

from __future__ import annotations

import contextlib
import functools
import inspect
import sys
from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from capture.call.attention_variant import AttentionVariant
from capture.call.per_head import SCALES
from capture.hooks.entry_points.wrapper import (
    BHSD,
    BSHD,
    THD,
    OutputLayout,
    Translate,
    int_or_none,
    wrapped_everywhere,
)
from capture.hooks.interceptor import Arguments, Handler

FOLLOWED: dict[str, tuple[str, tuple[str, ...]]] = {
    "flash_attn.flash_attn_interface": (
        "fa2",
        (
            *("flash_attn_func", "flash_attn_qkvpacked_func", "flash_attn_kvpacked_func"),
            *("flash_attn_varlen_func", "flash_attn_varlen_qkvpacked_func"),
            *("flash_attn_varlen_kvpacked_func", "flash_attn_with_kvcache"),
        ),
    ),
    "flash_attn_interface": (
        "fa3",
        (
            *("flash_attn_func", "flash_attn_qkvpacked_func"),
            *("flash_attn_varlen_func", "flash_attn_with_kvcache"),
        ),
    ),
    "vllm.vllm_flash_attn.flash_attn_interface": ("vllm-flash-attn", ("flash_attn_varlen_func",)),
    "flash_attn.cute.interface": ("fa4", ("flash_attn_func", "flash_attn_varlen_func")),
    "flash_mla.flash_mla_interface": ("flash-mla", ("flash_mla_with_kvcache",)),
    "torch.nn.attention.varlen": ("torch-varlen", ("varlen_attn",)),
    "sageattention.core": ("", ("sageattn", "sageattn_varlen")),
    "sageattention": ("", ("sageattn", "sageattn_varlen")),
    "xformers.ops.fmha": ("", ("memory_efficient_attention", "memory_efficient_attention_forward")),
    "flashinfer.decode": ("", ("single_decode_with_kv_cache",)),
    "flashinfer.prefill": ("", ("single_prefill_with_kv_cache",)),
}
"""Name of the kernel, and names of the functions to wrap, for each module.

If the name of the kernel is empty, calls are only counted.
"""

NAMES = {
    "query": "query",
    "key": "key",
    "value": "value",
    "q": "query",
    "k": "key",
    "v": "value",
    "k_cache": "key",
    "v_cache": "value",
    "softmax_scale": "scale",
    "scale": "scale",
    "causal": "is_causal",
    "dropout_p": "dropout_p",
    "softcap": "softcap",
    "window_size": "window",
    "learnable_sink": "sinks",
    "s_aux": "sinks",
    "cu_seqlens_q": "cu_seqlens_q",
    "cu_seqlens_k": "cu_seqlens_k",
    "cu_seqlens": "cu_seqlens_q",
    "cu_seq_q": "cu_seqlens_q",
    "cu_seq_k": "cu_seqlens_k",
    "max_seqlen_q": "max_seqlen_q",
    "max_seqlen_k": "max_seqlen_k",
    "max_seqlen": "max_seqlen_q",
    "max_q": "max_seqlen_q",
    "max_k": "max_seqlen_k",
    "seqused_k": "seqused_k",
    "cache_seqlens": "seqused_k",
    "block_table": "page_table",
    "page_table": "page_table",
}
_CHANGE_NOTHING = {
    *("deterministic", "num_splits", "pack_gqa", "sm_margin", "scheduler_metadata"),
    *("num_heads_q", "enable_gqa", "is_causal", "m_block_size", "n_block_size", "num_threads"),
    *("rotary_interleaved", "tile_scheduler_metadata", "min_seqlen_k", "fa_version"),
}
_DESCALES = {"q_descale": "query", "k_descale": "key", "v_descale": "value"}
"""Arguments (B, Hkv) that scale 8-bit tensors; they are ignored for other tensors."""
_RETURN_MORE = {"return_attn_probs", "return_softmax_lse", "return_lse", "return_aux"}


@contextlib.contextmanager
def follow(handler: Handler) -> Iterator[None]:
    """Pass calls of the libraries' functions to `handler` until the exit."""
    with contextlib.ExitStack() as stack:
        for module, (kernel, names) in FOLLOWED.items():
            for name in names:
                function = getattr(sys.modules.get(module), name, None)
                if callable(function):
                    entry_point = f"{module.partition('.')[0]}.{name}"
                    if kernel:
                        translate = _translation(function, entry_point, kernel)
                    else:
                        translate = functools.partial(_counted, entry_point)
                    stack.enter_context(wrapped_everywhere(function, translate, handler))
        yield


def _translation(function: Callable[..., Any], entry_point: str, kernel: str) -> Translate:
    signature = inspect.signature(function)
    defaults = {name: each.default for name, each in signature.parameters.items()}

    def translate(*args: Any, **kwargs: Any) -> tuple[Arguments, OutputLayout]:
        given = signature.bind(*args, **kwargs).arguments
        named: dict[str, Any] = {}
        refused, returns, out = [], "", None
        for name, value in given.items():
            if name in ("qkv", "kv"):
                parts = _unpacked(value, given.get("num_heads_q"))
                named.update(zip(("query", "key", "value")[-len(parts) :], parts, strict=True))
            elif (name == "k" and "k_cache" in defaults) or (name == "v" and "v_cache" in defaults):
                refused += [] if value is None else ["new keys"] if name == "k" else []
            elif name in NAMES:
                named[NAMES[name]] = value
            elif name == "head_dim_v":
                named["value"] = given["k_cache"][..., :value]
            elif name in _RETURN_MORE:
                returns = "the log-sum-exp" if value else returns
            elif name == "out":
                out = value
            elif (
                name not in _CHANGE_NOTHING
                and name not in _DESCALES
                and not _is_default(value, defaults[name])
            ):
                refused.append(name)
        for name, scaled in _DESCALES.items():
            if named[scaled].element_size() == 1:
                scale = given.get(name)
                if scale is None:
                    scale = torch.ones(1, named["key"].shape[-2], device=named["key"].device)
                if scale.shape[0] > 1 and scale.stride(0) > 0:
                    refused.append(f"a {name} of its own for each sequence")
                else:
                    named[SCALES[scaled]] = scale[0]
        arguments, form = _arguments(named, entry_point, kernel, refused, returns)
        if out is None:
            return arguments, form
        return arguments, replace(form, from_sdpa=lambda output: out.copy_(form.from_sdpa(output)))

    return translate


def _unpacked(packed: Tensor, heads: int | None) -> tuple[Tensor, ...]:
    """Return query, key and value of (…, 3, H, D) or, given Hq, of (…, Hq + 2 Hkv, D)."""
    if heads is None:
        return packed.unbind(-3)
    kv_heads = (packed.shape[-2] - heads) // 2
    return packed.split((heads, kv_heads, kv_heads), -2)


def _is_default(value: Any, default: Any) -> bool:
    return value is default or (not isinstance(value, Tensor) and bool(value == default))


def _arguments(
    named: dict[str, Any], entry_point: str, kernel: str, refused: list[str], returns: str
) -> tuple[Arguments, OutputLayout]:
    starts = {name: named.get(name) for name in ("cu_seqlens_q", "cu_seqlens_k")}
    used, table = named.get("seqused_k"), named.get("page_table")
    is_packed = starts["cu_seqlens_q"] is not None
    query, key, value = (
        tensor.transpose(0, 1)[None] if tensor.ndim == 3 else tensor.transpose(1, 2)
        for tensor in (named[name] for name in ("query", "key", "value"))
    )
    if table is not None:
        if used is None and starts["cu_seqlens_k"] is not None:
            used = starts["cu_seqlens_k"].diff()
        elif used is None:
            used = table.shape[1] * key.shape[2]  # all keys that the pages have room for
        starts["cu_seqlens_k"] = None
    elif is_packed and named["key"].ndim == 4:
        refused = [*refused, "packed queries of a batch of caches"]
    elif starts["cu_seqlens_k"] is None:
        starts["cu_seqlens_k"] = starts["cu_seqlens_q"]
        named.setdefault("max_seqlen_k", named.get("max_seqlen_q"))
    left, right = (
        None if side is None or side < 0 else int(side)
        for side in (named.get("window") or (None, None))
    )
    is_causal = bool(named.get("is_causal", False))
    if kernel == "torch-varlen" and (left, right) == (None, 0):
        is_causal, right = True, None
    softcap = float(named.get("softcap") or 0.0)
    if isinstance(used, int):
        sequences = query if table is None else table
        used = query.new_full((sequences.shape[0],), used, dtype=torch.int32)
    return Arguments.of(
        query,
        key,
        value,
        None,
        dropout_p=named.get("dropout_p") or 0.0,
        is_causal=is_causal,
        scale=named.get("scale"),
        sinks=named.get("sinks"),
        **starts,
        seqused_k=used,
        page_table=table,
        **{name: named.get(name) for name in SCALES.values()},
        variant=AttentionVariant(
            bottom_right=is_causal or (left, right) != (None, None),
            window=(left, right),
            softcap=softcap if softcap > 0 else None,
            max_seqlen_q=int_or_none(named.get("max_seqlen_q")) if is_packed else None,
            max_seqlen_k=int_or_none(named.get("max_seqlen_k")) if is_packed else None,
        ),
        entry_point=entry_point,
        backend=kernel,
        refusal=f"takes {', '.join(refused)}" if refused else "",
        returns=returns,
    ), THD if is_packed else BSHD


def _counted(
    entry_point: str, query: Tensor, key: Tensor, value: Tensor, *others: Any, **options: Any
) -> tuple[Arguments, OutputLayout]:
    reason = f"{entry_point} is counted, not recorded"
    sdpas = (query, key, value, None, 0.0, False, None, False)
    return Arguments(*sdpas, entry_point=entry_point, backend=entry_point, refusal=reason), BHSD
