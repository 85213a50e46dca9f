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

import torch
from torch import Tensor

from capture.call.attention_call import AttentionCall
from capture.call.strides import narrow_expanded
from replay.isolation.output_form import output_shape
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

    def apply(self, rows: Tensor, sources: Tensor) -> None:
        """Write rows: recorded ones, or changed ones, whose sources come after those."""
        self._memory.index_copy_(2, rows, self._both.index_select(2, sources))

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
        (batch, heads, length, width), device = self._value.shape, call.device
        self._run_bounds = max(length // RUNS[1], 1), max(length // RUNS[0], 1)
        self._runs = length // self._run_bounds[0] + 2
        self._parts = next((n for n in range(ROW_PARTS, width) if width % n == 0), max(width, 1))
        # Heads read windows of one table, shifted by an entry from head to head.
        self._signs = sum(self._query.shape[:2]) + self._query.shape[3]
        self._factors = batch + heads + self._runs * self._parts
        self._tables: list[Tensor] = []
        self._place_sizes: list[int] = []
        self._turns: list[int] = []
        self._number = torch.zeros(1, dtype=torch.int64, device=device)
        self._all_rows = torch.arange(length, device=device)
        shape, bits = output_shape(call), round(-math.log2(torch.finfo(call.dtype).eps))
        high_bit = torch.tensor(1 << max(bits - HIGH_BIT, 0), dtype=_INTEGERS[call.dtype.itemsize])
        self._high_bits = (~self._kept).to(high_bit.dtype) * high_bit.to(device)
        self._last = torch.zeros((*shape[:2], 1, shape[3]), dtype=high_bit.dtype, device=device)
        if values_only:
            self._last = torch.zeros((1, 1, 1, shape[3]), dtype=torch.int64, device=device)
        self._turned = 1 if shape[1] > 1 else 0
        self._graph: torch.cuda.CUDAGraph | None = None

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
        draw = random.Random(seed)
        turns = _integers(draw, calls, 2**31 - 1)
        self._turns = turns.tolist()
        run = draw.randint(*self._run_bounds)
        first = _integers(draw, calls, run)[:, None]
        signs = draw.randbytes(calls * self._signs).translate(_SIGNS)
        factors = draw.randbytes(calls * self._factors).translate(_FACTORS)
        with one_thread():
            sixteenths = torch.cat([_table(signs, calls), _table(factors, calls)], 1)
            rows = _drawn_rows(draw, calls, self._length)
            before = torch.cat([rows[:1], rows[:-1]])
            sources = torch.cat([before, rows + self._length], 1)
            sources[0, : rows.shape[1]] += self._length
            turned = self._last.shape[self._turned]
            heads = (torch.arange(turned) - turns[:, None]) % turned
            places = [
                heads,
                first,
                torch.full_like(first, run),
                torch.cat([before, rows], 1),
                sources,
            ]
            self._place_sizes = [part.shape[1] for part in places]
            tables = sixteenths.to(self._kind).div_(16), torch.cat(places, 1)
            self._hold(tables)

    def _hold(self, tables: list[Tensor]) -> None:
        """Copy tables to the device: to the memory that a graph reads, if their shapes agree."""
        device = self._value.device
        if [table.shape for table in tables] != [held.shape for held in self._tables]:
            self._tables = [torch.empty_like(table, device=device) for table in tables]
            self._graph = None
        for held, table in zip(self._tables, tables, strict=True):
            held.copy_(table.pin_memory() if device.type == "cuda" else table, non_blocking=True)

    def apply(self, number: int, last: Tensor | None) -> None:
        """Write the inputs of a call, over the recorded inputs or those of the call before.

        On a GPU, the second and all later uses replay a CUDA graph, because each of some twenty
        operations takes the host as long as a short attention call.

        Args:
            last: output of the call before, (B, Hq, Sq, Dv); None for the first call.
        """
        with one_thread(max(self._query.numel(), self._value.numel())):
            self._number.fill_(number)
            if last is None:
                self._last.zero_()
            else:
                bits = last.view(_INTEGERS[last.itemsize])
                row = self._turns[number] % last.shape[2]
                self._last.copy_(bits[:, :, row, None] if self._has_query else _sums(bits))
            if self._graph is not None:
                self._graph.replay()
                return
            self._write()
            if self._value.device.type == "cuda":
                self._graph = self._recorded()

    def _recorded(self) -> torch.cuda.CUDAGraph:
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.stream(torch.cuda.Stream(self._value.device)):
            graph.capture_begin(capture_error_mode="thread_local")
            try:
                self._write()
            finally:
                graph.capture_end()
        return graph

    def _write(self) -> None:
        """Write the inputs of the call whose number is in `_number`, with operations of the device.

        The signs follow from the output before. A kernel may choose an output's last bits, so the
        signs of a head's queries are higher bits of another head's output, and no head's calls can
        be computed together. One row suffices: it takes as long to read the keys as all rows, or
        the call is not limited by that.
        """
        query, value = self._pristine
        factors, places = (table.index_select(0, self._number)[0] for table in self._tables)
        heads, first, run, rows, sources = places.split(self._place_sizes)
        if self._is_shared:
            self._value.copy_(value)
        if self._has_query:
            batch, q_heads, _, width = query.shape
            signs = factors.as_strided((batch, q_heads, 1, width), (1, 1, 0, 1))
            signs = signs.masked_fill(self._kept, 1)
            last = self._last.index_select(self._turned, heads)
            if width > last.shape[3]:
                last = last.repeat(1, 1, 1, -(-width // last.shape[3]))
            flipped = last[:batch, :q_heads, :, :width] & self._high_bits != 0
            _multiply(self._query, query, torch.where(flipped, -signs, signs))
        if self._has_value:
            batch, heads_kv, _, width = value.shape
            size, stride = (batch, heads_kv, self._runs, self._parts), (1, 1, self._parts, 1)
            of_runs = factors.as_strided(size, stride, self._signs)
            if not self._has_query:
                of_runs = of_runs * (1 - 2 * (self._last[..., : self._parts] & 1)).to(of_runs.dtype)
            of_rows = of_runs.index_select(2, (self._all_rows + first) // run)
            if len(changed := rows[len(rows) // 2 :]):
                of_rows.index_copy_(2, changed, of_rows.index_select(2, changed) * ENLARGED)
            parts = (self._parts, width // self._parts)
            target, source = (tensor.unflatten(3, parts) for tensor in (self._value, value))
            _multiply(target, source, of_rows[..., None])
        for some in self._some if len(rows) else ():
            some.apply(rows, sources)

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


def _table(sixteenths: bytes, calls: int) -> Tensor:
    return torch.frombuffer(bytearray(sixteenths), dtype=torch.int8).view(calls, -1)


def _sums(bits: Tensor) -> Tensor:
    return bits.sum((0, 1, 2), dtype=torch.int64, keepdim=True)


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
