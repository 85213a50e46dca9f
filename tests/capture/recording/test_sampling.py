"""Samplers keep the right number of calls, spread evenly and deterministically."""

import itertools
import math
import random
from collections import Counter
from collections.abc import Hashable, Iterable
from dataclasses import dataclass, replace
from typing import NoReturn

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from capture.call.batch import BatchSize
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
    is_nonfinite: bool = False


def offer(sampler: Sampler, index: int, call: Offered) -> list[int] | None:
    """Return the indices of the calls to drop, or None if the new call is not kept."""
    place = sampler.place((call.stratum,), call.module)
    is_sought = call.is_nonfinite and not sampler.has_nonfinite
    if not sampler.wants(place, call.step) and not is_sought:
        return None
    properties = call.nbytes, call.difficulty, call.is_nonfinite
    return sampler.offer(OfferedCall(index, place, call.step, *properties))


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
runs_with_nan = st.lists(st.builds(replace, offered, is_nonfinite=st.booleans()), max_size=60)


@given(
    calls=runs_with_nan,
    max_calls=st.integers(1, 12),
    name=st.sampled_from(["spread", "hard", "first"]),
)
def test_samplers_keep_exactly_max_calls(calls: list[Offered], max_calls: int, name: str) -> None:
    kept = sample(calls, max_calls, name=name)
    assert len(kept) == min(max_calls, len(calls))
    if name != "hard":  # may prefer a later, more difficult call with NaN
        assert {*kept} >= {*[at for at, call in enumerate(calls) if call.is_nonfinite][:1]}


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


@given(calls=runs_with_nan, max_calls=st.integers(1, 12))
def test_hard_keeps_the_most_difficult_and_of_equal_ones_the_first(
    calls: list[Offered], max_calls: int
) -> None:
    def rank(index: int) -> tuple[bool, bool, float, int]:
        known = calls[index].difficulty
        is_finite = not calls[index].is_nonfinite
        return is_finite, known is None, 0.0 if known is None else -known, index

    hardest = sorted(range(len(calls)), key=rank)[:max_calls]
    assert sample(calls, max_calls, name="hard") == sorted(hardest)


def test_call_that_does_not_fit_drops_nothing() -> None:
    calls = [
        Offered("a", "x", step, nbytes, difficulty)
        for step, (nbytes, difficulty) in enumerate([(40, 0.3), (40, 0.1), (90, 0.2), (60, 0.4)])
    ]
    assert sample(calls[:3], 3, max_bytes=100, name="hard") == [0, 1]
    # The last call needs only the space of the least difficult call.
    assert sample(calls, 3, max_bytes=100, name="hard") == [0, 3]
    never_fits = [*(Offered("a", "x", step, 3) for step in range(3)), Offered("b", "x", 3, 11)]
    assert sample(never_fits, 5, max_bytes=10) == [0, 1, 2]


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


def largest_gap(kept: Iterable[int], end: int) -> float:
    """Return the largest gap between kept positions, ends included, in even gaps."""
    places = sorted({-1, end, *kept})
    even = (end + 1) / (len(places) - 1)
    return max(after - before for before, after in itertools.pairwise(places)) / even


@settings(max_examples=20, deadline=None)
@given(layers=st.integers(1, 60), steps=st.integers(1, 200), max_calls=st.integers(1, 50))
@example(layers=1, steps=1000, max_calls=10)
@example(layers=12, steps=20, max_calls=4)
@example(layers=48, steps=86, max_calls=47)
@example(layers=57, steps=39, max_calls=3)
def test_gaps_of_layers_and_steps_are_at_most_twice_even(
    layers: int, steps: int, max_calls: int
) -> None:
    sampler, offers = SpreadSampler(max_calls), 0
    for index, call in enumerate(grid(layers, steps)):
        offers += offer(sampler, index, call) is not None
        if (index + 1) % layers == 0:
            kept = sampler.calls.values()
            for counts, end in (
                (Counter(each.step for each in kept), call.step + 1),
                (Counter(each.place.layer for each in kept), layers),
            ):
                assert len(counts) == min(max_calls, end)
                assert largest_gap(counts, end) <= 2
                assert max(counts.values()) <= 1.5 * len(kept) / end + 2
    assert sampler.kept == min(max_calls, layers * steps)
    assert offers <= 2 * max_calls * (1 + math.log(max(layers * steps / max_calls, 1)))


@given(layers=st.integers(8, 40), max_calls=st.integers(8, 40))
def test_calls_of_one_step_are_spread_over_its_layers(layers: int, max_calls: int) -> None:
    """Early steps must not keep only the last layers, nor late steps only the first."""
    calls = grid(layers, 2)
    kept = [calls[index] for index in sample(calls, min(max_calls, layers))]
    for step in (0, 1):
        inside = [int(call.module.split(".")[1]) for call in kept if call.step == step]
        assert min(inside) < layers / 2 <= max(inside)


