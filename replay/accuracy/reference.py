"""The reference: attention by the textbook formula, in high precision and bounded memory.

    output = softmax(cap(scale · QKᵀ) + mask) · V,    cap(s) = softcap · tanh(s / softcap)

The formula is computed one block of query rows at a time. Kernels are judged by this file, so this
file and the kernels do not import each other. Semantics are those of torch's math backend:

- `is_causal` is aligned top left, and applies together with a mask.
- In a bool mask, True means attend. A float mask is added to the scores.
- A query whose keys are all masked gets zeros.
- Dropout is ignored.

Query, key and value are the true values of a call with scales (`capture.call.per_head`).

A key that a query does not see contributes nothing to it, whatever its values
(`replay.accuracy.nonfinite`). Torch's math backend returns NaN there, if a hidden key or value is
NaN or infinite.

Features beyond SDPA (`capture.call.attention_variant`) are compared with their libraries' own
definitions in `tests/replay/accuracy/test_variants.py`. A sink's weight is dropped after the
softmax.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from contextlib import contextmanager
from typing import NamedTuple

import torch
from torch import Tensor

from capture.call.attention_call import AttentionCall
from capture.call.attention_variant import KeyRanges
from capture.call.nonfinite import is_finite
from capture.call.per_head import numbers_of_heads, true_values
from replay.accuracy.nonfinite import mask_block, visible_keys

CPU_BLOCK = 2**20
"""Number of scores held at a time on a CPU: 8 MiB in float64, which fit into the cache. Peak memory
is three times as much."""
CPU_KEYS = 2**18
"""Maximum number of elements in the keys of several heads on a CPU. For larger copies the allocator
requests new memory each time, which takes longer than the products."""
GPU_BLOCK = 2**24
"""Number of scores held at a time on a GPU: 128 MiB; peak memory is three times as much."""
LARGE_GPU_BLOCK = 2**26
LARGE_GPU_BYTES = 40 * 2**30
"""Minimum memory of a GPU that uses a larger block, in bytes. With the larger block, an H200 needed
0.7 of the time (17,776 tokens)."""

MOST_TERMS = 2**33
"""Largest number of products of a weight and a value that are added one after another."""
SMALLEST = torch.finfo(torch.float32).tiny

FAST_FLOAT64 = {(6, 0), (7, 0), (8, 0), (9, 0), (10, 0)}
"""CUDA compute capabilities with a float64 rate of half the float32 rate.

