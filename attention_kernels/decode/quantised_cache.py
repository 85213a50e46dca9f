"""A key/value cache in 8 bits, as in serving engines, and how `split_kv_kernel.py` reads it.

Every token of a key head has one scale for its key and one for its value, as in vLLM's
`kv_cache_dtype=int8_per_token_head` and `fp8_per_token_head`. LMDeploy also stores an offset. A new
token is therefore quantised independently, and no token is quantised again. A scale per channel
would depend on later tokens (KIVI, Liu et al. 2024, keeps the last 128 tokens in 16 bits). Channel
scales would help because some channels of the keys are far from 0 for every token, which uses up
the 8 bits. Instead, a mean key is subtracted ("K smoothing", SageAttention, Zhang et al. 2024). A
server would use the mean of the prompt; this module uses the mean of the keys that `sampled_mean`
selects. Softmax alone does not depend on the mean, but sinks and soft caps do. The mean is
therefore stored, and the product of each query with the mean is added back to the scores.

The kernel neither converts the cache's elements nor multiplies them by their scales. Key scales
multiply the scores, and value scales multiply the probabilities. Each probability is split into two
8-bit numbers, like the query (`high_low_parts.py`). In each block, the largest product of a
probability and its value's scale is mapped to the largest 8-bit number.

Values are stored transposed within every `CACHE_BLOCK` tokens, as in the pages of vLLM's first
kernels. The tensor cores need bytes of neighbouring tokens to be adjacent, and no load instruction
transposes bytes. Within every 16 tokens the two groups of eight alternate: 0, 8, 1, 9 and so on. A
thread holds the scores of such a pair of tokens (PTX, the accumulator of `wgmma` and `mma.m16n8`),
and stores the two weights at once.

In a paged cache, each page holds one block of `CACHE_BLOCK` tokens.

A NaN or an infinity makes the scale of its token NaN. The output of every row that sees the token
is then NaN.
"""

from __future__ import annotations

import functools
from collections.abc import Hashable
from dataclasses import dataclass
from typing import Any, ClassVar, Literal

import torch
import triton
import triton.language as tl
from torch import Tensor

from attention_kernels.launch.descriptors import described, nowhere
from attention_kernels.launch.launcher import Launch, layout, named
from attention_kernels.launch.shape_checks import Sizes, check_shapes, vector
from attention_kernels.tiles.high_low_parts import (
    LOG2_LARGEST_FP8,
    LOG2_LARGEST_INT8,
    high_low_parts,
)
from attention_kernels.tiles.matmul import INTERPRETED
from attention_kernels.tiles.round_to_eight_bits import (
    FP8_MAX,
    INT8_MAX,
    SMALLEST_MAXIMUM,
    sampled_mean,
    to_fp8,
    to_int8,
)

CACHE_BLOCK = tl.constexpr(128)
"""Number of tokens whose values are transposed together; lengths are rounded up to a multiple of
this number."""


