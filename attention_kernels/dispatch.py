"""Choice of a kernel for a call."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from attention_kernels.decode.contiguous_decode import DecodeOfShape
from attention_kernels.hopper.support import has_gluon_kernels
from attention_kernels.launch.launcher import PlanCache
from attention_kernels.launch.shape_checks import check_shapes
from attention_kernels.options import PLAIN, AttentionOptions, is_leading_part
from attention_kernels.portable.masked_prefill import masked_prefill
from attention_kernels.portable.prefill import prefill
from attention_kernels.quantised.quantised_prefill import quantised_prefill
from attention_kernels.tiles.matmul import INTERPRETED

DTYPES = (torch.float16, torch.bfloat16, torch.float32)
LARGEST_HEAD_DIM = 256
LARGEST_LATENT, LARGEST_TAIL = 512, 128
"""Largest head dimension of a value that is the first part of its key, and of the rest of the
key."""
MOST_DECODED_QUERIES = 16
MOST_DECODED_ROWS = 64
"""Maximum number of query rows per key head for which decode reads the keys only once."""
WORTH_LOOKING = 2**20
"""Minimum number of scores per head for which scanning a mask for fully masked blocks pays off. The
scan takes some 20 µs. A call without fully masked blocks takes 10 to 50 % longer with the scan
(H100, docs/kernel-speed.md)."""


PRECISIONS = ("exact", "fp8", "int8", "fastest")


Kernel = Callable[..., Any]
"""Function of query, key, value and attn_mask, and of the sinks by name."""
_kernels: PlanCache[Kernel] = PlanCache()


def attend(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attn_mask: Tensor | None,
    is_causal: bool,
    scale: float | None,
    enable_gqa: bool,
    precision: str,
    sinks: Tensor | None,
    options: AttentionOptions,
    return_lse: bool,
) -> Any:
    """Check a call, and run a kernel that computes it; in effect, `attention` in eager mode.

    Calls of the same shapes and types are checked once, because the checks take the host longer
    than a launch.
    """
    call = (
        query.shape,
        key.shape,
        value.shape,
        query.dtype,
        key.dtype,
        value.dtype,
        query.device,
        key.device,
        value.device,
        is_causal,
        scale,
        enable_gqa,
        precision,
        return_lse,
        None if attn_mask is None else (attn_mask.shape, attn_mask.dtype, attn_mask.device),
        None if options is PLAIN else options,
    )
    kernel = _kernels.get(call)
    if kernel is None:
        check_heads(query, key, value, enable_gqa)
        _check(query, key, value, attn_mask, is_causal)
        kernel = _kernel_for(
            query, key, value, attn_mask, is_causal, scale, precision, options, return_lse
        )
        if query.shape[3] <= LARGEST_HEAD_DIM:  # wider calls depend on where the value is in memory
            _kernels.keep(call, kernel)
    return kernel(query, key, value, attn_mask, sinks=sinks)


def _kernel_for(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attn_mask: Tensor | None,
    is_causal: bool,
    scale: float | None,
    precision: str,
    options: AttentionOptions,
    return_lse: bool,
) -> Kernel:
    given: dict[str, Any] = {
        "is_causal": is_causal,
        "scale": scale,
        "options": options,
        "return_lse": return_lse,
    }
    is_8_bit = precision in ("fp8", "int8")
    if is_8_bit or precision == "fastest":
        reason = _not_in_8_bits(query, attn_mask, is_causal, precision, options, return_lse)
        if is_8_bit and reason is not None:
            raise NotImplementedError(f"precision={precision!r}: {reason}")
        if is_8_bit or (reason is None and is_faster_in_8_bits(query, key, options)):
            return functools.partial(_int8 if precision == "int8" else _fp8, **given)
    elif precision != "exact":
        raise ValueError(f"precision={precision!r}: expected one of {', '.join(PRECISIONS)}")
    if _is_decoded(query, key):
        rows = query.shape[1] // key.shape[1] * query.shape[2]
        # Wide heads have no other kernel: decode takes them even if it reads the keys several
        # times.
        is_fast = rows <= MOST_DECODED_ROWS and options.decode
        if is_fast or query.shape[3] > LARGEST_HEAD_DIM:
            return DecodeOfShape(**given)
    # The order in which a tile visits scanned blocks depends on the tile's other queries.
    if attn_mask is not None and is_scanned(query, key, options) and not options.invariant:
        return functools.partial(_masked, **given)
    if has_gluon_kernels(query.device):
        # Gluon is imported only on a GPU that supports it.
        from attention_kernels.hopper.hopper_prefill import hopper_prefill, takes

        if takes(query, value, scale):
            return functools.partial(hopper_prefill, **given)
    return functools.partial(prefill, **given)


def is_scanned(query: Tensor, key: Tensor, options: AttentionOptions) -> bool:
    """Return whether a call's mask is worth a scan, and alone determines what a query sees."""
    is_long = query.shape[2] * key.shape[2] >= WORTH_LOOKING
    return is_long and options.window == (None, None)


