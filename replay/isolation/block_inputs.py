"""The inputs of a block of calls, which differ from call to call so that every output changes.

In each call, about half of the query's channels change sign, except where the key has outlier
channels. So scores change, and no 8-bit key becomes coarser. Runs of value rows are multiplied by
factors that are far from 1, so no sign, scale or order of columns turns an old output into a new
one. A few scattered rows of the key change sign, and their values become larger, so that a kept
conversion of either is stale. In a decode, only these rows of the values change: to write all would
take longer than the call, and a kernel could save that time. Pointers, shapes and strides stay the
same.

The inputs are a function of a seed, the call's number, and bits of the output before. So calls
cannot be computed together. Python's own generator draws, and bits have no rounding, so a judge in
another process, with another device or version of PyTorch, makes the same inputs.
"""

from __future__ import annotations

import contextlib
import math
import random
from collections.abc import Iterator
from typing import NamedTuple

import torch
from torch import Tensor

from capture.call.attention_call import AttentionCall
from capture.call.strides import narrow_expanded
from replay.isolation.output_rows import OutputRows

SIXTEENTHS = (*range(-16, -4), *range(5, 9))
"""Factors of value rows, in sixteenths: they change each value by half or more."""
RUNS = (24, 40)
"""Approximate minimum and maximum number of runs of value rows that share their factors."""
ROWS_PER_CHANGED, ENLARGED = 64, 8.0
"""One key row of so many changes its sign in a call, and its values become so many times as large.
Their share of an output is then about as large as that of all others, so even a kept 8-bit
conversion of either is wrong."""
ROW_PARTS = 4
"""Minimum number of parts of a row with a factor each, so that outputs of one key rarely repeat."""
EXAMINED, EXAMINED_ROWS = 16, 8
"""Number of groups of output rows that are examined, of as many calls as possible, and of rows in a
group. A kernel that skips a quarter of its calls is found in 99 of 100 blocks."""
ONE_THREAD = 2**21
"""Maximum number of elements that one CPU thread multiplies. On a busy processor, threads wait for
each other for ten milliseconds."""

OUTLIER = 4.0
"""Size of a channel's largest key, in units of the median channel's, above which it keeps its sign.
An attention sink with such channels stays a sink: without it, 8-bit keys beside it are too coarse.
"""
DECODE_ROWS = 64
"""Maximum number of query rows of a key head in a decode, which takes the time to read the keys."""

HIGH_BIT = 3
"""Place of the bit of an output that changes the next query, below its leading bit. An eighth of an
element is more than the error of 16 bits."""

