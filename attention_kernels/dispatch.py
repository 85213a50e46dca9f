"""Choice of a kernel for a call with SDPA's arguments."""

from __future__ import annotations

import functools

import torch
from torch import Tensor

from attention_kernels.decode.contiguous_decode import contiguous_decode
from attention_kernels.hopper.support import has_gluon_kernels
from attention_kernels.launch.shape_checks import check_shapes
from attention_kernels.options import is_leading_part
from attention_kernels.portable.masked_prefill import masked_prefill
from attention_kernels.portable.prefill import prefill
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
(H100, docs/attention-kernels.md)."""


def attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attn_mask: Tensor | None = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    scale: float | None = None,
    enable_gqa: bool = False,
) -> Tensor:
    """Return `scaled_dot_product_attention` of the arguments, using the fastest exact kernel.

    Calls with a few queries are decoded, with the keys split among programs. Long masks are scanned
    first, so that fully masked blocks are skipped. Other 16-bit calls run the Hopper kernel on a
    Hopper GPU, and the portable kernel elsewhere.

    Args:
        query: (B, Hq, Sq, D) in float16, bfloat16 or float32, any strides.
        key: (B, Hkv, Sk, D).
        value: (B, Hkv, Sk, Dv); D and Dv are at most 256, or 640 and 512 for a few queries if the
            value is the first part of the key.
        attn_mask: broadcasts to (B, Hq, Sq, Sk): bool (True = attend) or float (added).
        is_causal: query i sees keys 0 to i; not with `attn_mask`, as in SDPA.
        scale: factor of the scores; None for 1/√D.
        enable_gqa: Hkv may be a divisor of Hq.

    Returns:
        (B, Hq, Sq, Dv) in the query's dtype; zeros for queries that see no key.

    Raises:
        NotImplementedError: the call has dropout, gradients, or a device, dtype or head dimension
            without a kernel, or more rows than a GPU can launch programs for.
        ValueError: the arguments do not fit together.
    """
    _check(query, key, value, attn_mask, dropout_p, is_causal, enable_gqa)
    q_len, kv_len = query.shape[2], key.shape[2]
    if _is_decoded(query, key):
        rows = query.shape[1] // key.shape[1] * q_len
        # Wide heads have no other kernel: decode takes them even if it reads the keys several
        # times.
        if rows <= MOST_DECODED_ROWS or query.shape[3] > LARGEST_HEAD_DIM:
            return contiguous_decode(query, key, value, attn_mask, is_causal, scale=scale)
    if attn_mask is not None and q_len * kv_len >= WORTH_LOOKING:
        return masked_prefill(query, key, value, attn_mask, scale=scale)
    if has_gluon_kernels(query.device):
        # Gluon is imported only on a GPU that supports it.
        from attention_kernels.hopper.hopper_prefill import hopper_prefill, takes

        if takes(query, value, scale):
            return hopper_prefill(query, key, value, attn_mask, is_causal=is_causal, scale=scale)
    return prefill(query, key, value, attn_mask, is_causal, scale=scale)


def _check(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attn_mask: Tensor | None,
    dropout_p: float,
    is_causal: bool,
    enable_gqa: bool,
) -> None:
    """Raise one of the errors that `attention` documents if no kernel supports the call."""
    if dropout_p:
        raise NotImplementedError(f"attention has no dropout (dropout_p is {dropout_p})")
    if torch.is_grad_enabled() and (
        query.requires_grad or key.requires_grad or value.requires_grad
    ):
        raise NotImplementedError("attention has no backward pass: call it in torch.no_grad()")
    if not query.ndim == key.ndim == value.ndim == 4:
        sizes = ", ".join(str(tensor.ndim) for tensor in (query, key, value))
        raise ValueError(f"expected query, key and value of 4 dimensions, got {sizes}")
    check_shapes(query.shape, key.shape, value.shape)
    if query.shape[1] != key.shape[1] and not enable_gqa:
        raise ValueError(
            f"{query.shape[1]} query heads and {key.shape[1]} key heads: pass enable_gqa=True"
        )
    if query.dtype not in DTYPES or not query.dtype == key.dtype == value.dtype:
        names = ", ".join(str(tensor.dtype) for tensor in (query, key, value))
        raise NotImplementedError(f"attention needs one dtype of 16 bits or float32, got {names}")
    if not query.device == key.device == value.device:
        raise ValueError(f"tensors on {query.device}, {key.device} and {value.device}")
    if attn_mask is not None:
        _check_mask(query, key, attn_mask, is_causal)
    if reason := _wrong_device(query.device):
        raise NotImplementedError(reason)
    _check_head_dims(query, key, value)


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


def _check_head_dims(query: Tensor, key: Tensor, value: Tensor) -> None:
    head_dim, v_head_dim = query.shape[3], value.shape[3]
    if max(head_dim, v_head_dim) <= LARGEST_HEAD_DIM:
        return
    has_room = v_head_dim <= LARGEST_LATENT and head_dim - v_head_dim <= LARGEST_TAIL
    if not (has_room and _is_decoded(query, key) and is_leading_part(value, key)):
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
