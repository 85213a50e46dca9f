"""Samplers keep the right number of calls, spread evenly and deterministically."""

from __future__ import annotations

from collections import Counter
from collections.abc import Hashable, Iterable
from dataclasses import dataclass
from typing import NoReturn

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from capture.recording.sampling import (
    OfferedCall,
    Sampler,
    SpreadSampler,
    Stratum,
    make_sampler,
)


@dataclass(frozen=True)
class Offered:
    stratum: str
    module: str
    step: int
    nbytes: int = 1
    difficulty: float | None = None


def offer(sampler: Sampler, index: int, call: Offered) -> list[int] | None:
    """Return the indices of the calls to drop, or None if the new call is not kept."""
    place = sampler.place(call.stratum, call.module)
    if not sampler.wants(place, call.step):
        return None
    return sampler.offer(OfferedCall(index, place, call.step, call.nbytes, call.difficulty))


def sample(
    calls: Iterable[Offered], max_calls: int, max_bytes: int | None = None, name: str = "spread"
) -> list[int]:
    """Return the indices of the kept calls; the bookkeeping is checked at every call."""
    sampler = make_sampler(name, max_calls, max_bytes)
    sizes: dict[int, int] = {}
    for index, call in enumerate(calls):
        drop = offer(sampler, index, call)
        for dropped in drop or ():
            del sizes[dropped]  # raises a KeyError if the dropped call was not kept
        if drop is not None:
            sizes[index] = call.nbytes
        assert sampler.kept == len(sizes) <= max_calls
        assert sampler.nbytes == sum(sizes.values())
        assert max_bytes is None or sampler.nbytes <= max_bytes
    return sorted(sizes)


def grid(layers: int, steps: int, stratum: str = "a") -> list[Offered]:
    return [
        Offered(stratum, f"layer.{layer}", step) for step in range(steps) for layer in range(layers)
    ]


offered = st.builds(
    Offered,
    stratum=st.sampled_from("abc"),
    module=st.sampled_from(["x", "y", "z"]),
    step=st.integers(0, 5),
    nbytes=st.integers(1, 50),
    difficulty=st.none() | st.floats(0, 1) | st.sampled_from([0.25, 0.5]),
)
runs = st.lists(offered, max_size=60)


@given(
    calls=runs,
    max_calls=st.integers(1, 12),
    name=st.sampled_from(["spread", "hard", "first"]),
)
def test_samplers_keep_exactly_max_calls(calls: list[Offered], max_calls: int, name: str) -> None:
    assert len(sample(calls, max_calls, name=name)) == min(max_calls, len(calls))


@given(
    calls=runs,
    max_calls=st.integers(1, 12),
    max_bytes=st.integers(1, 200),
    name=st.sampled_from(["spread", "hard", "first"]),
)
def test_byte_limit_holds_at_every_moment(
    calls: list[Offered], max_calls: int, max_bytes: int, name: str
) -> None:
    kept = sample(calls, max_calls, max_bytes, name)
    # Some call is kept if any call fits.
    assert bool(kept) == any(call.nbytes <= max_bytes for call in calls)


