"""A key/value cache in 16 bits: in one piece or in pages, all of its tokens or chosen ones."""

from __future__ import annotations

from collections.abc import Hashable
from typing import Any, Literal, NamedTuple

import triton
import triton.language as tl
from torch import Tensor

from attention_kernels.launch.descriptors import can_be_described, described, nowhere
from attention_kernels.launch.launcher import layout
from attention_kernels.launch.shape_checks import Sizes
from attention_kernels.options import is_leading_part

WORTH_DESCRIBING = 2**26
"""Least count of numbers in keys and values for which descriptors pay.

A call keeps the GPU busy for as long as the host then. Descriptors cost the host some microseconds
and save an H200 half of one.
"""
BUSY_ROWS = range(17, 33)
"""Queries of a key head that keep a processor busy while memory delivers.

Without addresses they take 40 % fewer instructions. More queries take so many registers that
descriptors spill some.
"""
LEAST_PAGE = 64
"""Least tokens of a page that is loaded in whole blocks."""

Access = Literal["described", "direct", "indirect", "quantised"]
"""Ways to read a cache: through tensor descriptors, through pointers, through pointers to tokens
that are looked up first, or in 8 bits through descriptors."""


class Cache(NamedTuple):
    """Keys and values, and the places of each sequence's tokens in them."""

    key: Tensor
    """(B, Hkv, Sk, D), or pages (P, page_size, Hkv, D)."""
    value: Tensor
    """(B, Hkv, Sk, Dv), or pages (P, page_size, Hkv, Dv)."""
    block_table: Tensor | None = None
    """(B, pages of the longest sequence) int32; None when the keys are in one piece."""
    lengths: Tensor | None = None
    """(B,) int32, how many tokens each sequence has; None for all."""
    indices: Tensor | None = None
    """(B, Hkv, K) int32, the tokens to attend to; None for all. Negative entries and entries beyond
    the length are skipped."""

    @classmethod
    def in_pages(
        cls,
        key_pages: Tensor,
        value_pages: Tensor,
        block_table: Tensor,
        lengths: Tensor,
        indices: Tensor | None = None,
    ) -> Cache:
        """Return a cache in pages, with a table whose rows are contiguous, as the kernel reads
        them."""
        if block_table.shape[1] > 1 and block_table.stride(1) != 1:
            block_table = block_table.contiguous()
        return cls(key_pages, value_pages, block_table, lengths, indices)

    @property
    def shapes(self) -> tuple[Sizes, Sizes]:
        """Return (B, Hkv, Sk, D) and (B, Hkv, Sk, Dv); with pages, Sk is what the table has room
        for.

        Raises:
            ValueError: keys and values lie in different pages.
        """
        key, value, table = self.key.shape, self.value.shape, self.block_table
        if table is None:
            return key, value
        if key[:3] != value[:3]:
            raise ValueError(f"pages of keys {tuple(key)} and of values {tuple(value)} differ")
        tokens = table.shape[0], key[2], table.shape[1] * key[1]
        return (*tokens, key[3]), (*tokens, value[3])

    @property
    def sizes(self) -> tuple[int, int, int]:
        """Return Hkv, the most tokens that a sequence can have, and Dv."""
        if self.block_table is None:
            return self.key.shape[1], self.key.shape[2], self.value.shape[3]
        return self.key.shape[2], self.block_table.shape[1] * self.page_size, self.value.shape[3]

    @property
    def layouts(self) -> Hashable:
        """Return all that a plan may depend on."""
        return tuple(map(layout, self))

    @property
    def scales(self) -> tuple[None, None, None]:
        """Return None for each scale: keys and values are in 16 bits."""
        return None, None, None

    @property
    def tail(self) -> int:
        """Return how many numbers of a key follow its value, 0 where the value is not the key's
        first part.

        It is the first part in absorbed MLA.
        """
        beyond = self.key.shape[3] - self.value.shape[3]
        return beyond if beyond > 0 and is_leading_part(self.value, self.key) else 0

    @property
    def page_size(self) -> int:
        """Return the tokens in a page; 0 without pages."""
        return 0 if self.block_table is None else self.key.shape[1]

    def access(self, is_cut: bool, begins_late: bool = False, rows: int = 1) -> Access:
        """Return how the kernel reads the cache.

        Descriptors take whole blocks, and no block of tokens may lie in two pages. Tokens that do
        not count could be NaN, so a window may not leave them at a sequence's beginning.

        Args:
            is_cut: whether a diagonal leaves some tokens out.
            begins_late: whether a window leaves out the first tokens.
            rows: queries of a key head.
        """
        in_pages = self.block_table is not None
        pointers: Access = "indirect" if in_pages or self.indices is not None else "direct"
        numbers = self.key.numel() + self.value.numel()
        if self.indices is not None or begins_late or numbers < WORTH_DESCRIBING:
            return pointers
        # In one piece, where something is cut off, pointers are as fast (one query, H200).
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
        """Return the strides of batch elements or pages, of heads, of tokens and within a head."""
        first, second, third, within = tensor.stride()
        paged = self.block_table is not None
        return (first, third, second, within) if paged else (first, second, third, within)

    @property
    def largest_block(self) -> int | None:
        """Return the most tokens that a descriptor loads at once."""
        return _largest_block(self.page_size) if self.page_size else None

    def descriptors(
        self, block_n: int, block_d: int, block_dv: int, block_tail: int
    ) -> tuple[Any, Any]:
        """Return descriptors of key and value without their memory; with a tail, both are of the
        key."""
        key, value = self._by_head(self.key), self._by_head(self.value)
        second = described(key, block_n, block_tail) if block_tail else None
        return (
            nowhere(described(key, block_n, block_d)),
            nowhere(second or described(value, block_n, block_dv)),
        )

    def _by_head(self, tensor: Tensor) -> Tensor:
        """Return (B or P, Hkv, tokens, D)."""
        return tensor if self.block_table is None else tensor.transpose(1, 2)


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
    """Return tokens at `positions` (N,), whether each exists, and its places on the cache's token
    axis and first axis.

    The first axis is of batch elements or of pages. `indices_ptr` is None where all tokens count.
    """
    tokens = positions
    if indices_ptr is not None:
        tokens = tl.load(indices_ptr + positions, mask=is_valid, other=-1)
        is_valid = (tokens >= 0) & (tokens < length)
        tokens = tl.where(is_valid, tokens, 0)
    if PAGE_SIZE == 0:
        slots = tokens.to(tl.int64)
        first = batch.to(tl.int64)
    else:
        slots = (tokens % PAGE_SIZE).to(tl.int64)
        places = table_ptr + batch.to(tl.int64) * stride_table + tokens // PAGE_SIZE
        first = tl.load(places, mask=is_valid, other=0).to(tl.int64)
    return tokens, is_valid, slots, first
