"""The inputs of a block of calls, which differ from call to call in every key and value.

In each call, about half of the key's channels change sign. The same channels of all keys of a head
change, so scores change, but a channel's outliers and the size of its mean, which quantised kernels
rely on, stay the same. Runs of value rows are multiplied by factors that are far from 1. So every
output changes, and no sign, scale or order of columns turns an old output into a new one. Pointers,
shapes and strides stay the same.

The inputs are a function of a seed and the call's number, and Python's own generator draws them, so
a judge in another process, with another device or version of PyTorch, makes the same inputs.
"""

from __future__ import annotations

import contextlib
import random
from collections.abc import Iterator

import torch
from torch import Tensor

from capture.call.attention_call import AttentionCall
from capture.call.strides import narrow_expanded
from replay.isolation.output_rows import OutputRows

SIXTEENTHS = (*range(-16, -4), *range(5, 9))
"""Factors of value rows, in sixteenths: they change each value by half or more."""
RUNS = (24, 40)
"""Approximate minimum and maximum number of runs of value rows that share their factors."""
COLUMN_BLOCKS = 2
"""Minimum number of parts of a row with a factor each, so that outputs of one key rarely repeat."""
EXAMINED_GROUPS = 3
EXAMINED_ROWS = 8
"""Number of groups of output rows that are examined, and of rows in a group."""
ONE_THREAD = 2**21
"""Maximum number of elements that one CPU thread multiplies. On a busy processor, threads wait for
each other for ten milliseconds."""

_FACTORS = bytes(SIXTEENTHS[byte % 16] & 255 for byte in range(256))
_SIGNS = bytes((16 if byte % 2 else -16) & 255 for byte in range(256))


class BlockInputs:
    """Inputs of a block of calls, determined by a seed and each call's number.

    Args:
        call: call whose key and value are changed in place, and copied here.
        values_only: keep the key unchanged, for kernels that choose keys by their contents.
    """

    def __init__(self, call: AttentionCall, *, values_only: bool = False) -> None:
        self._key, self._value = narrow_expanded(call.key), narrow_expanded(call.value)
        self._pristine = self._key.clone(), self._value.clone()
        self._values_only = values_only
        self._is_shared = _may_overlap(call.key, call.value)
        # Pages of one sequence have the same signs, or its keys would no longer have means.
        self._sign_stride = int(call.page_table is None)
        width = max(self._value.shape[3], 1)
        self._blocks = next((n for n in range(COLUMN_BLOCKS, width) if width % n == 0), width)

    def apply(self, seed: int, number: int) -> None:
        """Write the inputs of a call, without waiting for a GPU."""
        draw = random.Random(f"{seed} {number}")
        key, value = self._pristine
        batch, heads, length, _ = value.shape
        run = max(draw.randint(length // RUNS[1], length // RUNS[0]), 1)
        first, runs, blocks = draw.randrange(run), length // run + 2, self._blocks
        # Heads read windows of one table, shifted by an entry from head to head.
        signs, factors = sum(key.shape[:2]) + key.shape[3], batch + heads + runs * blocks
        drawn = draw.randbytes(signs + factors)
        table = drawn[:signs].translate(_SIGNS) + drawn[signs:].translate(_FACTORS)
        with one_thread(max(key.numel(), value.numel())):
            entries = self._on_device(table)
            if self._is_shared:
                value = self._value.copy_(value)
            if not self._values_only:
                size, strides = (*key.shape[:2], 1, key.shape[3]), (self._sign_stride, 1, 0, 1)
                _multiply(self._key, key, entries.as_strided(size, strides))
            size, strides = (batch, heads, runs, run, blocks), (1, 1, blocks, 0, 1)
            of_rows = entries.as_strided(size, strides, signs).flatten(2, 3)
            target, source = (
                tensor.unflatten(3, (blocks, tensor.shape[3] // blocks))
                for tensor in (self._value, value)
            )
            _multiply(target, source, of_rows[:, :, first : first + length, :, None])

    def restore(self) -> None:
        """Write the recorded inputs."""
        with one_thread(max(self._key.numel(), self._value.numel())):
            for tensor, pristine in zip((self._key, self._value), self._pristine, strict=True):
                tensor.copy_(pristine)

    def _on_device(self, table: bytes) -> Tensor:
        dtype, device = self._value.dtype, self._value.device
        sixteenths = torch.frombuffer(bytearray(table), dtype=torch.int8)
        entries = sixteenths.to(dtype if dtype.itemsize > 1 else torch.float16).div_(16)
        if device.type == "cuda":
            return entries.pin_memory().to(device, non_blocking=True)
        return entries.to(device)


def draw_rows(call: AttentionCall, drawn: int) -> list[OutputRows]:
    """Return the rows of an output that a judge examines, in groups within one key head.

    Args:
        drawn: random number, drawn after the calls, that determines the rows.
    """
    draw, shape = random.Random(drawn), call.shape
    group = max(shape.q_heads // shape.kv_heads, 1)
    groups = []
    for _ in range(EXAMINED_GROUPS):
        batch, kv_head = draw.randrange(shape.batch), draw.randrange(shape.kv_heads)
        heads = draw.choices(range(kv_head * group, (kv_head + 1) * group), k=EXAMINED_ROWS)
        if call.sinks is not None:  # `some_rows` computes a head's sink
            heads = heads[:1] * EXAMINED_ROWS
        queries = draw.choices(range(shape.q_len), k=EXAMINED_ROWS)
        groups.append(OutputRows([batch] * EXAMINED_ROWS, heads, queries))
    return groups


@contextlib.contextmanager
def one_thread(elements: int = 0) -> Iterator[None]:
    """Use one CPU thread for small operations, on tensors of at most `ONE_THREAD` elements.

    Several threads wait for each other after each operation. On a busy machine (two cores, a load
    of 3) two threads took 2,240 ms and one thread 45 ms.
    """
    threads = torch.get_num_threads()
    if threads == 1 or elements > ONE_THREAD:
        yield
        return
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(threads)


def _multiply(target: Tensor, source: Tensor, factors: Tensor) -> None:
    if source.dtype.itemsize > 1:
        torch.mul(source, factors, out=target)
    else:  # PyTorch has no products in float8
        target.copy_(source.to(factors.dtype) * factors)


def _may_overlap(*tensors: Tensor) -> bool:
    """Return whether the memory of both tensors lies in one range (absorbed MLA, fused layers)."""
    first, second = sorted(tensors, key=Tensor.data_ptr)
    sizes = zip(first.shape, first.stride(), strict=True)
    last = sum((size - 1) * stride for size, stride in sizes)
    end = first.data_ptr() + (last + 1) * first.itemsize
    return first.numel() > 0 and first.data_ptr() <= second.data_ptr() < end
