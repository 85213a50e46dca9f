"""A key/value cache in 16 bits or FP8, contiguous or in pages, read in full or at chosen tokens."""

from __future__ import annotations

from collections.abc import Hashable
from typing import Any, Literal, NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from attention_kernels.launch.descriptors import can_be_described, described, nowhere
from attention_kernels.launch.launcher import layout
from attention_kernels.launch.shape_checks import Sizes
from attention_kernels.options import is_leading_part

WORTH_DESCRIBING = 2**26
"""Minimum number of elements in keys and values for which descriptors pay off.

With this many elements, a call takes the GPU as long as it takes the host. Descriptors cost the
host some microseconds and save half a microsecond on an H200.
"""
BUSY_ROWS = range(17, 33)
"""Numbers of query rows per key head for which arithmetic, not memory, limits a multiprocessor.

With descriptors, these calls take 40 % fewer instructions. With more queries, descriptors cause
register spills.
"""
LEAST_PAGE = 64
"""Minimum number of tokens in a page for which whole blocks are loaded."""

FP8 = (torch.float8_e4m3fn, torch.float8_e5m2)
"""Types of an FP8 cache."""
PAIRED = 32
"""Divisor of the dimensions and strides of an FP8 cache that is read in pairs."""

Access = Literal["described", "direct", "indirect", "quantised"]
"""Ways to read a cache: through tensor descriptors, through pointers, through pointers to tokens
whose positions are looked up first, or through descriptors of an 8-bit cache."""