@given(size=st.integers(1, 20), count=st.integers(0, 30), max_calls=st.integers(1, 12))
def test_calls_of_one_size_fill_the_byte_limit(size: int, count: int, max_calls: int) -> None:
    calls = [Offered("a", "x", step, size) for step in range(count)]
    kept = sample(calls, max_calls, max_bytes=100)
    assert len(kept) == min(count, max_calls, 100 // size)


@given(calls=runs, max_calls=st.integers(1, 12))
def test_hard_keeps_the_most_difficult_and_of_equal_ones_the_first(
    calls: list[Offered], max_calls: int
) -> None:
    def rank(index: int) -> tuple[bool, float, int]:
        known = calls[index].difficulty
        return known is None, 0.0 if known is None else -known, index

    hardest = sorted(range(len(calls)), key=rank)[:max_calls]
    assert sample(calls, max_calls, name="hard") == sorted(hardest)


def test_harder_call_that_does_not_fit_drops_nothing() -> None:
    calls = [
        Offered("a", "x", step, nbytes, difficulty)
        for step, (nbytes, difficulty) in enumerate([(40, 0.3), (40, 0.1), (90, 0.2), (60, 0.4)])
    ]
    assert sample(calls[:3], 3, max_bytes=100, name="hard") == [0, 1]
    # The last call needs only the space of the least difficult call.
    assert sample(calls, 3, max_bytes=100, name="hard") == [0, 3]


def test_first_passes_over_what_does_not_fit() -> None:
    calls = [Offered("a", "x", 0, size) for size in (6, 5, 4, 1)]
    assert sample(calls, 3, max_bytes=10, name="first") == [0, 2]


@settings(max_examples=200)
@given(calls=st.lists(offered, min_size=1, max_size=60), max_calls=st.integers(1, 12))
@example(calls=[Offered("a", "x", 0)] * 20 + [Offered("b", "x", 0)] * 20, max_calls=7)
@example(  # an encoder, a prefill, and decoding
    calls=[*grid(2, 1, "a"), *grid(8, 1, "b"), *grid(8, 40, "c")], max_calls=10
)
def test_strata_share_evenly(calls: list[Offered], max_calls: int) -> None:
    there = Counter(call.stratum for call in calls)
    kept = Counter(calls[index].stratum for index in sample(calls, max_calls))
    most = max(kept.values())
    for stratum, available in there.items():
        # A stratum may keep two calls fewer than another only if all its calls are kept.
        assert kept[stratum] >= most - 1 or kept[stratum] == available


@pytest.mark.parametrize(("layers", "steps"), [(30, 50), (57, 28), (4, 8), (2, 2), (42, 50)])
@pytest.mark.parametrize("max_calls", [1, 4, 10, 25])
def test_layers_and_steps_of_a_regular_run_are_covered_evenly(
    layers: int, steps: int, max_calls: int
) -> None:
    calls = grid(layers, steps)
    kept = [calls[index] for index in sample(calls, max_calls)]
    assert len(kept) == min(max_calls, layers * steps)
    per_layer = Counter(call.module for call in kept)
    per_step = Counter(call.step for call in kept)
    # An even choice would differ by 1; deciding call by call adds at most 1.
    for counts, places in ((per_layer, layers), (per_step, steps)):
        fair = len(kept) / places
        assert max(counts.values()) <= fair + 2
        if places <= len(kept):
            assert len(counts) == places


@pytest.mark.parametrize("max_calls", [8, 10, 20])
def test_calls_kept_reach_into_every_third_of_the_run(max_calls: int) -> None:
    layers, steps = 30, 50
    calls = grid(layers, steps)
    kept = [calls[index] for index in sample(calls, max_calls)]
    layer_thirds = Counter(int(call.module.split(".")[1]) * 3 // layers for call in kept)
    step_thirds = Counter(call.step * 3 // steps for call in kept)
    for thirds in (layer_thirds, step_thirds):
        assert min(thirds[third] for third in range(3)) >= max_calls // 3 - 2
        assert min(thirds[third] for third in range(3)) >= 1


def test_few_calls_are_kept_for_a_while_to_keep_ten_of_1500() -> None:
    sampler = SpreadSampler(10)
    kept = sum(offer(sampler, index, call) is not None for index, call in enumerate(grid(30, 50)))
    assert kept < 150


def test_refusals_for_bytes_are_counted_separately() -> None:
    small = SpreadSampler(2)
    for index in range(5):
        offer(small, index, Offered("a", "x", index))
    assert small.refused_for_bytes == 0
    for tight in (SpreadSampler(5, max_bytes=3), Sampler(5, max_bytes=3)):
        assert offer(tight, 0, Offered("a", "x", 0, 4)) is None
        assert tight.refused_for_bytes == 1


def test_call_that_never_fits_drops_no_kept_call() -> None:
    calls = [Offered("a", "x", step, 3) for step in range(3)] + [Offered("b", "x", 3, 11)]
    assert sample(calls, 5, max_bytes=10) == [0, 1, 2]


@pytest.mark.parametrize(
    ("name", "max_calls", "max_bytes", "message"),
    [
        ("random", 1, None, "spread, hard, first or every:N .*, not 'random'"),
        ("every:", 1, None, "not 'every:'"),
        ("every:0", 1, None, "not 'every:0'"),
        ("every:-2", 1, None, "not 'every:-2'"),
        ("first:2", 1, None, "not 'first:2'"),
        ("spread", 0, None, "max must be an integer of at least 1, not 0"),
        ("first", 1, 0, "max_bytes must be an integer of at least 1, not 0"),
    ],
)
def test_limits_are_checked(name: str, max_calls: int, max_bytes: int | None, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        make_sampler(name, max_calls, max_bytes)


# Runs with many shapes.


def unet(steps: int) -> list[Offered]:
    """Return calls of 32 modules with 16 shapes per step, as in Stable Video Diffusion's UNet."""
    shapes = [f"{level}.{kind}" for level in range(4) for kind in ("ss", "sc", "ts", "tc")]
    return [
        Offered(shape, f"{block}.{shape}", step)
        for step in range(steps)
        for shape in shapes
        for block in (0, 1)
    ]


@pytest.mark.parametrize("max_calls", [4, 10, 16, 20, 40])
@pytest.mark.parametrize("steps", [2, 4, 8, 10, 25, 50])
def test_many_shapes_are_spread_over_the_steps(steps: int, max_calls: int) -> None:
    calls = unet(steps)
    kept = [calls[index] for index in sample(calls, max_calls)]
    fair = max_calls / steps
    per_step = Counter(call.step for call in kept)
    assert max(per_step.values()) <= fair + 2
    if fair >= 1:
        assert len(per_step) == steps
    assert max(Counter(call.stratum for call in kept).values()) <= -(-max_calls // 16)
    assert max(Counter(call.module for call in kept).values()) <= -(-max_calls // 32)
    thirds = Counter(call.step * 3 // steps for call in kept)
    if steps >= max(max_calls, 8):
        assert min(thirds[third] for third in range(3)) >= max_calls // 3 - 1


def test_shapes_without_kept_calls_cost_nothing() -> None:
    """A run may have thousands of strata, but only `max` strata can have kept calls."""
    sampler = SpreadSampler(2)
    for index in range(5):
        offer(sampler, index, Offered(f"shape.{index}", "layer", index))
    sampler.strata = Unvisited(sampler.strata)
    for index in range(5, 20):
        offer(sampler, index, Offered(f"shape.{index}", "layer", index))
    assert sampler.kept == 2


class Unvisited(dict[Hashable, Stratum]):
    def values(self) -> NoReturn:
        raise AssertionError("all were visited")


@given(
    strata=st.integers(1, 12),
    modules=st.integers(1, 4),
    steps=st.integers(1, 12),
    max_calls=st.integers(1, 30),
)
def test_regular_run_is_covered_evenly(
    strata: int, modules: int, steps: int, max_calls: int
) -> None:
    calls = [
        Offered(f"{stratum}", f"{stratum}.{module}", step)
        for step in range(steps)
        for stratum in range(strata)
        for module in range(modules)
    ]
    kept = [calls[index] for index in sample(calls, max_calls)]
    for counts, places in (
        (Counter(call.step for call in kept), steps),
        (Counter(call.module for call in kept), strata * modules),
    ):
        assert max(counts.values()) <= len(kept) / places + 2
    assert max(Counter(call.stratum for call in kept).values()) <= -(-len(kept) // strata)


# Other samplers.


@given(count=st.integers(0, 40), every=st.integers(1, 7), max_calls=st.integers(1, 12))
def test_every_nth_call(count: int, every: int, max_calls: int) -> None:
    kept = sample(grid(1, count), max_calls, name=f"every:{every}")
    assert kept == list(range(0, count, every))[:max_calls]