def _masked(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attn_mask: Tensor,
    *,
    is_causal: bool,
    scale: float | None,
    sinks: Tensor | None,
    options: AttentionOptions,
    return_lse: bool,
) -> Any:
    """Run `masked_prefill`; a call with a mask is neither causal nor windowed here."""
    return masked_prefill(
        query,
        key,
        value,
        attn_mask,
        scale=scale,
        softcap=options.softcap,
        sinks=sinks,
        return_lse=return_lse,
    )


def _quantised(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attn_mask: Tensor | None,
    *,
    score_dtype: torch.dtype,
    return_lse: bool,
    **others: Any,
) -> Tensor:
    """Run `quantised_prefill`, which has no log-sum-exp (`_not_in_8_bits` refuses such calls)."""
    return quantised_prefill(
        query,
        key,
        value,
        attn_mask=attn_mask,
        score_dtype=score_dtype,
        fp8_value=score_dtype != torch.int8,
        **others,
    )


_fp8 = functools.partial(_quantised, score_dtype=torch.float8_e4m3fn)
_int8 = functools.partial(_quantised, score_dtype=torch.int8)


def is_faster_in_8_bits(query: Tensor, key: Tensor, options: AttentionOptions) -> bool:
    """Return whether FP8 was measured to be faster than 16 bits for calls of this size.

    The rule is for Hopper, from `benchmarks/results/precisions.csv`: quantising the keys pays off
    if many queries read them. Other GPUs were not measured, so they never quantise.
    """
    if not has_gluon_kernels(query.device) or options.window != (None, None):
        return False
    head_dim, kv_len = query.shape[3], key.shape[2]
    return 96 < head_dim <= 128 and query.shape[2] >= kv_len >= 8192


def _not_in_8_bits(
    query: Tensor,
    attn_mask: Tensor | None,
    is_causal: bool,
    precision: str,
    options: AttentionOptions,
    return_lse: bool,
) -> str | None:
    """Return why no 8-bit kernel computes a call, or None."""
    if query.dtype == torch.float32:
        return "float32 is not quantised; pass float16 or bfloat16"
    if return_lse:
        return "the 8-bit kernels return no log-sum-exp"
    if options.invariant:
        return "8-bit kernels are not invariant: their scales depend on all keys"
    if attn_mask is not None and attn_mask.dtype != torch.bool:
        return f"attn_mask in {attn_mask.dtype}: the 8-bit kernels need bool"
    if attn_mask is not None and (is_causal or options.window != (None, None)):
        return "attn_mask beside a diagonal or a window"
    if query.shape[3] > LARGEST_HEAD_DIM:
        return f"head dimension {query.shape[3]}: at most {LARGEST_HEAD_DIM}"
    if precision != "int8" and query.is_cuda:
        capability = torch.cuda.get_device_capability(query.device)
        if capability < (8, 9):
            return "FP8 needs compute capability 8.9 (this GPU has {}.{})".format(*capability)
    return None


