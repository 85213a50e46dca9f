"""PyTorch's SDPA with FlashAttention 3 or 4 in place of its own FlashAttention 2.

`torch.nn.attention.activate_flash_attention_impl` (PyTorch 2.11) replaces the flash backend of the
whole process, so the backend is activated and restored around every call, to keep other kernels
unaffected. This costs the host some tens of microseconds (in `host_ms`, and in the time of shorter
calls); a model would activate the backend once. PyTorch contains only adapters: FA3 and FA4 must be
installed as for `fa3` and `fa4`, and each version of PyTorch supports only some of their versions.
"""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Any

import torch
import torch.nn.attention
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel

from capture.hooks.interceptor import TORCH_SDPA
from replay.kernels import constraints as limits
from replay.kernels.adapters import fa3, fa4
from replay.kernels.constraints import all_of
from replay.kernels.libraries import Library, version
from replay.kernels.registry import Attention, Kernel, register


@contextlib.contextmanager
def activated(implementation: str) -> Iterator[None]:
    """Make `FA3` or `FA4` the flash backend inside the block, and restore it afterwards."""
    functions = torch.nn.attention
    before = functions.current_flash_attention_impl()
    functions.activate_flash_attention_impl(implementation)
    try:
        yield
    finally:
        functions.restore_flash_attention_impl()
        if before is not None:
            functions.activate_flash_attention_impl(before)


def _attention(implementation: str) -> Attention:
    def attention(*arguments: Any, **named: Any) -> Tensor:
        if implementation == "FA4":
            fa4.find_cutlass()
        with activated(implementation), sdpa_kernel(SDPBackend.FLASH_ATTENTION):
            return TORCH_SDPA(*arguments, **named)

    return attention


@functools.cache
def _trial(attention: Attention, device: torch.device) -> str | None:
    """Run a small call once, because PyTorch's adapter fails on untested versions of a library."""
    try:
        with torch.no_grad():
            query = torch.zeros(1, 1, 128, 64, dtype=torch.bfloat16, device=device)
            attention(query, query, query)
    except Exception as error:  # a library's adapter may raise anything
        return str(error).strip().partition("\n")[0] or type(error).__name__
    return None


def _unavailable(attention: Attention, library: Library) -> Callable[[torch.device], str | None]:
    def unavailable(device: torch.device) -> str | None:
        if reason := library.wrong_device(device):
            return reason
        if not hasattr(torch.nn.attention, "activate_flash_attention_impl"):
            return f"needs PyTorch 2.11 (this is {torch.__version__})"
        if reason := library.unavailable(device):
            return reason
        if reason := _trial(attention, device):
            installed = f"{library.package} {version(library.package)}".strip()
            return f"PyTorch {torch.__version__} with {installed}: {reason}"
        return None

    return unavailable


for _implementation, _library in {
    "FA3": replace(fa3.LIBRARY, runs_on=lambda capability: capability[0] == 9, needs="9.0"),
    "FA4": replace(
        fa4.LIBRARY, runs_on=lambda capability: capability[0] in (9, 10), needs="9.0 or 10.0"
    ),
}.items():
    _kernel = _attention(_implementation)
    register(
        Kernel(
            f"torch-{_implementation.lower()}",
            _kernel,
            unavailable=_unavailable(_kernel, _library),
            unsupported=all_of(
                limits.no_dropout,
                limits.half_precision,
                limits.no_mask,
                limits.causal_only_square,
                limits.same_value_dim,
                limits.max_head_dim(256),
                limits.multiple_of_8,
                limits.adjacent_elements,
            ),
            about=f"PyTorch's SDPA with {_implementation} activated as its flash backend",
            library=_library.package,
            differentiable=True,
            install=_library.install,
        )
    )