class Cache(NamedTuple):
    """Keys and values, and the positions of each sequence's tokens in them."""

    key: Tensor
    """(B, Hkv, Sk, D), or pages (P, page_size, Hkv, D)."""
    value: Tensor
    """(B, Hkv, Sk, Dv), or pages (P, page_size, Hkv, Dv)."""
    block_table: Tensor | None = None
    """(B, pages of the longest sequence) int32; None if the keys are contiguous."""
    lengths: Tensor | None = None
    """(B,) int32, number of tokens of each sequence; None for all."""
    indices: Tensor | None = None
    """(B, Hkv, K) int32, the tokens to attend to; None for all. Negative entries and entries beyond
    the length are skipped."""
    key_scale: Tensor | None = None
    """(B, Hkv) float32, one FP8 unit of a sequence's keys; None for keys in 16 bits."""
    value_scale: Tensor | None = None

    @classmethod
    def in_pages(
        cls,
        key_pages: Tensor,
        value_pages: Tensor,
        block_table: Tensor,
        lengths: Tensor,
        indices: Tensor | None = None,
        scales: tuple[Tensor | None, Tensor | None] = (None, None),
    ) -> Cache:
        """Return a cache in pages, with the rows of its table made contiguous for the kernel."""
        if block_table.shape[1] > 1 and block_table.stride(1) != 1:
            block_table = block_table.contiguous()
        return cls(key_pages, value_pages, block_table, lengths, indices, *scales)

    @property
    def shapes(self) -> tuple[Sizes, Sizes]:
        """Return (B, Hkv, Sk, D) and (B, Hkv, Sk, Dv); with pages, Sk is the table's capacity.

        Raises:
            ValueError: the shapes of key pages and value pages do not match.
        """
        key, value, table = self.key.shape, self.value.shape, self.block_table
        if table is None:
            return key, value
        if len(key) != 4 or key[:3] != value[:3]:
            raise ValueError(
                f"pages of keys {tuple(key)} and of values {tuple(value)}: expected (pages, page "
                "size, heads, head dimension) of both, which differ in the last at most"
            )
        tokens = table.shape[0], key[2], table.shape[1] * key[1]
        return (*tokens, key[3]), (*tokens, value[3])

    @property
    def sizes(self) -> tuple[int, int, int]:
        """Return Hkv, the maximum number of tokens of a sequence, and Dv."""
        if self.block_table is None:
            return self.key.shape[1], self.key.shape[2], self.value.shape[-1]
        return self.key.shape[2], self.block_table.shape[1] * self.page_size, self.value.shape[3]

    @property
    def layouts(self) -> Hashable:
        """Return everything that a plan may depend on."""
        return tuple(map(layout, self))

    @property
    def scales(self) -> tuple[None, None, None]:
        """Return None for each scale of a block of tokens."""
        return None, None, None

    @property
    def factors(self) -> tuple[Tensor | None, Tensor | None]:
        """Return the FP8 units of keys and of values, (B, Hkv) each; None in 16 bits."""
        return self.key_scale, self.value_scale

    @property
    def tail(self) -> int:
        """Return the number of elements that follow the value in a key; 0 if the value is not the
        key's first part.

        In absorbed MLA, the value is the first part of the key.
        """
        beyond = self.key.shape[-1] - self.value.shape[-1]
        return beyond if beyond > 0 and is_leading_part(self.value, self.key) else 0

    @property
    def page_size(self) -> int:
        """Return the number of tokens in a page; 0 without pages."""
        return 0 if self.block_table is None else self.key.shape[1]

    @property
    def in_pairs(self) -> bool:
        """Return whether two FP8 numbers of a token are read as one of 16 bits: `fp8_pairs.py`.

        Loads must be of 16 bytes, so that the threads hold neighbouring columns.
        """
        return self.key.element_size() == 1 and all(
            tensor.stride(-1) == 1
            and tensor.data_ptr() % 16 == 0
            and tensor.shape[-1] % PAIRED == 0
            and all(stride % PAIRED == 0 for stride in tensor.stride()[:-1])
            for tensor in (self.key, self.value)
        )

    @property
    def pointers(self) -> Access:
        """Return the way to read the cache through pointers."""
        is_direct = self.block_table is None and self.indices is None
        return "direct" if is_direct else "indirect"

    def access(self, is_cut: bool, begins_late: bool = False, rows: int = 1) -> Access:
        """Return how the kernel reads the cache.

        Descriptors load whole blocks, and a block may not cross from one page to the next. Masked
        tokens could be NaN, so descriptors are not used if a window masks a sequence's first
        tokens.

        Args:
            is_cut: whether a diagonal masks some tokens.
            begins_late: whether a window masks the first tokens.
            rows: number of query rows per key head.
        """
        in_pages, pointers = self.block_table is not None, self.pointers
        numbers = self.key.numel() + self.value.numel()
        if self.indices is not None or begins_late or numbers < WORTH_DESCRIBING:
            return pointers
        # Pointers are as fast if a contiguous cache is not read to its end (one query, H200).
        is_cut |= self.lengths is not None
        if not in_pages and not self.tail and is_cut and rows not in BUSY_ROWS:
            return pointers
        if in_pages and _largest_block(self.page_size) < LEAST_PAGE:
            return pointers
        both = self.key, self.value
        filling_blocks = both[1:] if self.tail else both
        fits = all(can_be_described(self._by_head(tensor)) for tensor in both)
        fits &= all(tensor.shape[3] in (16, 32, 64, 128, 256, 512) for tensor in filling_blocks)
        return "described" if fits else pointers

    def strides(self, tensor: Tensor) -> tuple[int, ...]:
        """Return the strides between batch elements or pages, heads, tokens, and elements of a
        head."""
        first, second, third, within = tensor.stride()
        paged = self.block_table is not None
        return (first, third, second, within) if paged else (first, second, third, within)

    @property
    def largest_block(self) -> int | None:
        """Return the maximum number of tokens that a descriptor loads at once."""
        return _largest_block(self.page_size) if self.page_size else None

    def descriptors(
        self, block_n: int, block_d: int, block_dv: int, block_tail: int
    ) -> tuple[Any, Any]:
        """Return descriptors of key and value that hold no memory; with a tail, both describe the
        key."""
        key, value = self._by_head(self.key), self._by_head(self.value)
        in_one = 1 + self.in_pairs
        if self.in_pairs:
            key, value = key.view(torch.int16), value.view(torch.int16)
        second = described(key, block_n, block_tail // in_one) if block_tail else None
        return (
            nowhere(described(key, block_n, block_d // in_one)),
            nowhere(second or described(value, block_n, block_dv // in_one)),
        )

    def _by_head(self, tensor: Tensor) -> Tensor:
        """Return a view (B or P, Hkv, tokens, D)."""
        return tensor if self.block_table is None else tensor.transpose(1, 2)


def expanded_scales(
    query: Tensor,
    key_pages: Tensor,
    value_pages: Tensor,
    key_scale: Tensor | None,
    value_scale: Tensor | None,
    batch: int,
) -> tuple[Tensor | None, Tensor | None]:
    """Return the scales of an FP8 cache expanded to (B, Hkv), or None for a cache in 16 bits.

    Raises:
        ValueError: see `paged_batch`.
    """
    given = (key_scale, value_scale)
    is_fp8 = [key_pages.dtype in FP8, value_pages.dtype in FP8]
    has_one_type = key_pages.dtype == value_pages.dtype
    if is_fp8 != [each is not None for each in given] or not has_one_type:
        raise ValueError(
            f"keys in {key_pages.dtype}, values in {value_pages.dtype}, "
            f"{sum(each is not None for each in given)} scales: expected both in FP8 with "
            "key_scale and value_scale, or neither"
        )
    if is_fp8[0] and query.dtype == torch.float32:
        raise ValueError("float32 queries over an FP8 cache: expected float16 or bfloat16")
    shape = (batch, key_pages.shape[2])
    return (
        None if key_scale is None else key_scale.float().expand(shape),
        None if value_scale is None else value_scale.float().expand(shape),
    )


def _largest_block(page_size: int) -> int:
    """Return the largest power of two that divides a page's size."""
    return page_size & -page_size


@triton.jit
def find_tokens(
    positions,
    is_valid,
    batch,
    length,
    indices_ptr,
    table_ptr,
    stride_table,
    PAGE_SIZE: tl.constexpr,
):
    """Return the tokens at `positions` (N,), whether each token exists, and its indices on the
    cache's token axis and first axis.

    The first axis is that of batch elements or pages. `indices_ptr` is None if all tokens are read.
    """
    tokens = positions
    if indices_ptr is not None:
        tokens = tl.load(indices_ptr + positions, mask=is_valid, other=-1)
        is_valid = (tokens >= 0) & (tokens < length)
        tokens = tl.where(is_valid, tokens, 0)
    if PAGE_SIZE == 0:
        slots = tokens
        first = batch
    else:
        numbers = tokens.to(tl.uint32)  # dividing numbers without sign takes fewer instructions
        slots = numbers % PAGE_SIZE
        places = table_ptr + batch.to(tl.int64) * stride_table + numbers // PAGE_SIZE
        first = tl.load(places, mask=is_valid, other=0)
    return tokens, is_valid, slots, first