def check_heads(query: Tensor, key: Tensor, value: Tensor, enable_gqa: bool) -> None:
    """Raise ValueError if the dimensions or the numbers of heads do not fit."""
    check_shapes(query.shape, key.shape, value.shape)
    if query.shape[1] != key.shape[1] and not enable_gqa:
        raise ValueError(
            f"{query.shape[1]} query heads and {key.shape[1]} key heads: pass enable_gqa=True"
        )


def _check(
    query: Tensor, key: Tensor, value: Tensor, attn_mask: Tensor | None, is_causal: bool
) -> None:
    """Raise one of the errors that `attention` documents if no kernel supports the call."""
    check_tensors(query, key, value)
    if attn_mask is not None:
        _check_mask(query, key, attn_mask, is_causal)
    check_head_dims(key, value, _is_decoded(query, key))


def check_tensors(query: Tensor, key: Tensor, value: Tensor) -> None:
    """Check that the tensors have one type and one device, and that kernels support both.

    Raises:
        NotImplementedError: the types differ, or no kernel supports the type or the device.
        ValueError: the devices differ.
    """
    if query.dtype not in DTYPES or not query.dtype == key.dtype == value.dtype:
        names = ", ".join(str(tensor.dtype) for tensor in (query, key, value))
        raise NotImplementedError(
            f"attention needs query, key and value all in float16, bfloat16 or float32, got {names}"
            ": convert them (`attention` can quantise them itself, with precision='fp8')"
        )
    if not query.device == key.device == value.device:
        raise ValueError(f"tensors on {query.device}, {key.device} and {value.device}")
    if reason := _wrong_device(query.device):
        raise NotImplementedError(reason)


def _is_decoded(query: Tensor, key: Tensor) -> bool:
    """Return whether decode supports the call, provided that the call has few enough rows."""
    is_16_bit = query.dtype != torch.float32
    return is_16_bit and query.shape[2] <= MOST_DECODED_QUERIES and key.shape[2] > 0


def _check_mask(query: Tensor, key: Tensor, attn_mask: Tensor, is_causal: bool) -> None:
    if is_causal:
        raise ValueError("attn_mask and is_causal=True exclude each other")
    if attn_mask.device != query.device:
        raise ValueError(f"attn_mask on {attn_mask.device}, query on {query.device}")
    if attn_mask.dtype != torch.bool and attn_mask.dtype not in DTYPES:
        raise NotImplementedError(f"attn_mask in {attn_mask.dtype}: expected bool or float")
    shape = (*query.shape[:3], key.shape[2])
    fits = attn_mask.ndim <= 4 and all(
        size in (1, whole) for size, whole in zip(attn_mask.shape[::-1], shape[::-1], strict=False)
    )
    if not fits:
        raise ValueError(f"attn_mask of shape {tuple(attn_mask.shape)} does not fit {shape}")


def check_head_dims(key: Tensor, value: Tensor, is_decoded: bool) -> None:
    """Check that a kernel supports the head dimensions.

    Raises:
        NotImplementedError: a head dimension is too large.
    """
    head_dim, v_head_dim = key.shape[-1], value.shape[-1]
    if max(head_dim, v_head_dim) <= LARGEST_HEAD_DIM:
        return
    has_room = v_head_dim <= LARGEST_LATENT and head_dim - v_head_dim <= LARGEST_TAIL
    if not (is_decoded and has_room and is_leading_part(value, key)):
        raise NotImplementedError(
            f"attention has no kernel for head dimensions {head_dim} and {v_head_dim}: at most "
            f"{LARGEST_HEAD_DIM}"
        )


@functools.cache
def _wrong_device(device: torch.device) -> str | None:
    """Return a sentence that explains why no kernel runs on a device."""
    if INTERPRETED.value:
        return None
    if device.type != "cuda":
        return f"attention needs a CUDA GPU (the tensors are on {device})"
    capability = torch.cuda.get_device_capability(device)
    if capability >= (8, 0):
        return None
    return "attention needs compute capability 8.0 (this GPU has {}.{})".format(*capability)