def test_refusals_for_bytes_are_counted_separately() -> None:
    small = SpreadSampler(2)
    for index in range(5):
        offer(small, index, Offered("a", "x", index))
    assert small.refused_for_bytes == 0
    for tight in (SpreadSampler(5, max_bytes=3), Sampler(5, max_bytes=3)):
        assert offer(tight, 0, Offered("a", "x", 0, 4)) is None
        assert tight.refused_for_bytes == 1


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


@settings(max_examples=40, deadline=None)
@given(
    strata=st.integers(1, 16),
    modules=st.integers(1, 4),
    steps=st.integers(1, 50),
    max_calls=st.integers(1, 40),
)
@example(strata=16, modules=2, steps=50, max_calls=40)  # like Stable Video Diffusion's UNet
def test_run_with_many_shapes_is_covered_evenly(
    strata: int, modules: int, steps: int, max_calls: int
) -> None:
    calls = [
        Offered(f"{stratum}", f"{stratum}.{module}", step)
        for step in range(steps)
        for stratum in range(strata)
        for module in range(modules)
    ]
    kept = [calls[index] for index in sample(calls, max_calls)]
    per_step = Counter(call.step for call in kept)
    assert max(per_step.values()) <= len(kept) / steps + 2
    assert largest_gap(per_step, steps) <= 2
    assert len(per_step) == min(steps, len(kept))
    per_module = Counter(call.module for call in kept)
    assert max(per_module.values()) <= len(kept) / (strata * modules) + 2
    assert max(Counter(call.stratum for call in kept).values()) <= -(-len(kept) // strata)


@pytest.mark.parametrize("order", ["rising", "falling", "shuffled"])
def test_batches_are_spread_over_their_figures_and_layers(order: str) -> None:
    lengths = [int(1.01**power) for power in range(300, 1300)]
    if order != "rising":
        lengths = random.Random(0).sample(lengths, 1000) if order == "shuffled" else lengths[::-1]
    sampler, offers = SpreadSampler(20), 0
    for step, keys in enumerate(lengths):
        size = BatchSize(1, 1, keys, keys, keys)
        for module in "abcd":
            place = sampler.place(("decode",), module)
            if sampler.wants(place, step, size):
                offers += 1
                call = OfferedCall(4 * step + place.layer, place, step, 1, size=size)
                assert sampler.offer(call) is not None
    kept = [call.size for call in sampler.calls.values() if call.size]
    assert len({*kept}) == 20
    farthest = max(min(abs(math.log(keys / each.keys)) for each in kept) for keys in lengths)
    assert farthest < 2 * math.log(max(lengths) / min(lengths)) / (2 * 20)
    assert len({call.place.module for call in sampler.calls.values()}) == 4
    assert offers < 200


# Other samplers.


@given(
    layers=st.integers(1, 20), steps=st.integers(1, 40), max_bytes=st.none() | st.integers(1, 30)
)
def test_per_layer_keeps_one_call_of_each_layer_and_phase(
    layers: int, steps: int, max_bytes: int | None
) -> None:
    calls = [*grid(layers, 1, "prefill"), *grid(layers, steps, "decode")]
    middle = layers * (2 + steps // 2) - 1
    calls[middle] = replace(calls[middle], is_nonfinite=True)
    sampler = make_sampler("spread", "per-layer", max_bytes)
    offers = sum(offer(sampler, index, call) is not None for index, call in enumerate(calls))
    kept = [calls[index] for index in sampler.calls]
    assert middle in sampler.calls
    assert len({(call.stratum, call.module) for call in kept}) == len(kept) == sampler.nbytes
    assert len(kept) == min(2 * layers, max_bytes or 2 * layers)
    assert offers <= layers * (4 + 2 * math.log(steps)) + 10
    if len(kept) == 2 * layers >= 40 <= steps:
        assert len({call.step for call in kept}) > layers / 2


@given(steps=st.frozensets(st.integers(0, 9), min_size=1))
def test_per_layer_keeps_one_call_of_each_layer_at_named_denoising_steps(
    steps: frozenset[int],
) -> None:
    calls = [*grid(2, 3, "encode"), *grid(3, 8, "denoise"), *grid(3, 8, "denoise")]
    sampler = make_sampler("spread", "per-layer", None, steps)
    for index, call in enumerate(calls):
        offer(sampler, index, call)
    kept = Counter((call.stratum, call.step) for call in map(calls.__getitem__, sampler.calls))
    assert {step: kept.pop(("denoise", step), 0) for step in steps} == {
        step: 3 * (step < 8) for step in steps
    }
    assert {stratum for stratum, _ in kept} == {"encode"}
    assert kept.total() == 2


@given(count=st.integers(0, 40), every=st.integers(1, 7), max_calls=st.integers(1, 12))
def test_every_nth_call(count: int, every: int, max_calls: int) -> None:
    kept = sample(grid(1, count), max_calls, name=f"every:{every}")
    assert kept == list(range(0, count, every))[:max_calls]
