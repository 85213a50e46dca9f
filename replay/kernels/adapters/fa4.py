"""FlashAttention 4: the package `flash-attn-4` (`flash_attn.cute.flash_attn_func`, CuTe DSL).

The function's fourth positional argument is not the scale, so the adapter passes keywords only. The
function returns the output and the log-sum-exp, and compiles a kernel at the first call of each
kind. It supports masks only as functions of indices (`mask_mod`), so it cannot use recorded masks.
Its sinks are bfloat16, so calls with sinks of other dtypes are refused.
"""

from __future__ import annotations

import importlib.util
import sys
from dataclasses import replace
from functools import partial
from pathlib import Path
from types import ModuleType
from typing import Any

import torch
from torch import Tensor

from capture.call.attention_call import AttentionCall
from capture.hooks.interceptor import Arguments
from replay.kernels import constraints as limits
from replay.kernels.constraints import AnyCall
from replay.kernels.flash_attention import KNOWN, options, output_of, varlen_arguments
from replay.kernels.layout import Packed, on_bshd, on_packed
from replay.kernels.libraries import Library
from replay.kernels.wrapping import at_once, register_adapted

LIBRARY = Library(
    module="flash_attn.cute",
    package="flash-attn-4",
    install="pip install --pre flash-attn-4",
    functions=("flash_attn_func",),
    runs_on=lambda capability: capability[0] in (8, 9, 10, 11, 12),
    needs="8.x to 12.x",
)

BLACKWELL_HEAD_DIMS = {(192, 128), (256, 256)}
"""Head dimensions above 128, as (query's, value's), that data-centre Blackwell supports."""


def find_cutlass() -> None:
    """Add CUTLASS's DSL to the path if `pip install --target` has omitted it.

    CUTLASS's wheel relies on a `.pth` file, which Python reads in site-packages only.
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


def _unavailable(library: Library, device: torch.device) -> str | None:
    find_cutlass()
    return library.unavailable(device)


def _head_dims(call: AttentionCall) -> str | None:
    """Check head dimensions as `flash_attn.cute.interface` does for each type of GPU."""
    if call.device.type == "cuda" and torch.cuda.get_device_capability(call.device)[0] in (10, 11):
        if (call.shape.head_dim, call.shape.v_head_dim) in BLACKWELL_HEAD_DIMS:
            return None
        return limits.max_head_dim(128)(call)
    return limits.max_head_dim(256)(call)


def _pages_on_data_centre_gpus(call: AttentionCall) -> str | None:
    if call.page_table is None or call.device.type != "cuda":
        return None
    major, minor = torch.cuda.get_device_capability(call.device)
    return f"no pages on compute capability {major}.{minor}" if major in (8, 12) else None


def _sinks(call: AnyCall) -> dict[str, Any]:
    return {} if call.sinks is None else {"learnable_sink": call.sinks}


def _run(call: Arguments) -> Tensor:
    return output_of(
        _load().flash_attn_func(
            q=call.query, k=call.key, v=call.value, **options(call, unlimited=None), **_sinks(call)
        )
    )


def _run_varlen(call: AnyCall, packed: Packed) -> Tensor:
    arguments = varlen_arguments(call, packed, unlimited=None)
    return output_of(_load().flash_attn_varlen_func(**arguments, **_sinks(call)))


_limits = (
    limits.no_dropout,
    limits.half_precision,
    limits.multiple_of_8,
    _head_dims,
    limits.bfloat16_sinks,
)
_attend, _prepare = on_bshd(_run)
register_adapted(
    "fa4",
    LIBRARY,
    _attend,
    (*_limits, limits.no_mask, limits.causal_only_square),
    "FlashAttention 4 (CuTe DSL)",
    prepare=_prepare,
    unavailable=partial(_unavailable, LIBRARY),
    features=(*KNOWN, "sinks"),
    differentiable=True,
)
_VARLEN = replace(LIBRARY, functions=("flash_attn_varlen_func",))
_prepare_varlen = on_packed(_run_varlen)
register_adapted(
    "fa4-varlen",
    _VARLEN,
    at_once(_prepare_varlen),
    (*_limits, *limits.PADDED_OR_PACKED, _pages_on_data_centre_gpus),
    "FlashAttention 4 on packed sequences, and on padded batches, packed by their mask",
    prepare=_prepare_varlen,
    unavailable=partial(_unavailable, _VARLEN),
    features=(*KNOWN, "sinks", "packed", "key-lengths", "paged"),
    differentiable=True,
)
