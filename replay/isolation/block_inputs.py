"""The inputs of a block of calls, which differ from call to call so that every output changes.

In each call, about half of the query's channels change sign, but not the channels in which the key
has outliers. So scores change, and 8-bit keys stay as precise. Runs of value rows are multiplied by
factors that are far from 1, so an old output with other signs, scale or order of columns is wrong.
A few scattered rows of the key change sign, and their values become larger, so that an old
conversion of the key or value is wrong. In a decode, only these rows of the value change: writing
all rows would take longer than the call, and a kernel could save that time. Pointers, shapes and
strides stay the same.

A seed, the call's number, and bits of the output before determine the inputs. So calls cannot be
computed together. Python's generator draws all numbers, and bits have no rounding. So a judge in
another process makes the same inputs, also with another device or version of PyTorch.
"""

from __future__ import annotations

import contextlib
import math
import random
from collections.abc import Iterator

import torch
import torch.nn.functional as F
from torch import Tensor

from capture.call.attention_call import AttentionCall
from capture.call.strides import narrow_expanded
from replay.isolation.output_form import output_shape
from replay.isolation.output_rows import OutputRows

SIXTEENTHS = (*range(-16, -4), *range(5, 9))
"""Factors of value rows, in sixteenths. Each changes a value by at least half."""
RUNS = (24, 40)
"""Approximate minimum and maximum number of runs of value rows that share their factors."""
ROWS_PER_CHANGED, ENLARGED = 64, 8.0
"""A call changes the sign of one key row in this many, and multiplies its value row by this factor.
The changed rows then weigh about as much in an output as all other rows. So an output from an old
conversion of the key or value is wrong, even in 8 bits."""
ROW_PARTS = 4
"""Minimum number of parts of a value row, each with its own factor. With one visible key, an output
would otherwise repeat often."""
EXAMINED, EXAMINED_ROWS = 16, 8
"""Number of groups of output rows that are examined, spread over calls, and of rows in a group. A
block finds a kernel that skips a quarter of its calls in 99 of 100 cases."""
ONE_THREAD = 2**21
"""Number of elements up to which one CPU thread does all work. On a busy processor, several threads
can wait ten milliseconds for each other."""

OUTLIER = 4.0
"""Ratio of a channel's largest key to that of the median channel, above which the channel keeps its
sign. So an attention sink stays a sink. If it did not, 8-bit keys near it would be too coarse."""
DECODE_ROWS = 64
"""Maximum number of query rows for each key head in a decode. So few rows take no longer than
reading the keys."""

HIGH_BIT = 3
"""Place, below the leading bit, of the output bit that changes the next query. The bit is about an
eighth of the element, which is more than a rounding error in 16 bits."""

