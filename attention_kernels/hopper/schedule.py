"""Sizes of a program's work in `hopper_prefill_kernel.py`, and the buffers that fit."""

from __future__ import annotations

import math
from typing import NamedTuple

from attention_kernels.hopper.head_groups import HeadGroup, VisibleKeys, blocks_seen, busiest_of
from attention_kernels.hopper.persistent import SHORT
from attention_kernels.hopper.scores import ROWS
from attention_kernels.hopper.stream_k import TileTimes, last_turn
from attention_kernels.tiles.head_dim_pieces import pieces

LARGEST_HEAD_DIM = 256
SHARED_BYTES = 227 * 1024
"""Maximum shared memory of a program, in bytes."""
BARRIER_BYTES = 512
WIDE_FLOP = 6e6
"""Multiplications and additions per µs in a tile with a head_dim above 64 (H100)."""
WIDE_TILE = 2.8
"""Time of the start and end of a tile with a head_dim above 64, in µs."""
OUTPUT_COLUMNS = 64
"""Number of columns in a part of the output, if the whole output does not fit: 128 bytes of a row,
a unit of TMA."""


class Schedule(NamedTuple):
    """Sizes of a program's work, chosen by measurements (docs/kernel-notes.md)."""

    consumers: int
    """Number of warp groups that compute, 2 to 4."""
    heads: int
    """Number of query heads of one group in a tile; a divisor of `consumers`."""
    keys: int
    """Number of keys in a block."""
    stages: int
    """Number of blocks of keys, and of values, that fit in shared memory."""
    registers: int
    """Registers per thread of a consumer."""
    tile_times: TileTimes


class Costs(NamedTuple):
    """Times of a schedule on an H100 in µs, in addition to its `tile_times`."""

    call: float
    """Fixed time of a call, in µs."""
    masked: float
    """Additional time of a block that needs a mask, in µs."""


FOUR = Schedule(4, 4, 64, 6, 112, TileTimes(0.83, 2.1))
THREE = Schedule(3, 1, 128, 3, 160, TileTimes(1.24, 0.8))
TWO = Schedule(2, 2, 128, 3, 240, TileTimes(1.05, 1.9))
NARROW = ((FOUR, Costs(9.5, 1.05)), (THREE, Costs(7.9, 1.92)), (TWO, Costs(6.2, 0.15)))
"""Schedules and costs for head dimensions up to 64, with the maximum number of heads per tile. With
many consumers, some compute while others start or end; with few, the GPU idles less in the last
turn. The numbers are fitted to 25 calls (`benchmarks.attention_kernels.narrow_heads`), with errors
of 6 % (root mean square) and at most 16 %."""
MIDDLE_HEAD_DIM = 80
"""Largest head_dim for which the output leaves registers for `MIDDLE`."""
MIDDLE = Schedule(3, 1, 64, 6, 160, TileTimes(0.75, 2.0))
"""Schedule for head dimensions from 65 to `MIDDLE_HEAD_DIM`, if the host knows all lengths and
there is neither a mask nor a diagonal."""
MASK = 0.6
"""Additional time of a block for which a mask is read, in µs."""


class WholeCall(NamedTuple):
    """A call for which the host knows all lengths."""

    visible: VisibleKeys
    """Keys that queries see; the tile sizes in this field are ignored."""
    heads: int
    """Number of query heads in the batch."""
    programs: int


class Dims(NamedTuple):
    """Head dimensions of the computation, each in one or two pieces. Columns beyond the tensors'
    own are read as zeros."""

    main: int
    rest: int
    """Size of the second piece of query and key, or 0."""
    value: int
    value_rest: int
    """Size of the second piece of value and output, or 0."""

    @property
    def of_query(self) -> int:
        return self.main + self.rest

    @property
    def of_value(self) -> int:
        return self.value + self.value_rest

    @property
    def largest(self) -> int:
        return max(self.of_query, self.of_value)

    @property
    def are_narrow(self) -> bool:
        return self.largest <= 64


def dims_of(head_dim: int, v_head_dim: int) -> Dims:
    return Dims(*_pieces(head_dim), *_pieces(v_head_dim))


def _pieces(head_dim: int) -> tuple[int, int]:
    return (64, 0) if head_dim <= 64 else pieces(head_dim, are_copied=True)


class SharedRoom(NamedTuple):
    """Buffers that fit in shared memory."""

    output_columns: int
    """Number of columns of the output's first piece that fit for each consumer: all columns, or
    those of a part."""
    mask_stages: int
    """Number of blocks of the mask that fit for each consumer; 0 if none fits."""