@dataclass(frozen=True)
class QuantisedCache:
    """Keys and values in 8 bits. N is Sk rounded up to a multiple of `CACHE_BLOCK`, D' is D rounded
    up to a multiple of 16.

    In a paged cache, all tensors except `key_mean` have P pages of N = `CACHE_BLOCK` tokens instead
    of B batch elements.
    """

    key: Tensor
    """(B, Hkv, N, D') int8 or float8_e4m3fn; zeros beyond each sequence's end and beyond D."""
    value: Tensor
    """(B, Hkv, N / 128 · Dv, 128) in the key's dtype: Dv rows of every `CACHE_BLOCK` tokens, in the
    order of `in_value_order`."""
    key_scale: Tensor
    """(B, Hkv, N) float32: key ≈ quantised · scale + mean."""
    key_mean: Tensor
    """(B, Hkv, D) float32."""
    value_scale: Tensor
    """(B, Hkv, N) float32: value ≈ quantised · scale."""
    kv_len: int
    lengths: Tensor | None
    """(B,) int32, number of tokens of each sequence; None for all."""
    block_table: Tensor | None = None
    """(B, pages of a sequence) int32: the page of each `CACHE_BLOCK` tokens; None without pages."""

    indices: ClassVar[None] = None
    tail: ClassVar[int] = 0
    in_pairs: ClassVar[bool] = False

    @property
    def page_size(self) -> int:
        """Return the number of tokens in a page; 0 without pages."""
        return 0 if self.block_table is None else CACHE_BLOCK.value

    @property
    def shapes(self) -> tuple[Sizes, Sizes]:
        """Return (B, Hkv, Sk, D) and (B, Hkv, Sk, Dv), the shapes before quantisation."""
        batch, kv_heads, head_dim = self.key_mean.shape
        tokens = batch, kv_heads, self.kv_len
        return (*tokens, head_dim), (*tokens, self.sizes[2])

    @property
    def sizes(self) -> tuple[int, int, int]:
        """Return Hkv, the maximum number of tokens of a sequence, and Dv."""
        _, kv_heads, rows, _ = self.value.shape
        return kv_heads, self.kv_len, rows // (self.key.shape[2] // CACHE_BLOCK.value)

    @property
    def layouts(self) -> Hashable:
        """Return everything that a plan may depend on. The layouts of the other tensors follow from
        these layouts."""
        tensors = (self.key, self.value, self.lengths, self.block_table)
        return *map(layout, tensors), self.kv_len

    @property
    def scales(self) -> tuple[Tensor, Tensor, Tensor]:
        return self.key_scale, self.key_mean, self.value_scale

    @property
    def factors(self) -> tuple[None, None]:
        """Return None for keys and values, which have scales by block."""
        return None, None

    def access(
        self, is_cut: bool, begins_late: bool = False, rows: int = 1
    ) -> Literal["quantised"]:
        """Return "quantised", because all blocks are whole and invalid tokens are finite."""
        return "quantised"

    def strides(self, tensor: Tensor) -> tuple[int, ...]:
        """Return zeros for the four dimensions, because the kernel uses descriptors instead."""
        return tensor.stride()

    @property
    def largest_block(self) -> int:
        """Return the maximum number of tokens that are loaded at once."""
        return CACHE_BLOCK.value

    def descriptors(
        self, block_n: int, block_d: int, block_dv: int, block_tail: int
    ) -> tuple[Any, Any]:
        """Return descriptors of key and value that hold no memory. There is no tail."""
        return (
            nowhere(described(self.key, block_n, block_d)),
            nowhere(described(self.value, block_dv, block_n)),
        )


@triton.jit
def fit_query(query, mean_ptr, dims, has_dim, IS_INT8: tl.constexpr):
    """Return a query (M, D) as `high_low_parts`, the factor of each row (M,), and the product of
    each row with the mean key (M,).

    Factor and product are NaN if the row is not finite.
    """
    query = query.to(tl.float32)
    mean = tl.load(mean_ptr + dims, mask=has_dim, other=0.0)
    offsets = tl.sum(query * mean, axis=1) + tl.sum(query * 0.0, axis=1)
    query = tl.where(tl.abs(query) < float("inf"), query, 0.0)
    largest = tl.maximum(tl.max(tl.abs(query), axis=1), SMALLEST_MAXIMUM)
    unit: tl.constexpr = 2.0 ** (LOG2_LARGEST_INT8 if IS_INT8 else LOG2_LARGEST_FP8)
    halves = high_low_parts(query / largest[:, None] * unit, IS_INT8)
    return halves, largest / unit, offsets