_INTEGERS = {1: torch.int8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
_FACTORS = bytes(SIXTEENTHS[byte % 16] & 255 for byte in range(256))


class _SomeRows:
    """Rows of a tensor that a call changes, and that the next call changes back.

    Args:
        tensor: (…, S, D); changed in place, and copied here.
        factors: factors of changed rows; they broadcast to the tensor.
    """

    def __init__(self, tensor: Tensor, factors: Tensor) -> None:
        self._length = tensor.shape[2]
        changed = torch.empty_like(tensor)
        _multiply(changed, tensor, factors)
        self._memory, *both = _words(tensor, tensor.contiguous(), changed.contiguous())
        self._both = torch.cat(both, 2)

    def apply(self, rows: Tensor, sources: Tensor) -> None:
        """Write rows from sources: recorded rows (below S) or changed rows (from S on)."""
        self._memory.index_copy_(2, rows, self._both.index_select(2, sources))

    def restore(self) -> None:
        self._memory.copy_(self._both[:, :, : self._length])


class BlockInputs:
    """Inputs of a block of calls, determined by a seed and each call's number.

    Args:
        call: call whose query, key and value are changed in place, and copied here.
        recorded: the recorded call, which the judge has, if `call` is another form of it.
    """

    def __init__(self, call: AttentionCall, recorded: AttentionCall | None = None) -> None:
        self._query, self._value = narrow_expanded(call.query), narrow_expanded(call.value)
        self._pristine = self._query.clone(), self._value.clone()
        self._is_shared = _may_overlap(call.query, call.value)
        kept = _kept_channels(call)
        self._kept = _of_query_heads(kept, call, self._query)
        key = narrow_expanded(call.key)
        self._length = key.shape[2]
        self._some = [_SomeRows(key, 1 - 2 * (~kept).to(self._kind))]
        self._has_value = not _is_decode(recorded or call)
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
        self._table = torch.empty(0, dtype=torch.int64, device=device)
        self._part_words: list[int] = []
        self._turns: list[int] = []
        self._number = torch.zeros(1, dtype=torch.int64, device=device)
        self._run_of_row = torch.arange(length, device=device)
        shape, bits = output_shape(call), round(-math.log2(torch.finfo(call.dtype).eps))
        high = max(bits - HIGH_BIT, 0)
        high_bit = torch.tensor(1 << high, dtype=_INTEGERS[call.dtype.itemsize]).to(device)
        self._high_bits = (~self._kept).to(high_bit.dtype) * high_bit
        self._to_sign = 8 * high_bit.itemsize - 1 - high
        self._last = torch.zeros((*shape[:2], 1, shape[3]), dtype=high_bit.dtype, device=device)
        self._turned = 1 if shape[1] > 1 else 0
        self._graph: torch.cuda.CUDAGraph | None = None

    @property
    def _kind(self) -> torch.dtype:
        """Type of the factors: the value's dtype, or float16 for 8-bit values."""
        dtype = self._value.dtype
        return dtype if dtype.itemsize > 1 else torch.float16

    def draw(self, seed: int, calls: int) -> None:
        """Draw the changes of a block of calls, without waiting for a GPU.

        One set of operations prepares all calls, because each operation takes the host of a GPU as
        long as a short attention call.
        """
        draw = random.Random(seed)
        turns = _integers(draw, calls, 2**31 - 1)
        self._turns = turns.tolist()
        run = draw.randint(*self._run_bounds)
        first = draw.randrange(run)
        bits = draw.randbytes(calls * self._signs * self._last.itemsize)
        factors = draw.randbytes(calls * self._factors).translate(_FACTORS)
        with one_thread():
            sixteenths = torch.frombuffer(bytearray(factors), dtype=torch.int8).view(calls, -1)
            rows = _drawn_rows(draw, calls, self._length)
            before = torch.cat([rows[:1], rows[:-1]])
            sources = torch.cat([before, rows + self._length], 1)
            sources[0, : rows.shape[1]] += self._length
            turned = self._last.shape[self._turned]
            parts = [
                torch.frombuffer(bytearray(bits), dtype=self._last.dtype).view(calls, -1),
                sixteenths.to(self._kind).div_(16),
                (torch.arange(turned) - turns[:, None]) % turned,
                torch.cat([before, rows], 1),
                sources,
            ]
            parts = [_padded(part) for part in parts]
            self._part_words = [part.shape[1] for part in parts]
            self._hold(torch.cat(parts, 1))
            torch.arange(first, first + len(self._run_of_row), out=self._run_of_row)
            self._run_of_row.div_(run, rounding_mode="floor")

    def _hold(self, table: Tensor) -> None:
        """Copy the table to the device. A graph reads this memory, so equal shapes reuse it."""
        if table.shape != self._table.shape:
            self._table, self._graph = torch.empty_like(table, device=self._table.device), None
        is_pinned = self._table.device.type == "cuda"
        self._table.copy_(table.pin_memory() if is_pinned else table, non_blocking=True)

    def apply(self, number: int, last: Tensor | None) -> None:
        """Write the inputs of a call over the recorded inputs or over those of the call before.

        On a GPU, this replays a CUDA graph from its second use on, because otherwise each of about
        ten operations would take the host as long as a short attention call.

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
                self._last.copy_(bits[:, :, row, None])
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

        The signs follow from the output before. A kernel may choose the last bits of an output, so
        higher bits are used. They come from another head, so that no head's calls can be computed
        together. One output row suffices: in a call that is limited by reading the keys, one row
        takes as long as all rows.
        """
        query, value = self._pristine
        table = self._table.index_select(0, self._number)[0].split(self._part_words)
        bits, factors, heads, rows, sources = table
        if self._is_shared:
            self._value.copy_(value)
        batch, q_heads, _, width = query.shape
        last = self._last.index_select(self._turned, heads)
        if width > last.shape[3]:
            last = last.repeat(1, 1, 1, -(-width // last.shape[3]))
        windows = (batch, q_heads, 1, width), (1, 1, 0, 1)
        bits = bits.view(last.dtype).as_strided(*windows) ^ last[:batch, :q_heads, :, :width]
        signs = (bits & self._high_bits) << self._to_sign
        if query.itemsize != signs.itemsize:  # the output of queries in 8 bits has 16 bits
            integers = _INTEGERS[query.itemsize]
            signs = (signs < 0).to(integers) << 8 * query.itemsize - 1
        target, *operands = _words(self._query, query, signs)
        torch.bitwise_xor(*operands, out=target)
        if self._has_value:
            batch, heads_kv, _, width = value.shape
            size, stride = (batch, heads_kv, self._runs, self._parts), (1, 1, self._parts, 1)
            of_runs = factors.view(self._kind).as_strided(size, stride)
            of_rows = of_runs.index_select(2, self._run_of_row)
            of_rows.index_fill_(2, rows[len(rows) // 2 :], ENLARGED)
            parts = (self._parts, width // self._parts)
            target, source = (tensor.unflatten(3, parts) for tensor in (self._value, value))
            _multiply(target, source, of_rows[..., None])
        for some in self._some if len(rows) else ():
            some.apply(rows, sources)

    def restore(self) -> None:
        """Write the recorded inputs."""
        with one_thread(max(self._query.numel(), self._value.numel())):
            self._query.copy_(self._pristine[0])
            if self._has_value:
                self._value.copy_(self._pristine[1])
            for some in self._some:
                some.restore()


def _drawn_rows(draw: random.Random, calls: int, length: int) -> Tensor:
    """Return the indices of the rows that each call changes, (calls, n): int64.

    The distance between these rows is random. Calls change even and odd rows in turn, so that no
    call changes rows that the call before changed.
    """
    half = max(length // 2, 1)
    count = max(length // ROWS_PER_CHANGED, 1) if length > 1 else 0
    step, start = _integers(draw, 2 * calls, half).view(2, calls, 1)
    return (start + step * torch.arange(count)) % half * 2 + torch.arange(calls)[:, None] % 2


def _integers(draw: random.Random, count: int, below: int) -> Tensor:
    """Return random integers from 0 to `below` - 1."""
    return torch.frombuffer(bytearray(draw.randbytes(4 * count)), dtype=torch.int32).abs() % below


def _padded(part: Tensor) -> Tensor:
    """Return the rows of a table as 8-byte words."""
    words = part.shape[1] * part.itemsize // -8
    return F.pad(part, (0, -words * 8 // part.itemsize - part.shape[1])).view(torch.int64)


def _words(*tensors: Tensor) -> list[Tensor]:
    """Return views of tensors as 8-byte integers, or as integers of their elements' size.

    A GPU needs less time for fewer, larger elements.
    """
    try:
        return [tensor.view(torch.int64) for tensor in tensors]
    except RuntimeError:  # the strides do not permit it
        return [tensor.view(_INTEGERS[tensor.itemsize]) for tensor in tensors]


def draw_calls(calls: int, draw: random.Random) -> list[int]:
    """Return the numbers of the calls that a judge examines, which include the last call."""
    return [*draw.sample(range(calls - 1), min(EXAMINED, calls) - 1), calls - 1]


def draw_rows(call: AttentionCall, calls: int, drawn: int) -> dict[int, list[OutputRows]]:
    """Return the rows of a block's outputs that a judge examines, by the call's number.

    All rows of a group belong to one key head.

    Args:
        drawn: random number, drawn after the calls, that determines the rows.
    """
    draw, shape = random.Random(drawn), call.shape
    numbers = draw_calls(calls, draw)
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
    """Use one CPU thread for operations on tensors of at most `ONE_THREAD` elements.

    Threads wait for each other after every operation. On a busy machine (two cores, a load of 3),
    two threads took 2,240 ms where one thread took 45 ms.
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
    """Return whether a call has no mask and few queries, which all see several keys."""
    shape = call.shape
    if shape.q_len * shape.q_heads > DECODE_ROWS * shape.kv_heads or call.attn_mask is not None:
        return False
    ranges = (call.key_ranges.of(batch) for batch in range(shape.batch))
    return all(bool((end - first != 1).all()) for first, end in ranges)


def _kept_channels(call: AttentionCall) -> Tensor:
    """Return the channels that keep their sign: bool, which broadcasts to the key's memory."""
    key = narrow_expanded(call.key)
    if not key.numel():
        return torch.zeros(1, 1, 1, key.shape[3], dtype=torch.bool, device=key.device)
    magnitudes = key.to(key.dtype if key.dtype.itemsize > 1 else torch.float16).abs()
    largest = magnitudes.amax(2 if call.page_table is None else (0, 2), keepdim=True)
    typical = largest.median(dim=3, keepdim=True).values
    return (largest > OUTLIER * typical) & (typical > 0)


def _of_query_heads(kept: Tensor, call: AttentionCall, query: Tensor) -> Tensor:
    """Return the channels of query heads, given those of key heads; broadcasts to the query."""
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
        limits = torch.finfo if source.is_floating_point() else torch.iinfo
        largest = limits(source.dtype).max  # above it, a conversion to float8 makes NaN
        target.copy_((source.to(factors.dtype) * factors).clamp_(-largest, largest))


def _may_overlap(*tensors: Tensor) -> bool:
    """Return whether two tensors may share memory, as in absorbed MLA or fused layers."""
    first, second = sorted(tensors, key=Tensor.data_ptr)
    sizes = zip(first.shape, first.stride(), strict=True)
    last = sum((size - 1) * stride for size, stride in sizes)
    end = first.data_ptr() + (last + 1) * first.itemsize
    return first.numel() > 0 and first.data_ptr() <= second.data_ptr() < end
