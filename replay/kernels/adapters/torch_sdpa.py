"""PyTorch's own SDPA: each backend is an eager, a compiled and an autotuned kernel.

`torch-default` lets PyTorch choose the backend, as a model does. `-compiled` is `torch.compile` in
its default mode, `-autotuned` in `max-autotune`, which on a GPU also records CUDA graphs.
"""

from __future__ import annotations

import contextlib
import warnings
from collections.abc import Callable
from functools import partial
from types import FunctionType
from typing import Any

import torch
from torch import Tensor
from torch.backends import cuda
from torch.nn.attention import SDPBackend, sdpa_kernel

from capture.call.attention_call import AttentionCall
from capture.hooks.interceptor import TORCH_SDPA
from replay.kernels.compiled_functions import CompiledPerSignature, import_compiler
from replay.kernels.constraints import mask_or_causal, no_dropout
from replay.kernels.registry import Attention, Kernel, register
from replay.timing.machine import available_bytes

BACKENDS = {
    "torch-default": None,
    "torch-math": SDPBackend.MATH,
    "torch-flash": SDPBackend.FLASH_ATTENTION,
    "torch-efficient": SDPBackend.EFFICIENT_ATTENTION,
    "torch-cudnn": SDPBackend.CUDNN_ATTENTION,
}
_ABOUT = {
    "torch-default": "SDPA with the backend that PyTorch chooses",
    "torch-math": "matmul, softmax, matmul",
    "torch-flash": "FlashAttention 2 as built into PyTorch",
    "torch-efficient": "memory-efficient attention (from xFormers) as built into PyTorch",
    "torch-cudnn": "cuDNN's fused attention",
}
ALWAYS_FREE = 8 * 2**20
"""Bytes that are assumed to be free."""
_MODES = {"": "", "-compiled": "default", "-autotuned": "max-autotune"}
_ON_CPU = (None, SDPBackend.MATH, SDPBackend.FLASH_ATTENTION)


_SWITCHES: dict[SDPBackend, tuple[Callable[[], bool], Callable[[bool], None]]] = {
    SDPBackend.MATH: (cuda.math_sdp_enabled, cuda.enable_math_sdp),
    SDPBackend.FLASH_ATTENTION: (cuda.flash_sdp_enabled, cuda.enable_flash_sdp),
    SDPBackend.EFFICIENT_ATTENTION: (cuda.mem_efficient_sdp_enabled, cuda.enable_mem_efficient_sdp),
    SDPBackend.CUDNN_ATTENTION: (cuda.cudnn_sdp_enabled, cuda.enable_cudnn_sdp),
}
"""Functions that read and set a backend's switch, which PyTorch respects on CPUs too."""


def _eager(backend: SDPBackend | None) -> Attention:
    """Return SDPA, restricted to one backend or unrestricted.

    A user restricts a whole model once, but here other kernels run between the calls, so every call
    sets the switches. `sdpa_kernel` takes longer than a short call (8 µs compared with 6 µs on an
    AMD EPYC); setting the switches directly takes 1 µs.
    """
    if backend is None:
        return TORCH_SDPA
    traceable = _to_compile(backend)
    switches = [(*switch, each == backend) for each, switch in _SWITCHES.items()]

    def attention(*arguments: Any, **named: Any) -> Tensor:
        if torch.compiler.is_compiling():  # reading a switch would split the graph
            return traceable(*arguments, **named)
        changed = []
        try:
            for is_enabled, enable, wanted in switches:
                if is_enabled() != wanted:
                    enable(wanted)
                    changed.append((enable, not wanted))
            return TORCH_SDPA(*arguments, **named)
        finally:
            for enable, before in changed:
                enable(before)

    return attention


def _to_compile(backend: SDPBackend | None) -> FunctionType:
    """Return SDPA, possibly restricted, in a form that `torch.compile` can trace.

    The restriction is inside the function because PyTorch's compile cache ignores restrictions
    around it: under `sdpa_kernel(MATH)`, the cache returns a graph made for flash (torch 2.13).
    """

    def attention(*arguments: Any, **named: Any) -> Tensor:
        if backend is None:
            return TORCH_SDPA(*arguments, **named)
        with sdpa_kernel(backend):
            return TORCH_SDPA(*arguments, **named)

    assert isinstance(attention, FunctionType)
    return attention


def _unavailable(backend: SDPBackend | None, device: torch.device) -> str | None:
    if device.type == "cpu" and backend not in _ON_CPU:
        return "PyTorch has it on GPUs only"
    if backend == SDPBackend.CUDNN_ATTENTION and not torch.backends.cudnn.is_available():
        return "this PyTorch has no cuDNN"
    return None


def _unsupported(backend: SDPBackend | None, call: AttentionCall) -> str | None:
    """Return PyTorch's own reason for refusing the call on this backend."""
    if reason := mask_or_causal(call) or no_dropout(call):
        return reason
    only = contextlib.nullcontext() if backend is None else sdpa_kernel(backend)
    with only, warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        try:
            torch._fused_sdp_choice(
                call.query,
                call.key,
                call.value,
                call.attn_mask,
                call.dropout_p,
                call.is_causal,
                scale=call.scale,
                enable_gqa=call.enable_gqa,
            )
        except RuntimeError as error:
            return _reason([str(warning.message) for warning in caught]) or str(error)
    return _too_large_for_math(call) if backend == SDPBackend.MATH else None


def _too_large_for_math(call: AttentionCall) -> str | None:
    """Refuse CPU calls so large that the system would end the process instead of raising."""
    shape = call.shape
    # Scores and probabilities take at least four bytes per element.
    needed = 2 * shape.batch * shape.q_heads * shape.q_len * shape.kv_len * 4
    # Reading the free memory takes as long as a short call.
    if call.device.type != "cpu" or needed < ALWAYS_FREE or needed < available_bytes(call.device):
        return None
    return f"its score matrices need {needed / 1e9:.0f} GB of memory"


def _reason(messages: list[str]) -> str:
    """Return the first warning that states why a backend refuses a call; empty if there is none."""
    sentences = [message.partition(" (Triggered internally")[0].strip() for message in messages]
    return next(
        (
            sentence
            for sentence in sentences
            if "not used because" not in sentence and "runtime disabled" not in sentence
        ),
        "",
    )


for _suffix, _mode in _MODES.items():
    for _name, _backend in BACKENDS.items():
        register(
            Kernel(
                f"{_name}{_suffix}",
                CompiledPerSignature(_to_compile(_backend), _mode) if _mode else _eager(_backend),
                unavailable=partial(_unavailable, _backend),
                unsupported=partial(_unsupported, _backend),
                default=not _mode,
                about=f"{_name} under torch.compile(mode={_mode!r})" if _mode else _ABOUT[_name],
                library="torch",
                differentiable=True,
                warm_up=import_compiler if _mode else None,
            )
        )