Other capabilities have 1/32 or 1/64 of the float32 rate, according to the table "Throughput of
Native Arithmetic Instructions" in NVIDIA's CUDA C++ Programming Guide.
"""


def scores_at_a_time(device: torch.device) -> int:
    """Return the number of scores to hold at once; one query position may need more."""
    if device.type != "cuda":
        return CPU_BLOCK
    is_large = torch.cuda.get_device_properties(device).total_memory >= LARGE_GPU_BYTES
    return LARGE_GPU_BLOCK if is_large else GPU_BLOCK


def reference_dtype(
    device: torch.device | str, call_dtype: torch.dtype = torch.bfloat16
) -> torch.dtype:
    """Return the dtype of the reference on `device`: float64 if it is fast, otherwise float32.

    Calls of 32 bits or more get float64 on any CUDA device, because a reference in the call's own
    precision would measure nothing.
    """
    device = torch.device(device)
    if device.type == "cpu":
        return torch.float64
    if device.type != "cuda":
        return torch.float32
    is_fast = torch.cuda.get_device_capability(device) in FAST_FLOAT64
    return torch.float64 if is_fast or call_dtype.itemsize >= 4 else torch.float32


def same_dtype(call: AttentionCall, block_elements: int | None = None) -> tuple[Tensor, ...]:
    """Compute the formula step by step in the call's own dtype: (B, Hq, Sq, Dv) of `call.dtype`.

    Q√scale, K√scale, scores, probabilities and output are each rounded to that dtype. Torch's math
    backend does the same if `torch.backends.cuda.allow_fp16_bf16_reduction_math_sdp` is set; by
    default the backend computes in float32. In 16 bits there is a second output, from scores that
    are rounded before and after the scaling, as in a model's eager attention. The exactness rule
    allows twice the larger error of the two outputs (`replay.accuracy.tolerance`).

    Rows whose scores overflow are NaN: in the second output if any unscaled score overflows, in the
    first if the row's largest score or all its scores overflow.
    """
    outputs = [attention(call, call.dtype, block_elements)]
    if call.dtype.itemsize == 2:
        outputs.append(attention(call, call.dtype, block_elements, scale_scores=True))
    return tuple(outputs)


def summed_in_order(call: AttentionCall) -> Tensor | None:
    """Compute the formula in the call's own 32 or 64 bits, adding one key after another.

    PyTorch's FlexAttention on a CPU sums in this order. If a row's terms are equal, their rounding
    errors are equal too, and grow with the number n of keys instead of √n. Weights are relative to
    the largest one of their row, as in kernels that divide at the end.

    Returns:
        (B, Hq, Sq, Dv); None for a call of more than MOST_TERMS terms, which would take too long.
    """
    shape = call.shape
    rows = shape.batch * shape.q_heads * shape.q_len
    if rows * shape.kv_len * shape.v_head_dim > MOST_TERMS:
        return None
    output = _empty_output(call, call.dtype)
    for block in weights(call, call.dtype):
        largest = block.weights.amax(-1, keepdim=True)
        relative = (block.weights / largest.clamp_min(SMALLEST)).unsqueeze(-1)
        total = torch.zeros_like(output[block.batch, block.heads, block.rows])
        for key in range(relative.shape[2]):
            total.addcmul_(relative[:, :, key], block.value[:, key, None])
        output[block.batch, block.heads, block.rows] = total * largest
    return output


def attention(
    call: AttentionCall,
    dtype: torch.dtype = torch.float64,
    block_elements: int | None = None,
    *,
    scale_scores: bool = False,
) -> Tensor:
    """Compute the right output of `call`: (B, Hq, Sq, Dv) in `dtype`, on the call's device.

    Every step rounds to `dtype`. At most `block_elements` scores exist at a time (by default
    `scores_at_a_time`), or those of one query position in the heads that share a key head if more.

    Args:
        scale_scores: see `weights`.

    Raises:
        ValueError: the query heads are not a multiple of the key/value heads.
    """
    output = _empty_output(call, dtype)
    for block in weights(call, dtype, block_elements, scale_scores=scale_scores):
        output[block.batch, block.heads, block.rows] = block.product(block.weights, block.value)
    return output


def attention_and_spread(
    call: AttentionCall, dtype: torch.dtype = torch.float64, block_elements: int | None = None
) -> tuple[Tensor, Tensor]:
    """Compute `attention`, and the spread √Σⱼ pⱼ²‖vⱼ‖² of each row: (B, Hq, Sq).

    The spread tells how independent relative errors in the terms pⱼ·vⱼ, such as rounding errors,
    affect a row.
    """
    output = _empty_output(call, dtype)
    spread = torch.zeros(output.shape[:3], dtype=dtype, device=call.device)
    for block in weights(call, dtype, block_elements):
        place = (block.batch, block.heads, block.rows)
        output[place] = block.product(block.weights, block.value)
        lengths = torch.linalg.vector_norm(block.value, dim=-1, keepdim=True)
        squares = block.product(block.weights.square_(), lengths.square_())
        spread[place] = squares.sqrt_().squeeze(-1)
    return output, spread


class WeightBlock(NamedTuple):
    """Probabilities in some rows of H query heads that share one or several key/value heads."""

    batch: int
    heads: slice
    rows: slice
    weights: Tensor
    """(H, rows, keys); the caller may change them."""
    value: Tensor
    """(H or 1, keys, Dv): values of the keys that these rows may attend to."""
    visible: Tensor | None = None
    """(H or 1, rows, keys) bool: the keys that each row sees; None if all inputs are finite."""
    keys: slice = slice(None)
    slope: Tensor | None = None
    """(H, rows, keys): derivative of the soft cap; None without a cap, or if not requested."""

    def product(self, weights: Tensor, value: Tensor) -> Tensor:
        """Return `weights @ value`, in which values of keys that a row does not see have no effect.

        Args:
            weights: (H, rows, keys), zero for keys that a row does not see.
            value: (H or 1, keys, n).
        """
        if self.visible is None:
            return product(weights, value)
        found = product(weights, value.nan_to_num(0.0, 0.0, 0.0))

        def reached(keys: Tensor, values: Tensor) -> Tensor:
            return keys.to(found.dtype).matmul(values.to(found.dtype)) > 0

        some, none = self.visible & (weights > 0), self.visible & (weights == 0)
        above, below = (reached(some, value == bound) for bound in (math.inf, -math.inf))
        undefined = reached(self.visible, value.isnan()) | reached(none, value.isinf())
        found.masked_fill_(above, math.inf).masked_fill_(below, -math.inf)
        return found.masked_fill_(undefined | (above & below), math.nan)


def weights(
    call: AttentionCall,
    dtype: torch.dtype,
    block_elements: int | None = None,
    *,
    scale_scores: bool = False,
    allow_tf32: bool = False,
    with_slopes: bool = False,
) -> Iterator[WeightBlock]:
    """Yield softmax(scale · QKᵀ + mask) in blocks of rows, with the matching values.

    Args:
        scale_scores: compute scale · (QKᵀ), not (Q√scale)(K√scale)ᵀ; rows in which QKᵀ overflows
            are NaN.
        allow_tf32: let a GPU round float32 operands of products to 11 bits (TF32), also in the
            caller's products with a block.
        with_slopes: also compute the slopes of the soft cap, for a backward pass.

    Raises:
        ValueError: the query heads are not a multiple of the key/value heads.
    """
    call = call.without_pages()
    shape = call.shape
    if shape.q_heads % shape.kv_heads:
        raise ValueError(
            f"{shape.q_heads} query heads cannot share {shape.kv_heads} key/value heads: "
            "the first must be a multiple of the second"
        )
    if shape.kv_len == 0:
        return
    span = call.key_ranges if call.is_causal or call.features else None
    most = scores_at_a_time(call.device) if block_elements is None else block_elements
    at_once = 1
    if shape.q_heads == shape.kv_heads:  # with fewer key heads, keys would have to be copied
        # Compute short calls in groups of heads whose scores and keys fit.
        widest = max(shape.head_dim, shape.v_head_dim, 1)
        keys = min(CPU_KEYS, most) if call.device.type == "cpu" else most
        at_once = max(1, min(most // max(shape.q_len, 1), keys // widest) // shape.kv_len)
    with torch.no_grad(), _float32_products(allow_tf32):
        for batch in range(shape.batch):
            for first in range(0, shape.kv_heads, at_once):
                kv_heads = slice(first, min(first + at_once, shape.kv_heads))
                yield from _weights_of_heads(
                    call, span, batch, kv_heads, dtype, most, scale_scores, with_slopes
                )


def _empty_output(call: AttentionCall, dtype: torch.dtype) -> Tensor:
    shape = call.shape
    sizes = (shape.batch, shape.q_heads, shape.q_len, shape.v_head_dim)
    return torch.zeros(sizes, dtype=dtype, device=call.device)


def _weights_of_heads(
    call: AttentionCall,
    span: KeyRanges | None,
    batch: int,
    kv_heads: slice,
    dtype: torch.dtype,
    block_elements: int,
    scale_scores: bool,
    with_slopes: bool,
) -> Iterator[WeightBlock]:
    """Yield the blocks of the query heads that share these key/value heads.

    Args:
        span: the keys visible to each query; None for all keys.
    """
    kv_len, q_len = call.shape.kv_len, call.shape.q_len
    group = call.shape.q_heads // call.shape.kv_heads
    heads = slice(kv_heads.start * group, kv_heads.stop * group)
    count = heads.stop - heads.start
    # The scale is split between Q and K, as torch does, so that float16 scores do not overflow.
    root = math.sqrt(abs(call.softmax_scale))
    numbers = numbers_of_heads(call.tensors(), heads, kv_heads)
    key = true_values(call.key[batch, kv_heads], numbers.get("key_scale"), dtype)
    value = true_values(call.value[batch, kv_heads], numbers.get("value_scale"), dtype)
    key = key if scale_scores else key * root
    signed_root = math.copysign(root, call.softmax_scale)
    softcap = call.variant.softcap
    sinks = None if call.sinks is None else numbers["sinks"].to(dtype)
    is_odd = not all(map(is_finite, (call.query[batch, heads], key, value)))

    rows_per_block = max(1, block_elements // (count * kv_len))
    for begin in range(0, q_len, rows_per_block):
        rows = slice(begin, min(begin + rows_per_block, q_len))
        keys, block_value = slice(0, kv_len), value
        if span is not None:
            firsts, ends = (edges[rows] for edges in span.of(batch))
            keys = _union(firsts, ends) or slice(0, 1)
            block_value = value[:, keys]
        query = true_values(call.query[batch, heads, rows], numbers.get("query_scale"), dtype)
        query = query if scale_scores else query * signed_root
        scores = product(query, key[:, keys].mT)
        if scale_scores:
            overflows = scores.amax(-1, keepdim=True).isinf() | scores.amin(-1, True).isinf()
            scores.mul_(call.softmax_scale)
            if overflows.any():
                scores.masked_fill_(overflows, math.nan)
        slope = None
        if softcap is not None:
            scores = scores.div_(softcap).tanh_()
            slope = 1 - scores.square() if with_slopes else None
            scores = scores.mul_(softcap)
        if call.attn_mask is not None:
            scores += _added(mask_block(call.attn_mask, batch, heads, rows, keys), dtype)
        if span is not None:
            position = torch.arange(keys.start, keys.stop, device=call.device)
            outside = (position < firsts[:, None]) | (position >= ends[:, None])
            scores.masked_fill_(outside, -math.inf)
        visible = None
        if is_odd:
            visible = visible_keys(call, span, batch, heads, rows, keys)
            scores.masked_fill_(~visible, -math.inf)
        found = _softmax(scores, sinks)
        if span is not None or call.attn_mask is not None:  # a sink may be -inf too
            empty = scores.amax(dim=-1, keepdim=True) == -math.inf
            found.masked_fill_(empty, 0.0)
            if dtype == torch.float16 and bool(empty.any()):  # scores that overflowed
                sees = visible_keys(call, span, batch, heads, rows, keys).any(-1, keepdim=True)
                found.masked_fill_(empty & sees, math.nan)
        yield WeightBlock(batch, heads, rows, found, block_value, visible, keys, slope)


def product(left: Tensor, right: Tensor) -> Tensor:
    """Compute `left @ right`, summed in float32 or better and rounded once to their dtype.

    On a CPU, PyTorch's own float16 product gives the same result but takes twenty times as long.
    """
    if left.dtype == torch.float16 and left.device.type == "cpu":
        return (left.float() @ right.float()).to(left.dtype)
    return left @ right


def _union(firsts: Tensor, ends: Tensor) -> slice | None:
    """Return the range from the first to the last visible key; None if no key is visible."""
    some = ends > firsts
    if not bool(some.any()):
        return None
    return slice(int(firsts[some].min()), int(ends[some].max()))


def _added(mask: Tensor, dtype: torch.dtype) -> Tensor:
    """Return a mask as numbers to add to the scores."""
    if mask.dtype != torch.bool:
        return mask.to(dtype)
    return torch.zeros_like(mask, dtype=dtype).masked_fill_(~mask, -math.inf)


def _softmax(scores: Tensor, sinks: Tensor | None) -> Tensor:
    """Compute the softmax over the keys, (H, rows, keys), and each head's sink, (H,)."""
    if sinks is None:
        return torch.softmax(scores, dim=-1)
    column = sinks[:, None, None].expand(*scores.shape[:2], 1)
    return torch.softmax(torch.cat([scores, column], dim=-1), dim=-1)[..., :-1]


@contextmanager
def _float32_products(allow_tf32: bool) -> Iterator[None]:
    """Use full float32 precision in matrix products, or TF32 on a GPU, whatever the caller set."""
    if not hasattr(torch.backends.mkldnn, "matmul"):  # PyTorch before 2.9
        legacy = torch.get_float32_matmul_precision()
        torch.set_float32_matmul_precision("high" if allow_tf32 else "highest")
        try:
            yield
        finally:
            torch.set_float32_matmul_precision(legacy)
        return
    settings = (torch.backends.cuda.matmul, torch.backends.mkldnn.matmul)
    before = [setting.fp32_precision for setting in settings]
    try:
        for setting in settings:
            setting.fp32_precision = "ieee"
        if allow_tf32:
            torch.backends.cuda.matmul.fp32_precision = "tf32"
        yield
    finally:
        for setting, precision in zip(settings, before, strict=True):
            setting.fp32_precision = precision
