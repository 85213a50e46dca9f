"""Inputs that change from sample to sample, so that timed outputs can be judged.

Before every timed call, a quarter of the values in every head change sign in place, and some keys
and queries of one head are reordered. Pointers and shapes stay the same, so a kernel that reuses an
earlier result, found by pointer or by checksum, is wrong. The sets of keys and queries stay the
same, so their means and outlier channels, which quantised kernels rely on, do too.

A perturbation is a function of a seed and a number, so another process can make the same inputs and
judge a few rows of the output. These rows are drawn after the call, because a kernel can read
everything that its process computed before.
"""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import NamedTuple

import torch
from torch import Tensor

from capture.call.attention_call import AttentionCall
from capture.call.attention_variant import AttentionVariant
from capture.call.shape import Shape
from capture.call.strides import narrow_expanded

VALUE_SHARE = 4
"""One value in this many changes sign, which changes every output that attends to the values."""
REVERSED_ROWS = 16
"""Number of query rows, and minimum number of key rows, that are put in reverse order."""
REVERSED_SHARE = 4
"""One key in this many of a head is moved. With fewer moved keys, an 8-bit kernel that reuses old
keys could go unnoticed, because a few rows of such a kernel may have large errors anyway."""
JUDGED_ROWS = 8
"""Number of output rows that are kept in the changed head, and also in other heads."""

ONE_THREAD = 2**15
"""Minimum number of elements that PyTorch divides among threads. On a busy processor, threads wait
for each other for ten milliseconds before every call; one thread flips the signs in 15 µs."""
MOST_VALUES = 2**17
"""Maximum number of values that change sign on a CPU, where one thread needs 60 µs for them. A GPU
flips any number of values in less time than the call takes to read them."""

STEPPED_BLOCKS = 20
"""Number of blocks of value, and of key, that a `SteppedPerturbation` changes one at a time."""
STEPPED_SHARE = 80
"""A block holds one value in this many; all blocks together hold a quarter of the values."""

Places = tuple[Tensor, Tensor, Tensor]
"""Indices of batches, heads and queries, on the device of the output that they index."""


class OutputRows(NamedTuple):
    """Positions of rows in an output (B, Hq, Sq, Dv): each list has one entry per row."""

    batch: list[int]
    head: list[int]
    query: list[int]

    def of(self, output: Tensor) -> Tensor:
        """Return a copy of these rows: (n, Dv)."""
        return output[self.on(output.device)]

    def on(self, device: torch.device) -> Places:
        """Return the indices as tensors on a device, without waiting for a GPU."""
        indices = torch.tensor(self)
        if device.type == "cuda":
            indices = indices.pin_memory().to(device, non_blocking=True)
        batch, head, query = indices
        return batch, head, query