_INTEGERS = {1: torch.int8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
_FACTORS = bytes(SIXTEENTHS[byte % 16] & 255 for byte in range(256))
_SIGNS = bytes((16 if byte % 2 else -16) & 255 for byte in range(256))


class _Drawn(NamedTuple):
    """Changes of the inputs of one call."""

    of_query: Tensor
    """Signs (B, Hq, 1, D)."""
    opposite: Tensor
    """The other signs of all channels that may change their sign."""
    of_runs: Tensor
    """Factors of the runs of value rows: (B, Hkv, runs, parts of a row)."""
    first: int
    """Place of the first row in its run."""
    turn: int
    """Number that determines a row and a head of the output before, whose bits change signs."""
    rows: Tensor
    """Indices of the rows that the last call changed, and of as many rows for this call."""
    sources: Tensor
    """Indices of what to write there, in `_SomeRows`."""


class _SomeRows:
    """Rows of a tensor that a call changes, and that the next call changes back.

    Args:
        tensor: (…, S, D); changed in place, and copied here.
        factors: what changed rows are multiplied by; broadcasts to the tensor.
    """

    def __init__(self, tensor: Tensor, factors: Tensor) -> None:
        self._length = tensor.shape[2]
        changed = torch.empty_like(tensor)
        _multiply(changed, tensor, factors)
        # Rows are only copied, so a float8 may be taken for an integer, which has these operations.
        self._memory = tensor.view(torch.uint8) if tensor.itemsize == 1 else tensor
        both = (self._memory, changed.view(self._memory.dtype))
        self._both = torch.cat(both, 2)

    def apply(self, drawn: _Drawn) -> None:
        self._memory.index_copy_(2, drawn.rows, self._both.index_select(2, drawn.sources))

    def restore(self) -> None:
        self._memory.copy_(self._both[:, :, : self._length])


class BlockInputs:
    """Inputs of a block of calls, determined by a seed and each call's number.

    Args:
        call: call whose query, key and value are changed in place, and copied here.
        recorded: call as the judge has it, if `call` is an equal form of that call.
        values_only: change only the values, for kernels that choose keys by their contents.
    """

    def __init__(
        self,
        call: AttentionCall,
        recorded: AttentionCall | None = None,
        *,
        values_only: bool = False,
    ) -> None:
        self._query, self._value = narrow_expanded(call.query), narrow_expanded(call.value)
        self._pristine = self._query.clone(), self._value.clone()
        self._is_shared = _may_overlap(call.query, call.value)
        self._has_query = not values_only
        kept = _kept_channels(call)
        self._kept = _of_query_heads(kept, call, self._query)
        self._some: list[_SomeRows] = []
        key = narrow_expanded(call.key)
        self._length = key.shape[2]
        if not values_only:
            self._some.append(_SomeRows(key, 1 - 2 * (~kept).to(self._kind)))
        self._has_value = values_only or not _is_decode(recorded or call)
        if not self._has_value:
            enlarged = torch.full((1,), ENLARGED, dtype=self._kind, device=call.device)
            self._some.append(_SomeRows(self._value, enlarged))
        bits = round(-math.log2(torch.finfo(call.dtype).eps))
        high_bit = torch.tensor(1 << max(bits - HIGH_BIT, 0), dtype=_INTEGERS[call.dtype.itemsize])
        self._high_bits = (~self._kept).to(high_bit.dtype) * high_bit.to(call.device)
        self._plus_minus = torch.tensor([1, -1], dtype=self._kind, device=call.device)
        self._run = 1
        self._drawn: list[_Drawn] = []

    @property
    def _kind(self) -> torch.dtype:
        """Type of factors: the values' own, unless it has no products."""
        dtype = self._value.dtype
        return dtype if dtype.itemsize > 1 else torch.float16

    def draw(self, seed: int, calls: int) -> None:
        """Draw the changes of a block of calls, without waiting for a GPU.

        All calls together need as many operations as one, because each takes a GPU's host as long
        as a short attention call.
        """
        query, (batch, heads, length, width) = self._pristine[0], self._value.shape
        draw = random.Random(seed)
        turns = _integers(draw, calls, 2**31 - 1).tolist()
        bounds = max(length // RUNS[1], 1), max(length // RUNS[0], 1)
        self._run = draw.randint(*bounds)
        first = _integers(draw, calls, self._run).tolist()
        parts = next((n for n in range(ROW_PARTS, width) if width % n == 0), max(width, 1))
        # Heads read windows of one table, shifted by an entry from head to head.
        runs = length // self._run + 2
        signs, factors = sum(query.shape[:2]) + query.shape[3], batch + heads + runs * parts
        table = draw.randbytes(calls * signs).translate(_SIGNS)
        table += draw.randbytes(calls * factors).translate(_FACTORS)
        with one_thread():
            sixteenths = torch.frombuffer(bytearray(table), dtype=torch.int8)
            entries = _on(self._value.device, sixteenths.to(self._kind).div_(16))
            of_query = entries.as_strided(
                (calls, *query.shape[:2], 1, query.shape[3]), (signs, 1, 1, 0, 1)
            ).masked_fill(self._kept, 1)
            of_runs = entries.as_strided(
                (calls, batch, heads, runs, parts), (factors, 1, 1, parts, 1), calls * signs
            )
            rows = _on(self._value.device, _drawn_rows(draw, calls, self._length))
            last = torch.cat([rows[:1], rows[:-1]])
            targets = torch.cat([last, rows], 1)
            sources = torch.cat([last, rows + self._length], 1)
            sources[0, : rows.shape[1]] += self._length
            opposite = torch.where(self._kept, of_query, -of_query)
        all_drawn = zip(of_query, opposite, of_runs, first, turns, targets, sources, strict=True)
        self._drawn = [_Drawn(*each) for each in all_drawn]

    def apply(self, number: int, last: Tensor | None) -> None:
        """Write the inputs of a call, over the recorded inputs or those of the call before.

        Args:
            last: output of the call before, (B, Hq, Sq, Dv); None for the first call.
        """
        (query, value), drawn = self._pristine, self._drawn[number]
        with one_thread(max(query.numel(), value.numel())):
            if last is not None:
                drawn = self._signed(drawn, last)
            if self._is_shared:
                value = self._value.copy_(value)
            if self._has_query:
                _multiply(self._query, query, drawn.of_query)
            if self._has_value:
                batch, heads, runs, parts = drawn.of_runs.shape
                of_rows = drawn.of_runs[:, :, :, None].expand(batch, heads, runs, self._run, parts)
                of_rows = of_rows.flatten(2, 3)[:, :, drawn.first : drawn.first + value.shape[2]]
                if len(changed := drawn.rows[len(drawn.rows) // 2 :]):
                    of_rows.index_copy_(2, changed, of_rows.index_select(2, changed) * ENLARGED)
                target, source = (
                    tensor.unflatten(3, (parts, tensor.shape[3] // parts))
                    for tensor in (self._value, value)
                )
                _multiply(target, source, of_rows[..., None])
            for some in self._some if len(drawn.rows) else ():
                some.apply(drawn)

    def _signed(self, drawn: _Drawn, last: Tensor) -> _Drawn:
        """Return a call's changes, with signs of factors that follow from the output before.

        A kernel may choose an output's last bits, so the signs of a head's queries are higher bits
        of another head's output, and no head's calls can be computed together. One row suffices:
        it takes as long to read the keys as all rows, or the call is not limited by that.
        """
        bits = last.view(_INTEGERS[last.itemsize])
        if not self._has_query:
            odd = bits.sum((0, 1, 2), dtype=torch.int64).bitwise_and_(1)
            signs = self._plus_minus.index_select(0, odd)
            return drawn._replace(of_runs=drawn.of_runs * signs[: drawn.of_runs.shape[3]])
        row = bits[:, :, drawn.turn % last.shape[2], None]
        row = row.roll(drawn.turn, 1 if row.shape[1] > 1 else 0)
        batch, heads, _, width = drawn.of_query.shape
        if width > row.shape[3]:
            row = row.repeat(1, 1, 1, -(-width // row.shape[3]))
        flipped = row[:batch, :heads, :, :width] & self._high_bits != 0
        return drawn._replace(of_query=torch.where(flipped, drawn.opposite, drawn.of_query))

    def restore(self) -> None:
        """Write the recorded inputs."""
        with one_thread(max(self._query.numel(), self._value.numel())):
            if self._has_query:
                self._query.copy_(self._pristine[0])
            if self._has_value:
                self._value.copy_(self._pristine[1])
            for some in self._some:
                some.restore()


def _drawn_rows(draw: random.Random, calls: int, length: int) -> Tensor:
    """Return the indices of the rows that each call changes, (calls, n): int64.

    They are a random number of rows apart. Odd rows and even rows take turns, so that no call
    changes rows of the call before.
    """
    half = max(length // 2, 1)
    count = max(length // ROWS_PER_CHANGED, 1) if length > 1 else 0
    step, start = _integers(draw, 2 * calls, half).view(2, calls, 1)
    return (start + step * torch.arange(count)) % half * 2 + torch.arange(calls)[:, None] % 2


def _integers(draw: random.Random, count: int, below: int) -> Tensor:
    """Return random integers from 0 to `below` - 1."""
    return torch.frombuffer(bytearray(draw.randbytes(4 * count)), dtype=torch.int32).abs() % below


def _on(device: torch.device, table: Tensor) -> Tensor:
    """Return a CPU tensor on a device, without waiting for a GPU."""
    if device.type == "cuda":
        return table.pin_memory().to(device, non_blocking=True)
    return table.to(device)


def draw_rows(call: AttentionCall, calls: int, drawn: int) -> dict[int, list[OutputRows]]:
    """Return the rows of a block's outputs that a judge examines, by the call's number.

    The last call is always among them. Rows come in groups within one key head.

    Args:
        drawn: random number, drawn after the calls, that determines the rows.
    """
    draw, shape = random.Random(drawn), call.shape
    numbers = [*draw.sample(range(calls - 1), min(EXAMINED, calls) - 1), calls - 1]
    group = max(shape.q_heads // shape.kv_heads, 1)

    def rows() -> OutputRows:
        batch, kv_head = draw.randrange(shape.batch), draw.randrange(shape.kv_heads)
        heads = draw.choices(range(kv_head * group, (kv_head + 1) * group), k=EXAMINED_ROWS)
        if call.sinks is not None:  # `some_rows` computes a head's sink
            heads = heads[:1] * EXAMINED_ROWS
        queries = draw.choices(range(shape.q_len), k=EXAMINED_ROWS)
        return OutputRows([batch] * EXAMINED_ROWS, heads, queries)

    return {number: [rows() for _ in range(EXAMINED // len(numbers))] for number in numbers}


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


def _is_decode(call: AttentionCall) -> bool:
    """Return whether few queries of a call each see several keys, whose weights all change."""
    shape = call.shape
    if shape.q_len * shape.q_heads > DECODE_ROWS * shape.kv_heads or call.attn_mask is not None:
        return False
    ranges = (call.key_ranges.of(batch) for batch in range(shape.batch))
    return all(bool((end - first != 1).all()) for first, end in ranges)


def _kept_channels(call: AttentionCall) -> Tensor:
    """Return the channels that keep their sign: bool, broadcasts to the key's memory."""
    key = narrow_expanded(call.key)
    if not key.numel():
        return torch.zeros(1, 1, 1, key.shape[3], dtype=torch.bool, device=key.device)
    magnitudes = key.to(key.dtype if key.dtype.itemsize > 1 else torch.float16).abs()
    largest = magnitudes.amax(2 if call.page_table is None else (0, 2), keepdim=True)
    typical = largest.median(dim=3, keepdim=True).values
    return (largest > OUTLIER * typical) & (typical > 0)


def _of_query_heads(kept: Tensor, call: AttentionCall, query: Tensor) -> Tensor:
    """Return channels of key heads as channels of query heads; broadcasts to the query's memory."""
    if kept.shape[1] > 1:
        kept = kept.repeat_interleave(call.shape.q_heads // kept.shape[1], 1)
    for dim in (0, 1):
        if query.shape[dim] == 1:
            kept = kept.any(dim, keepdim=True)
    return kept


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
