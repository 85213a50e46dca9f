"""Transformer Engine: `transformer_engine.pytorch.DotProductAttention`, a kernel for each backend.

Environment variables (`NVTE_FLASH_ATTN`, `NVTE_FUSED_ATTN`, `NVTE_UNFUSED_ATTN`) choose the
backend. The library reads the variables when it is imported and at the first call of each kind, and
caches the choice. A process can therefore run only one of the three kernels. Each kernel has its
own worker; without workers, only the first kernel runs, and the other two are refused. The library
takes BSHD and returns the heads joined, (B, S, Hq · Dv).

The adapter passes no mask. The library supports both alignments of causal calls, but aligns windows
bottom right, so a call aligned top left with a window needs as many queries as keys.
"""

from __future__ import annotations

import functools
import importlib.util
import os
import sys
from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import Tensor

from capture.hooks.interceptor import Arguments
from replay.kernels import constraints as limits
from replay.kernels.constraints import AnyCall
from replay.kernels.layout import contiguous_bshd, in_layout
from replay.kernels.libraries import Library, version
from replay.kernels.wrapping import at_once, register_adapted

LIBRARY = Library(
    module="transformer_engine.pytorch",
    package="transformer-engine",
    install="pip install --no-build-isolation transformer-engine[pytorch]",
    functions=("DotProductAttention",),
)

SWITCHES = {"flash": "NVTE_FLASH_ATTN", "fused": "NVTE_FUSED_ATTN", "unfused": "NVTE_UNFUSED_ATTN"}

_chosen: str | None = None
"""Backend of this process; None before the first call."""


def choose(backend: str) -> None:
    """Choose the backend of this process, before the library is imported.

    Raises:
        RuntimeError: another backend has already been chosen.
    """
    global _chosen
    if _chosen == backend:
        return
    if reason := _taken(backend):
        raise RuntimeError(reason)
    for each, switch in SWITCHES.items():
        os.environ[switch] = str(int(each == backend))
    _chosen = backend


def _taken(backend: str) -> str | None:
    if _chosen not in (None, backend):
        return (
            f"this process runs te-{_chosen}, and Transformer Engine has one backend per process: "
            f"name te-{backend} alone"
        )
    if _chosen is None and LIBRARY.module in sys.modules:
        return "Transformer Engine was imported before its backend could be chosen"
    return None


def _unavailable(backend: str, device: torch.device) -> str | None:
    if reason := _taken(backend):
        return reason
    if _chosen == backend:
        return LIBRARY.unavailable(device)
    # Do not import the library here, because the import would choose the backend.
    if reason := LIBRARY.wrong_device(device):
        return reason
    if not version(LIBRARY.package) and importlib.util.find_spec("transformer_engine") is None:
        return f"not installed: {LIBRARY.install}"
    return None


@functools.lru_cache(maxsize=16)
def _module(
    heads: int, head_dims: tuple[int, int], kv_heads: int, scale: float | None, is_cross: bool
) -> Callable[..., Tensor]:
    module: Any = LIBRARY.load()
    return module.DotProductAttention(
        num_attention_heads=heads,
        kv_channels=head_dims[0] if head_dims[0] == head_dims[1] else head_dims,
        num_gqa_groups=kv_heads,
        attention_dropout=0.0,
        qkv_format="bshd",
        attn_mask_type="no_mask",
        attention_type="cross" if is_cross else "self",
        softmax_scale=scale,
    )


def _mask_type(call: Arguments) -> str:
    if not call.is_causal:
        return "no_mask"
    return "causal_bottom_right" if call.variant.bottom_right else "causal"


def _window(call: Arguments) -> dict[str, tuple[int, int]]:
    """Return the window argument; causal windows end at the diagonal, others have two sides."""
    left, right = call.variant.window
    if (left, right) == (None, None):
        return {}
    if call.is_causal:
        return {"window_size": (-1 if left is None else left, 0)}
    no_limit = call.query.shape[1] + call.key.shape[1]
    return {
        "window_size": (no_limit if left is None else left, no_limit if right is None else right)
    }


def _run(call: Arguments, backend: str) -> Tensor:
    choose(backend)
    _, q_len, heads, head_dim = call.query.shape
    _, kv_len, kv_heads, _ = call.key.shape
    output = _module(heads, (head_dim, call.value.shape[3]), kv_heads, call.scale, q_len != kv_len)(
        call.query,
        call.key,
        call.value,
        qkv_format="bshd",
        attn_mask_type=_mask_type(call),
        **_window(call),
    )
    return output.unflatten(2, (heads, -1))


def _prepare(call: AnyCall, backend: str) -> Callable[[], Tensor]:
    """Copy the tensors, because the fused backend ignores strides (2.20.2)."""
    laid_out = in_layout(call, contiguous_bshd)
    return lambda: _run(laid_out, backend).transpose(1, 2)


for _backend, _about in {
    "flash": "Transformer Engine on FlashAttention",
    "fused": "Transformer Engine on cuDNN's fused attention",
    "unfused": "Transformer Engine's unfused attention",
}.items():
    _own_prepare = partial(_prepare, backend=_backend)
    register_adapted(
        f"te-{_backend}",
        LIBRARY,
        at_once(_own_prepare),
        (
            limits.no_dropout,
            limits.half_precision,
            limits.no_mask,
            limits.causal_only_square,
            limits.multiple_of_8,
            limits.max_head_dim(256),
        ),
        _about,
        prepare=_own_prepare,
        unavailable=partial(_unavailable, _backend),
        own_process=True,
        differentiable=True,
        features=("bottom-right", "window"),
    )
