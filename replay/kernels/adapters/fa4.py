"""FlashAttention 4: the package `flash-attn-4` (`flash_attn.cute.flash_attn_func`, CuTe DSL).

Its fourth positional argument is not the scale, so everything is passed by keyword; it returns the
output and the log-sum-exp. It compiles a kernel at the first call of each kind. Masks would have to
be functions of indices (`mask_mod`), which a recorded mask is not.
"""

from __future__ import annotations

import importlib.util
import sys
from pathlib import Path
from types import ModuleType

import torch
from torch import Tensor

from capture.call import AttentionCall
from capture.hooks.interceptor import Arguments
from replay.kernels.adapter import adapt
from replay.kernels.constraints import (
    causal_only_square,
    half_precision,
    max_head_dim,
    multiple_of_8,
    no_dropout,
    no_mask,
)
from replay.kernels.layout import on_bshd
from replay.kernels.library import Library
from replay.kernels.registry import register

LIBRARY = Library(
    module="flash_attn.cute",
    package="flash-attn-4",
    install="pip install --pre flash-attn-4",
    functions=("flash_attn_func",),
    runs_on=lambda capability: capability[0] in (8, 9, 10, 11, 12),
    needs="8.x to 12.x",
)

BLACKWELL_HEAD_DIMS = {(192, 128), (256, 256)}
"""(query's, value's) beyond 128 that data-centre Blackwell takes."""


def find_cutlass() -> None:
    """Put CUTLASS's DSL on the path where `pip install --target` has left it off.

    Its wheel relies on a `.pth` file, which Python reads in site-packages only.
    """
    if importlib.util.find_spec("cutlass") is not None:
        return
    for base in list(sys.path):
        for name in ("python_packages", "dsl_packages"):
            directory = Path(base) / "nvidia_cutlass_dsl" / name
            if directory.is_dir():
                sys.path.append(str(directory))
                return


def _load() -> ModuleType:
    find_cutlass()
    return LIBRARY.load()


def _unavailable(device: torch.device) -> str | None:
    find_cutlass()
    return LIBRARY.unavailable(device)


def _head_dims(call: AttentionCall) -> str | None:
    """What `flash_attn.cute.interface` accepts, which is less on data-centre Blackwell."""
    if call.device.type == "cuda" and torch.cuda.get_device_capability(call.device)[0] in (10, 11):
        if (call.shape.head_dim, call.shape.v_head_dim) in BLACKWELL_HEAD_DIMS:
            return None
        return max_head_dim(128)(call)
    return max_head_dim(256)(call)


def _run(call: Arguments) -> Tensor:
    output = _load().flash_attn_func(
        q=call.query, k=call.key, v=call.value, softmax_scale=call.scale, causal=call.is_causal
    )
    return output[0] if isinstance(output, tuple) else output


_attend, _prepare = on_bshd(_run)
register(
    adapt(
        "fa4",
        LIBRARY,
        _attend,
        (no_dropout, half_precision, no_mask, causal_only_square, multiple_of_8, _head_dims),
        "FlashAttention 4 (CuTe DSL)",
        prepare=_prepare,
        unavailable=_unavailable,
    )
)