def room_for(dims: Dims, plan: Schedule, mask_size: int = 0) -> SharedRoom:
    """Return the buffers of the output and the mask that fit in shared memory.

    Args:
        mask_size: size of an element of the mask, in bytes.
    """
    rows, keys = plan.consumers * ROWS.value, plan.stages * plan.keys
    left = SHARED_BYTES - BARRIER_BYTES - 2 * (rows + keys) * dims.of_query
    left -= 2 * keys * dims.of_value + 2 * rows * dims.value_rest
    for columns in (dims.value, OUTPUT_COLUMNS):
        free = left - 2 * rows * columns
        stages = min(2, free // (rows * plan.keys * mask_size)) if mask_size and free > 0 else 0
        if free >= 0 and (stages or not mask_size):
            return SharedRoom(columns, stages)
    return SharedRoom(OUTPUT_COLUMNS, 0)


def schedule(
    dims: Dims, group: int, seen: int, mask_size: int = 0, call: WholeCall | None = None
) -> Schedule:
    """Return the schedule for `group` query heads per key head, and queries that see up to `seen`
    keys.

    The elements of a mask have `mask_size` bytes. With a `call`, the schedule for head dimensions
    up to 64 is the one with the shortest predicted time.
    """
    plan = _without_mask(dims, group, seen)
    if dims.are_narrow and call is not None:
        times = times_of(group, call, has_mask=mask_size > 0)
        plan = min(times, key=times.__getitem__)
    elif dims.largest <= MIDDLE_HEAD_DIM and call is not None and not mask_size:
        # A causal call of 32 heads and 2,048 keys took 9 % longer: its tiles are harder to balance.
        plan = MIDDLE if call.visible.right is None else plan
    return _with_room(plan, dims, mask_size)


def times_of(group: int, call: WholeCall, *, has_mask: bool = False) -> dict[Schedule, float]:
    """Return the predicted time of a call with each schedule of `NARROW` on an H100, in µs."""
    times = {}
    for plan, costs in NARROW:
        if plan is THREE and has_mask:
            continue  # there would be room for only half as many keys
        here = plan._replace(heads=math.gcd(group, plan.heads))
        times[here] = _time_of(here, costs, call, has_mask)
    return times


def _time_of(plan: Schedule, costs: Costs, call: WholeCall, has_mask: bool) -> float:
    queries = ROWS.value * plan.consumers // plan.heads
    visible = call.visible._replace(queries=queries, keys=plan.keys)
    blocks, bundles = blocks_seen(visible), call.heads // plan.heads
    block, tile = plan.tile_times
    if has_mask:
        block += MASK
    most_masked = 1 if visible.right is None else -(-queries // plan.keys)
    turns = len(blocks) * bundles // call.programs
    if visible.right is None or turns == 0:
        tile_times = TileTimes(block, tile + most_masked * costs.masked)
        time, _ = last_turn(visible, bundles, call.programs, tile_times)
        time += turns * (int(blocks.max()) * block + tile_times.tile)
    else:
        times = blocks * block + blocks.clamp(max=most_masked) * costs.masked + tile
        head_group = HeadGroup(bundles, bundles * len(times))
        time = busiest_of(times, bundles, head_group, call.programs)
    return costs.call + time


def schedule_of_visited_blocks(dims: Dims, mask_size: int) -> Schedule:
    """Return the schedule for visited blocks, with one head in a tile: of 128 queries if a mask is
    read, else as in long calls."""
    if not mask_size:
        return _without_mask(dims, 1, SHORT + 1)
    plan = TWO._replace(heads=1) if dims.are_narrow else _without_mask(dims, 1, SHORT)
    return _with_room(plan, dims, mask_size)


def _with_room(plan: Schedule, dims: Dims, mask_size: int) -> Schedule:
    while mask_size and not room_for(dims, plan, mask_size).mask_stages:
        plan = plan._replace(keys=plan.keys // 2)
    return plan


def _without_mask(dims: Dims, group: int, seen: int) -> Schedule:
    if dims.are_narrow:
        plan = FOUR if seen <= SHORT else THREE
        return plan._replace(heads=math.gcd(group, plan.heads))
    keys = 64 if dims.main > 128 or dims.of_value > 128 else 128
    flop = 2 * 2 * ROWS.value * keys * (dims.of_query + dims.of_value)
    return Schedule(2, 1, keys, 2, 240, TileTimes(flop / WIDE_FLOP, WIDE_TILE))