class InputPerturbation:
    """Perturbation of a call's inputs, determined by a seed and a number.

    Args:
        values_only: keep query and key unchanged, for kernels that choose keys by their contents.
    """

    def __init__(
        self, call: AttentionCall, seed: int, number: int, *, values_only: bool = False
    ) -> None:
        shape, draw = call.shape, random.Random(f"{seed} {number}")
        group = max(shape.q_heads // shape.kv_heads, 1)
        batch, kv_head = draw.randrange(shape.batch), draw.randrange(shape.kv_heads)
        heads = range(kv_head * group, (kv_head + 1) * group)
        # A cache mixes pages of different sequences, so the same rows change in all pages.
        keys_of, keys = None, 2
        if call.page_table is None:
            keys = max(call.key.shape[2] // REVERSED_SHARE, REVERSED_ROWS)
            keys_of, keys = batch, min(keys, _most_rows(call.key))
        self._changes = [partial(_negate, values) for values in _values(draw, call.value)]
        if not values_only:
            parts = (
                _part(draw, call.key, keys_of, kv_head, keys),
                _part(draw, call.query, batch, draw.choice(heads), REVERSED_ROWS),
            )
            self._changes += [partial(_reverse, part) for part in parts]
        self._call, self._batch, self._heads, self._group = call, batch, heads, group
        # A quarter can be chosen in few ways, so change one more row to avoid repeated inputs.
        self._changes += [partial(_negate, row) for row in _one_more(draw, call.value)]

    def rows(self, drawn: int) -> tuple[OutputRows, OutputRows]:
        """Return rows of the head with reordered keys and queries, and rows of any head.

        Args:
            drawn: random number, drawn after the call, that determines the rows.
        """
        draw, shape = random.Random(drawn), self._call.shape
        kv_head = draw.randrange(shape.kv_heads)
        others = range(kv_head * self._group, (kv_head + 1) * self._group)
        return (
            _rows_of(draw, self._call, self._batch, self._heads),
            _rows_of(draw, self._call, draw.randrange(shape.batch), others),
        )

    def apply(self) -> None:
        """Change the inputs in place; a second call undoes the change."""
        for change in self._changes:
            change()
        self._changes.reverse()  # changes may overlap in a tensor: undo the last change first


class SteppedPerturbation:
    """Perturbation in small steps, for calls that follow each other without a gap.

    A step negates one block of value rows and swaps two key rows in every head, with two launches
    on a GPU. The key stays unchanged where value is part of the key. A Gray code chooses the block,
    so that no inputs repeat within 2²⁰ steps (fewer if there are fewer rows). The inputs of any
    step can be made without the earlier steps.

    Args:
        number: the step to begin after; `apply` turns the recorded inputs into those of this step.
        values_only: see `InputPerturbation`.
    """

    def __init__(
        self, call: AttentionCall, seed: int, number: int = 0, *, values_only: bool = False
    ) -> None:
        draw = random.Random(f"{seed} walk")
        self.number = number
        values = _blocks(draw, call.value, max(call.value.shape[2] // STEPPED_SHARE, 1))
        self._pools: list[list[Callable[[], object]]] = []
        if values:  # empty if there are no keys
            self._pools.append([block.neg_ for block in values])
        shares_key = call.key.data_ptr() == call.value.data_ptr()
        if not values_only and not shares_key and call.key.shape[2] > 1:
            self._pools.append([_Exchange(block) for block in _blocks(draw, call.key, 2)])
        self._shape = call.shape

    def rows(self, drawn: int) -> tuple[OutputRows, OutputRows]:
        """Return rows of two heads; see `InputPerturbation.rows`."""
        draw = random.Random(drawn)
        return _rows_of_one_head(draw, self._shape), _rows_of_one_head(draw, self._shape)

    def step(self) -> None:
        """Change the inputs to those of the next step, in place."""
        self.number += 1
        trailing_zeros = (self.number & -self.number).bit_length() - 1
        for changes in self._pools:
            changes[min(trailing_zeros, len(changes) - 1)]()

    def apply(self) -> None:
        """Change the recorded inputs to those of this step, or back, in place."""
        for changes in self._pools:
            position = self.number % 2 ** len(changes)
            gray = position ^ (position >> 1)
            for bit, change in enumerate(changes):
                if gray >> bit & 1:
                    change()


class _Exchange:
    def __init__(self, rows: Tensor) -> None:
        self._rows = rows
        self._next, self._last = rows.flip(-2), rows.clone()

    def __call__(self) -> None:
        self._rows.copy_(self._next)
        self._next, self._last = self._last, self._next


class PerturbationSequence:
    """Sequence of perturbations of a call's tensors, with a new one for each sample."""

    def __init__(self, call: AttentionCall, seed: int) -> None:
        self._call = call
        self._seed = seed
        self._numbers = iter(range(2**62))
        self._perturbation: InputPerturbation | None = None
        self._ready: dict[bool, tuple[int, InputPerturbation]] = {}
        """Number of the next perturbation and the perturbation, keyed by `values_only`."""

    def get_ready(self, *, values_only: bool = False) -> None:
        """Undo the last perturbation and prepare the next one while a GPU is busy."""
        self.undo()
        if values_only not in self._ready:
            number = next(self._numbers)
            perturbation = InputPerturbation(
                self._call, self._seed, number, values_only=values_only
            )
            self._ready[values_only] = number, perturbation

    def next(self, *, values_only: bool = False) -> tuple[int, InputPerturbation]:
        """Replace the last perturbation with a new one; return the new number and perturbation."""
        self.get_ready(values_only=values_only)
        number, self._perturbation = self._ready.pop(values_only)
        self._perturbation.apply()
        return number, self._perturbation

    def undo(self) -> None:
        """Restore the inputs as they were before any perturbation."""
        if self._perturbation is not None:
            self._perturbation.apply()
        self._perturbation = None

    def forget(self) -> None:
        """Forget the last perturbation, because the inputs were restored by other means."""
        self._perturbation = None


def _most_rows(tensor: Tensor) -> int:
    """Return the maximum number of rows of a head that one perturbation may change."""
    if tensor.device.type != "cpu":
        return tensor.shape[2]
    return max((ONE_THREAD - 1) // tensor.shape[3], 1)


def _values(draw: random.Random, tensor: Tensor) -> list[Tensor]:
    """Return rows, the same in every head; omit expanded copies, and use small blocks on a CPU."""
    memory = narrow_expanded(tensor)
    batch, heads, length, width = memory.shape
    if not length:
        return []
    rows = max(length // VALUE_SHARE, 1)
    if tensor.device.type == "cpu":
        rows = max(min(rows, _most_rows(tensor), MOST_VALUES // (batch * heads * width)), 1)
    first = draw.randrange(length - rows + 1)
    values = memory[:, :, first : first + rows]
    if tensor.device.type != "cpu":
        return [values]
    at_once = max((ONE_THREAD - 1) // (rows * width), 1)
    if at_once >= heads:
        return list(values.split(at_once // heads))
    return [block for sequence in values for block in sequence.split(at_once)]


def _one_more(draw: random.Random, tensor: Tensor) -> list[Tensor]:
    """Return one more row of every head, or of some heads if each head has a single row."""
    memory = narrow_expanded(tensor)
    _, heads, length, _ = memory.shape
    if not length:
        return []
    place = draw.randrange(length)
    first = draw.randint(1, heads) if length == 1 else 0
    return [memory[:, first:, place : place + 1]]


def _negate(rows: Tensor) -> None:
    rows.neg_()


def _reverse(rows: Tensor) -> None:
    """Reverse the order of rows in place; negate a single row, which has no order."""
    if rows.shape[-2] == 1:
        _negate(rows)
    else:
        rows.copy_(rows.flip(-2))


def _draw_heads(draw: random.Random, call: AttentionCall, heads: range) -> list[int]:
    """Return the head of each row to judge; all rows are in one head if heads have sinks."""
    if call.sinks is not None:
        return [draw.choice(heads)] * JUDGED_ROWS
    return draw.choices(heads, k=JUDGED_ROWS)


def _rows_of(draw: random.Random, call: AttentionCall, batch: int, heads: range) -> OutputRows:
    return OutputRows(
        [batch] * JUDGED_ROWS,
        _draw_heads(draw, call, heads),
        draw.choices(range(call.shape.q_len), k=JUDGED_ROWS),
    )


def _rows_of_one_head(draw: random.Random, shape: Shape) -> OutputRows:
    batch, head = draw.randrange(shape.batch), draw.randrange(shape.q_heads)
    queries = draw.choices(range(shape.q_len), k=JUDGED_ROWS)
    return OutputRows([batch] * JUDGED_ROWS, [head] * JUDGED_ROWS, queries)


def _blocks(draw: random.Random, tensor: Tensor, rows: int) -> list[Tensor]:
    memory = narrow_expanded(tensor)
    places = range(0, memory.shape[2] - rows + 1, rows)
    chosen = draw.sample(places, min(STEPPED_BLOCKS, len(places)))
    return [memory[:, :, first : first + rows] for first in chosen]


def some_rows(call: AttentionCall, rows: OutputRows) -> AttentionCall:
    """Make a call that computes only these rows of one key head, (1, 1, n, D), with a mask."""
    call = call.without_pages()
    shape = call.shape
    group = max(shape.q_heads // shape.kv_heads, 1)
    batch, kv_head = rows.batch[0], rows.head[0] // group
    at = rows.on(call.device)
    mask = None
    if call.attn_mask is not None:
        whole = call.attn_mask[(None,) * (4 - call.attn_mask.ndim)]
        places = (
            index.clamp(max=size - 1) for index, size in zip(at, whole.shape[:3], strict=True)
        )
        mask = whole[tuple(places)].expand(-1, shape.kv_len)[None, None]
    if call.is_causal or call.features:
        first, end = (edge[at[2], None] for edge in call.key_ranges.of(batch))
        position = torch.arange(shape.kv_len, device=call.device)
        visible = ((position >= first) & (position < end))[None, None]
        if mask is None:
            mask = visible
        elif mask.dtype == torch.bool:
            mask = mask & visible
        else:
            mask = mask.masked_fill(~visible, float("-inf"))
    return replace(
        call,
        query=call.query[at][None, None],
        key=call.key[batch, kv_head][None, None],
        value=call.value[batch, kv_head][None, None],
        attn_mask=mask,
        is_causal=False,
        enable_gqa=False,
        sinks=None if call.sinks is None else call.sinks[rows.head[0] : rows.head[0] + 1],
        cu_seqlens_q=None,
        cu_seqlens_k=None,
        seqused_k=None,
        variant=AttentionVariant(softcap=call.variant.softcap),
        output=None,
    )


def side_by_side(*calls: AttentionCall) -> AttentionCall:
    """Join calls made by `some_rows` into one call, in which each has its own head."""
    joined = {
        name: torch.cat([call.tensors()[name] for call in calls], 0 if name == "sinks" else 1)
        for name in calls[0].tensors()
    }
    return calls[0].with_tensors(joined)


def _part(draw: random.Random, tensor: Tensor, batch: int | None, head: int, rows: int) -> Tensor:
    """Return some rows of one head, without copies along expanded dimensions.

    Args:
        batch: index of the batch, or None for all batches.
    """
    memory = narrow_expanded(tensor)
    rows = min(rows, memory.shape[2])
    first = draw.randrange(memory.shape[2] - rows + 1)
    of_head = memory[:, min(head, memory.shape[1] - 1), first : first + rows]
    return of_head if batch is None else of_head[min(batch, memory.shape[0] - 1)]