@triton.jit
def in_value_order(numbers):
    """Return 8-bit numbers (M, N) of N tokens, reordered like the stored values."""
    eights = numbers.reshape(numbers.shape[0], numbers.shape[1] // 16, 2, 8)
    return eights.permute(0, 1, 3, 2).reshape(numbers.shape[0], numbers.shape[1])


@triton.jit
def log2(scales):
    """Return the base-2 logarithm of positive float32 numbers in one instruction, where Triton
    would use a dozen."""
    if INTERPRETED:
        return tl.math.log2(scales)
    return tl.inline_asm_elementwise(
        "lg2.approx.ftz.f32 $0, $1;", "=r,r", [scales], dtype=tl.float32, is_pure=True, pack=1
    )


@triton.jit
def _quantise_rows(rows, has_row, IS_INT8: tl.constexpr):
    """Return float32 rows (N, D) quantised to 8 bits, and their scales (N,), which are NaN for rows
    that are not finite."""
    rows = tl.where(has_row[:, None], rows, 0.0)
    not_finite = tl.sum(rows * 0.0, axis=1)
    rows = tl.where(tl.abs(rows) < float("inf"), rows, 0.0)
    largest = tl.maximum(tl.max(tl.abs(rows), axis=1), SMALLEST_MAXIMUM)
    if IS_INT8:
        quantised, scale = to_int8(rows, largest[:, None]), largest / INT8_MAX
    else:
        quantised, scale = to_fp8(rows, largest[:, None]), largest / FP8_MAX
    return quantised, scale + not_finite


@triton.jit
def _quantise_keys(
    key_ptr,
    stride_s,
    stride_d,
    output_ptr,
    scale_ptr,
    mean_ptr,
    block,
    length,
    HEAD_DIM: tl.constexpr,
    STORED_DIM: tl.constexpr,
    BLOCK_D: tl.constexpr,
):
    """Quantise one block of keys.

    `output_ptr` and `scale_ptr` point to the block, the other pointers to its head.
    """
    inside, dims = tl.arange(0, CACHE_BLOCK), tl.arange(0, BLOCK_D)
    tokens, has_dim = block * CACHE_BLOCK + inside, dims < HEAD_DIM
    is_token = tokens < length
    places = tokens[:, None].to(tl.int64) * stride_s + dims[None, :] * stride_d
    key = tl.load(key_ptr + places, mask=is_token[:, None] & has_dim[None, :], other=0.0)
    mean = sampled_mean(key_ptr, stride_s, stride_d, dims, has_dim, length)
    mean = tl.where(tl.abs(mean) < float("inf"), mean, 0.0)  # any finite offset is valid
    key = tl.where(has_dim[None, :], key.to(tl.float32) - mean[None, :], 0.0)
    quantised, scale = _quantise_rows(key, is_token, output_ptr.dtype.element_ty == tl.int8)
    places = inside[:, None] * STORED_DIM + dims[None, :]
    tl.store(output_ptr + places, quantised, mask=dims[None, :] < STORED_DIM)
    tl.store(scale_ptr + inside, scale)
    tl.store(mean_ptr + dims, mean, mask=(block == 0) & has_dim)


@triton.jit
def _quantise_values(
    value_ptr,
    stride_s,
    stride_d,
    output_ptr,
    scale_ptr,
    block,
    length,
    HEAD_DIM: tl.constexpr,
    BLOCK_D: tl.constexpr,
):
    """Quantise and transpose one block of values. The pointers are those of `_quantise_keys`."""
    inside, dims = tl.arange(0, CACHE_BLOCK), tl.arange(0, BLOCK_D)
    tokens, has_dim = block * CACHE_BLOCK + inside, dims < HEAD_DIM
    is_token = tokens < length
    places = tokens[:, None].to(tl.int64) * stride_s + dims[None, :] * stride_d
    value = tl.load(value_ptr + places, mask=is_token[:, None] & has_dim[None, :], other=0.0)
    is_int8: tl.constexpr = output_ptr.dtype.element_ty == tl.int8
    quantised, scale = _quantise_rows(value.to(tl.float32), is_token, is_int8)
    order = inside // 16 * 16 + inside % 8 * 2 + inside // 8 % 2
    places = dims[:, None] * CACHE_BLOCK + order[None, :]
    tl.store(output_ptr + places, tl.trans(quantised), mask=has_dim[:, None])
    tl.store(scale_ptr + inside, scale)


@triton.jit(do_not_specialize=["kv_heads", "kv_len"])
def _quantise_cache(
    key_ptr,
    value_ptr,
    lengths_ptr,
    table_ptr,
    key_out_ptr,
    key_scale_ptr,
    key_mean_ptr,
    value_out_ptr,
    value_scale_ptr,
    key_stride_b,
    key_stride_h,
    key_stride_s,
    key_stride_d,
    value_stride_b,
    value_stride_h,
    value_stride_s,
    value_stride_d,
    kv_heads,
    kv_len,
    HEAD_DIM: tl.constexpr,
    STORED_DIM: tl.constexpr,
    BLOCK_D: tl.constexpr,
    V_HEAD_DIM: tl.constexpr,
    BLOCK_DV: tl.constexpr,
):
    """Quantise one block of keys, or one block of values in programs whose second index is 1."""
    blocks = tl.cdiv(kv_len, CACHE_BLOCK)
    block, head = tl.program_id(0) % blocks, (tl.program_id(0) // blocks).to(tl.int64)
    batch, kv_head = head // kv_heads, head % kv_heads
    length = kv_len
    if lengths_ptr is not None:
        length = tl.minimum(tl.load(lengths_ptr + batch), kv_len)
    stored = head * blocks + block
    if table_ptr is not None:
        page = tl.load(table_ptr + batch * blocks + block).to(tl.int64)
        stored = page * kv_heads + kv_head
    first = stored * CACHE_BLOCK
    if tl.program_id(1) == 0:
        _quantise_keys(
            key_ptr + batch * key_stride_b + kv_head * key_stride_h,
            key_stride_s,
            key_stride_d,
            key_out_ptr + first * STORED_DIM,
            key_scale_ptr + first,
            key_mean_ptr + head * HEAD_DIM,
            block,
            length,
            HEAD_DIM,
            STORED_DIM,
            BLOCK_D,
        )
    else:
        _quantise_values(
            value_ptr + batch * value_stride_b + kv_head * value_stride_h,
            value_stride_s,
            value_stride_d,
            value_out_ptr + first * V_HEAD_DIM,
            value_scale_ptr + first,
            block,
            length,
            V_HEAD_DIM,
            BLOCK_DV,
        )


def quantise_cache(
    key: Tensor,
    value: Tensor,
    dtype: torch.dtype,
    *,
    lengths: Tensor | None = None,
    block_table: Tensor | None = None,
) -> QuantisedCache:
    """Return a cache of keys and values quantised to `dtype` (int8 or float8_e4m3fn).

    Args:
        key: (B, Hkv, Sk, D), float16 or bfloat16, any strides, Sk at least 1.
        value: (B, Hkv, Sk, Dv), like the key.
        lengths: (B,) int32, number of valid tokens of each sequence; invalid tokens are not read.
        block_table: (B, ⌈Sk / `CACHE_BLOCK`⌉) int32, contiguous: the page of each block, a
            permutation of all page numbers; None for a cache without pages.

    Raises:
        ValueError: the shapes do not fit together.
    """
    check_shapes(key.shape, key.shape, value.shape)
    batch, kv_heads, kv_len, head_dim = key.shape
    lengths = vector("seqused_k", lengths, batch)
    if lengths is not None and lengths.dtype != torch.int32:
        lengths = lengths.int()  # descriptors take 32-bit coordinates
    v_dim, blocks = value.shape[3], triton.cdiv(kv_len, CACHE_BLOCK.value)

    first, inner = (batch, blocks) if block_table is None else (batch * blocks, 1)

    def empty(*shape: int, dtype: torch.dtype = torch.float32) -> Tensor:
        return torch.empty(shape, dtype=dtype, device=key.device)

    cache = QuantisedCache(
        empty(first, kv_heads, inner * CACHE_BLOCK.value, _stored(head_dim), dtype=dtype),
        empty(first, kv_heads, inner * v_dim, CACHE_BLOCK.value, dtype=dtype),
        empty(first, kv_heads, inner * CACHE_BLOCK.value),
        empty(batch, kv_heads, head_dim),
        empty(first, kv_heads, inner * CACHE_BLOCK.value),
        kv_len,
        lengths,
        block_table,
    )
    launch = _planned(
        (key.shape, value.shape),
        (key.stride(), value.stride()),
        (key.dtype, value.dtype, dtype),
        (layout(lengths), layout(block_table)),
        key.device,
    )
    launch(
        key,
        value,
        lengths,
        block_table,
        cache.key,
        cache.key_scale,
        cache.key_mean,
        cache.value,
        cache.value_scale,
    )
    return cache


def _stored(head_dim: int) -> int:
    """Return the stride between keys in elements, a multiple of 16 bytes as descriptors require."""
    return -(-head_dim // 16) * 16


def _block(head_dim: int) -> int:
    return max(16, int(triton.next_power_of_2(head_dim)))


@functools.lru_cache(maxsize=1024)
def _planned(
    shapes: tuple[torch.Size, torch.Size],
    strides: tuple[tuple[int, ...], tuple[int, ...]],
    dtypes: tuple[torch.dtype, ...],
    others: tuple[Hashable, Hashable],
    device: torch.device,
) -> Launch:
    """Return the launch for keys and values of one shape.

    `dtypes` are the types of keys, values and cache. `others` are the layouts of the lengths and
    the block table, on which compilation depends.
    """
    (batch, kv_heads, kv_len, head_dim), (*_, v_dim) = shapes
    return Launch(
        _quantise_cache,
        (triton.cdiv(kv_len, CACHE_BLOCK.value) * batch * kv_heads, 2, 1),
        device,
        named("key_stride_", "bhsd", strides[0])
        | named("value_stride_", "bhsd", strides[1])
        | {
            "kv_heads": kv_heads,
            "kv_len": kv_len,
            "HEAD_DIM": head_dim,
            "STORED_DIM": _stored(head_dim),
            "BLOCK_D": _block(head_dim),
            "V_HEAD_DIM": v_dim,
            "BLOCK_DV": _block(v_dim),
        },
        num_warps=8,
    )
