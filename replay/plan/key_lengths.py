"""Ranges of key lengths, because one module may call attention with very different lengths.

An IP-Adapter attends to 77 keys of the prompt and to 4 of an image; a cache grows with every token.
Lengths share a range if each is at most `REACH` times the length before. A length between two
ranges belongs to the range whose end is nearer as a ratio.
"""

from __future__ import annotations

import itertools
import math
from bisect import bisect_right
from collections.abc import Iterable, Sequence
from typing import NamedTuple

REACH = 1.25
"""Maximum ratio between two key lengths that share a time or a range.

Times are not extrapolated, because the slope between two nearby lengths is mostly noise.
"""

MOST_KEYS = 2**40
"""Largest key length that a plan can name."""

KernelsByLength = tuple[tuple[int, str], ...]
"""Smallest key length of each kernel, and the kernel; longest first, and the last length is 0."""


class KeyLengths(NamedTuple):
    """Range of key lengths, with both ends."""

    low: int
    high: int

    def __str__(self) -> str:
        numbers = f"{self.low:,}" if self.low == self.high else f"{self.low:,} to {self.high:,}"
        return f"{numbers} {'key' if self.high == 1 else 'keys'}"


def ranges_of(lengths: Iterable[int], reach: float = REACH) -> list[KeyLengths]:
    """Return the ranges of some lengths, shortest first."""
    ranges: list[KeyLengths] = []
    for length in sorted(set(lengths)):
        if ranges and length <= max(ranges[-1].high * reach, ranges[-1].high + 1):
            ranges[-1] = ranges[-1]._replace(high=length)
        else:
            ranges.append(KeyLengths(length, length))
    return ranges


def starts(ranges: Sequence[KeyLengths]) -> list[int]:
    """Return the smallest length that belongs to each of one or more ranges, from 0.

    Raises:
        ValueError: the ranges overlap, or are not in order.
    """
    found = [0]
    for below, above in itertools.pairwise(ranges):
        if below.high >= above.low:
            raise ValueError(f"ranges of key lengths overlap: {below} and {above}")
        found.append(math.isqrt(below.high * above.low) + 1)
    return found


def index_of(kv_len: int, ranges: Sequence[KeyLengths]) -> int:
    """Return the index of the range to which a length belongs."""
    return bisect_right(starts(ranges), kv_len) - 1


def kernels_by_length(kernels: Iterable[tuple[KeyLengths, str]]) -> KernelsByLength:
    """Return the kernels of ranges, in the form that `kernel_for` reads.

    Raises:
        ValueError: the ranges overlap.
    """
    ranges, names = zip(*sorted(kernels), strict=True)
    return tuple(zip(starts(ranges), names, strict=True))[::-1]


def kernel_for(kv_len: int, kernels: KernelsByLength) -> str:
    """Return the kernel of a key length. `torch.compile` can trace this function."""
    first, last = 0, len(kernels) - 1
    while first < last:  # `bisect` cannot be traced
        middle = (first + last) // 2
        if kv_len >= kernels[middle][0]:
            last = middle
        else:
            first = middle + 1
    return kernels[first][1]


def within_reach(ranges: Iterable[KeyLengths]) -> list[KeyLengths]:
    """Return the ranges, each extended by `REACH` at both ends, and joined where they meet."""
    found: list[KeyLengths] = []
    for low, high in sorted(ranges):
        wide = KeyLengths(math.ceil(low / REACH), math.floor(high * REACH))
        if found and wide.low <= found[-1].high + 1:
            found[-1] = found[-1]._replace(high=max(found[-1].high, wide.high))
        else:
            found.append(wide)
    return found
