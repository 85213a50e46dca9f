"""Arithmetic of predictions, with hand-made censuses and rows that have round numbers."""

import json
import random
from collections.abc import Callable, Sequence
from dataclasses import asdict, replace
from typing import Any

import pytest

from replay.end_to_end.predicted_times import RUN, Calls, Clocked, Estimate, Missing, PredictedTime
from replay.end_to_end.prediction import KernelAt, Prediction, everywhere, predict
from replay.plan.call_matching import CensusError
from replay.rows.row import CallFacts, GpuState, KernelId, Row, Status
from replay.timing.statistics import summarize
from tests.factories import call_facts as facts
from tests.factories import census, row, speedup, speedup_over

THERE = KernelId("new", "other")
NEW, OLD = KernelId("new"), KernelId("old")
NEW_EVERYWHERE = everywhere(NEW)
STEADY = (1.0,) * 5


def predicted(
    counted: dict[str, Any],
    rows: list[Row],
    seconds: Sequence[float] = STEADY,
    kernel_at: KernelAt = NEW_EVERYWHERE,
    **options: Any,
) -> Prediction:
    options.setdefault("phases", {})
    return predict(counted, rows, kernel_at, OLD.name, Clocked(tuple(seconds)), **options)


def new_seconds(span: PredictedTime) -> Estimate:
    """Return the predicted time, which must not be None."""
    assert span.new_seconds is not None
    return span.new_seconds


def test_counted_call_saves_as_much_as_its_replayed_call() -> None:
    a, b = facts("a", "layers.0"), facts("b", "layers.1")
    rows = [row("old", a, 10.0), row("new", a, 4.0), row("old", b, 20.0), row("new", b, 25.0)]
    counted = census(("layers.0", "denoise", 64, 30), ("layers.1", "denoise", 64, 8))
    run = predicted(counted, rows).run
    # The prediction is 1 s − 30 · 6 ms + 8 · 5 ms.
    assert new_seconds(run).value == pytest.approx(0.86)
    assert (new_seconds(run).low, new_seconds(run).high) == pytest.approx((0.86, 0.86))
    assert run.speedup.value == pytest.approx(1 / 0.86)
    assert run.attention_seconds == pytest.approx(0.46)
    assert run.attention_share == pytest.approx(0.46)
    assert run.calls == Calls(swapped=38)


def test_phases_are_predicted_per_forward_and_the_run_as_a_whole() -> None:
    prefill, decode = facts("p", "layers.0", "prefill"), facts("d", "layers.0", "decode")
    rows = [row("old", prefill, 9.0), row("new", prefill, 4.0)]
    rows += [row("old", decode, 2.0), row("new", decode, 1.0)]
    counted = census(("layers.0", "prefill", 64, 4), ("layers.0", "decode", 64, 40))
    prediction = predicted(
        counted,
        rows,
        phases={
            "prefill": Clocked((0.1, 0.1, 0.1)),
            "decode": Clocked((0.02, 0.02, 0.02), 10),
        },
    )
    first, each = prediction.phases["prefill"], prediction.phases["decode"]
    assert new_seconds(first).value == pytest.approx(0.1 - 4 * 0.005)
    assert new_seconds(each).value == pytest.approx(0.02 - 4 * 0.001)
    assert new_seconds(prediction.run).value == pytest.approx(1 - 0.02 - 0.04)
    assert each.attention_share == pytest.approx(0.008 / 0.02)
    assert (first.calls.swapped, each.calls.swapped) == (4, 40)
    assert json.loads(json.dumps(asdict(prediction)))["run"]["phase"] == RUN


def test_unsupported_call_falls_back_at_unchanged_cost() -> None:
    a, b = facts("a", "layers.0"), facts("b", "layers.1")
    rows = [row("old", a, 10.0), row("new", a, 5.0), row("old", b, 10.0)]
    rows.append(row("new", b, None, "unsupported", "head_dim 72"))
    counted = census(("layers.0", "denoise", 64, 20), ("layers.1", "denoise", 64, 7))
    run = predicted(counted, rows).run
    assert new_seconds(run).value == pytest.approx(0.9)
    assert run.calls == Calls(swapped=20, fell_back=7)
    assert run.fallbacks == {"head_dim 72": 7}
    assert run.attention_seconds == pytest.approx(0.27)
    assert run.swapped_seconds == pytest.approx(0.2)
    assert run.fallback_seconds == pytest.approx({"head_dim 72": 0.07})
    # These calls do not pay for a slower kernel that stands for the model's own attention.
    phases = {"denoise": Clocked(STEADY, stand_in_seconds=0.27)}
    denoise = predicted(counted, rows, phases=phases).phases["denoise"]
    assert new_seconds(denoise).value == pytest.approx(0.9 - 0.07)


def test_calls_without_a_replayed_call_are_reported_and_unchanged() -> None:
    call = facts("a", "layers.0")
    rows = [row("old", call, 10.0), row("new", call, 5.0)]
    counted = census(
        ("layers.0", "denoise", 64, 20),
        ("layers.0", "encode", 64, 3),  # another phase
        ("layers.1", "denoise", 99, 2),  # a very different length
        ("layers.1", "denoise", 999, 4),
    )
    run = predicted(counted, rows).run
    assert new_seconds(run).value == pytest.approx(0.9)
    assert run.calls == Calls(swapped=20, not_recorded=9)
    assert run.not_recorded == [Missing("layers.0", "encode", 3), Missing("layers.1", "denoise", 6)]


@pytest.mark.parametrize("status", ["inaccurate", "crash", "error", "unavailable", "not-timed"])
def test_failed_kernel_has_no_prediction(status: Status) -> None:
    good, bad = facts("good", "layers.0", "prefill"), facts("bad", "layers.0", "decode")
    rows = [row("old", good, 10.0), row("new", good, 5.0), row("old", bad, 10.0)]
    rows.append(row("new", bad, 5.0 if status == "inaccurate" else None, status, "it is so"))
    counted = census(("layers.0", "prefill", 64, 2), ("layers.0", "decode", 64, 2))
    clocked = Clocked((0.1, 0.1))
    prediction = predicted(counted, rows, phases={"prefill": clocked, "decode": clocked})
    for span in (prediction.run, prediction.phases["decode"]):
        assert span.new_seconds is None
        assert span.reason == f"{status} on bad: it is so"
        assert span.attention_seconds > 0
    assert prediction.phases["prefill"].new_seconds is not None


def test_a_kernel_without_a_confirmed_row_has_no_prediction() -> None:
    call, counted = facts("a", "layers.0"), census(("layers.0", "denoise", 64, 2))
    rows = [row("old", call, 10.0), row("new", call, 5.0, flags=("unconfirmed: …",))]
    assert predicted(counted, rows[:1]).run.reason == "new was not replayed on a"
    assert predicted(counted, rows).run.reason == "its time on a is unconfirmed"


def test_plan_keeps_the_baseline_where_it_says_so() -> None:
    """The kernel is wrong at a layer, and too inexact in early steps of the others."""
    a, b = facts("a", "layers.0"), facts("b", "layers.1")
    rows = [row("old", a, 10.0), row("new", a, 5.0), row("old", b, 10.0)]
    rows.append(row("new", b, 1.0, "inaccurate"))
    counted = census(*((f"layers.{layer}", "denoise", 64, 6) for layer in range(3)))
    for each in counted["rows"]:
        each |= {"first_step": 0, "last_step": 2}

    def kernel_at(module: str, phase: str, kv_len: int, step: int) -> KernelId:
        return OLD if module == "layers.1" or step < 1 else NEW

    run = predicted(counted, rows, kernel_at=kernel_at).run
    # layers.2 was not recorded, so its saving is the mean of the others.
    assert new_seconds(run).value == pytest.approx(1 - 4 * 0.005 - 4 * 0.007)
    assert run.calls == Calls(swapped=8, own=10)


@pytest.mark.parametrize(
    ("entry_point", "kernel", "expected"),
    [
        ("sdpa", NEW, 0.85),
        ("sdpa", OLD, 1.0),  # plain SDPA runs the pinned backend
        ("sdpa", KernelId("math"), 1.0),
        ("transformers", OLD, 0.9),
    ],
)
def test_model_that_chose_its_kernel_gains_over_that_kernel(
    entry_point: str, kernel: KernelId, expected: float
) -> None:
    call = facts("a", "layers.0", pinned="math", entry_point=entry_point)
    rows = [row("old", call, 10.0), row("new", call, 5.0), row("math", call, 20.0)]
    counted = census(("layers.0", "denoise", 64, 10))
    run = predicted(counted, rows, kernel_at=everywhere(kernel)).run
    assert new_seconds(run).value == pytest.approx(expected)
    assert run.attention_share == pytest.approx(0.2)
    with pytest.raises(ValueError, match=r"own attention was not timed here: math \(cannot run"):
        predicted(counted, rows[:2])


def noisy(around: float, drift: Sequence[float], seed: int) -> list[float]:
    generator = random.Random(seed)
    return [around * each * generator.uniform(0.999, 1.001) for each in drift]


def test_shared_rounds_cancel_shared_drift() -> None:
    """Clock drift changes both times, but hardly changes the saving."""
    call = facts("a", "layers.0")
    drift = [random.Random(7 + round).uniform(0.8, 1.2) for round in range(30)]
    old, new = noisy(10.0, drift, 1), noisy(9.0, drift, 2)
    counted = census(("layers.0", "denoise", 64, 50))
    rows = [row("old", call, old), row("new", call, new)]
    ratio = summarize([before / after for before, after in zip(old, new, strict=True)]).p50
    rows[1] = replace(rows[1], speedup=speedup_over("old", speedup(ratio)))
    paired = predicted(counted, rows).run.new_seconds
    rows[1] = replace(rows[1], speedup=speedup_over("old", speedup(1.5)), process="new")
    apart = predicted(counted, rows).run.new_seconds
    assert paired.low < paired.value < paired.high
    assert (apart.high - apart.low) > 3 * (paired.high - paired.low)


def test_the_interval_covers_the_rounds_of_both_sources_and_repeats() -> None:
    call = facts("a", "layers.0")
    counted = census(("layers.0", "denoise", 64, 50))
    scatter = noisy(10.0, [random.Random(each).uniform(0.9, 1.1) for each in range(30)], 1)
    seconds = noisy(1.0, [random.Random(each).uniform(0.9, 1.1) for each in range(30)], 2)
    steady = [row("old", call, 10.0), row("new", call, 5.0)]
    uneven = [row("old", call, scatter), row("new", call, 5.0)]

    def width(rows: list[Row], clock: Sequence[float], **options: Any) -> float:
        found = predicted(counted, rows, clock, **options).run.new_seconds
        return found.high - found.low

    assert width(steady, STEADY) == 0
    assert width(uneven, STEADY) > 0
    assert width(steady, seconds) > 0
    assert width(uneven, seconds) > max(width(uneven, STEADY), width(steady, seconds)) / 2
    assert width(uneven, seconds) == width(uneven, seconds)
    assert width(uneven, seconds) != width(uneven, seconds, seed=1)


def test_intervals_contain_the_truth_as_often_as_stated() -> None:
    """In 40 experiments, 38 intervals (95 %) should contain the truth; below 33 is a fault."""
    counted = census(("layers.0", "denoise", 64, 50))
    call = facts("a", "layers.0")
    hits = 0
    for seed in range(40):
        generator = random.Random(seed)
        old = [generator.gauss(10.0, 0.3) for _ in range(20)]
        new = [generator.gauss(8.0, 0.3) for _ in range(20)]
        rows = [row("old", call, old), row("new", call, new)]
        found = predicted(counted, rows, seed=seed).run.new_seconds
        hits += found.low <= 1 - 50 * 0.002 <= found.high
    assert hits >= 33


@pytest.mark.parametrize(
    ("there", "saved"),
    [
        (lambda call: row("old", call, 8.0), 0.003),
        (lambda call: row("old", call, None, "error"), 0.005),  # this environment's row is used
    ],
)
def test_kernel_of_another_environment_is_compared_with_its_baseline(
    there: Callable[[CallFacts], Row], saved: float
) -> None:
    call = facts("a", "layers.0")
    rows = [row("old", call, 10.0), there(call), row("new", call, 5.0)]
    rows[1:] = [replace(each, environment="other") for each in rows[1:]]
    counted = census(("layers.0", "denoise", 64, 10))
    run = predict(counted, rows, everywhere(THERE), OLD.name, Clocked(STEADY), {}).run
    assert new_seconds(run).value == pytest.approx(1 - 10 * saved)


def test_clues_are_per_forward() -> None:
    call = facts("a", "layers.0", "prefill")
    new = row(
        "new",
        call,
        5.0,
        layer_host_ms=summarize([0.5]),
        core_time_ms=summarize([3.0]),
        gpu_during=GpuState(1500, None, 50, ()),
    )
    counted = census(("layers.0", "prefill", 64, 20))
    phases = {"prefill": Clocked((0.5,), 2)}
    old = row("old", call, 10.0)
    assert predicted(counted, [old, new]).run.clues.more_layer_launch_seconds is None
    old = replace(old, layer_host_ms=summarize([0.2]))
    clues = predicted(counted, [old, new], phases=phases).phases["prefill"].clues
    assert clues.more_layer_launch_seconds == pytest.approx(10 * 0.0003)
    assert clues.preparation_seconds == pytest.approx(10 * 0.002)
    assert clues.scatter == pytest.approx(1)
    assert (clues.sm_clock_mhz, clues.power_w) == (1500, None)


def test_the_interval_covers_the_scatter_of_launches() -> None:
    call = facts("a", "layers.0", "decode")
    rows = [launched("old", call, 1.0, 0.5), launched("new", call, 1.0, 0.6)]
    counted = census(("layers.0", "decode", 64, 30))
    phases = {"decode": Clocked((0.1,) * 5, busy_seconds=0.04, host_seconds=0.1)}
    steady = predicted(counted, rows, phases=phases).phases["decode"].new_seconds
    scatter = [random.Random(each).uniform(0.5, 0.7) for each in range(30)]
    rows[1] = replace(rows[1], layer_host_ms=summarize(scatter))
    uneven = predicted(counted, rows, phases=phases).phases["decode"].new_seconds
    assert steady.low == steady.high
    assert uneven.low < 0.103 < uneven.high


def test_impossible_prediction_has_a_reason() -> None:
    call = facts("a", "layers.0")
    rows = [row("old", call, 10.0), row("new", call, 5.0)]
    with pytest.raises(CensusError, match="capture it again"):
        predicted({}, rows)
    with pytest.raises(ValueError, match="old was timed on none"):
        predicted(census(("layers.0", "denoise", 64, 1)), rows[1:])
    decode = Clocked((0.1,) * 5, busy_seconds=0.04, host_seconds=0.1)
    with pytest.raises(ValueError, match="a was replayed without layer_host_ms: replay it again"):
        predicted(census(("layers.0", "denoise", 64, 1)), rows, phases={"denoise": decode})
    run = predicted(census(("layers.0", "denoise", 64, 500)), rows).run
    assert run.new_seconds is None
    assert "the predicted saving exceeds the model's time" in run.reason
    assert run.attention_share == pytest.approx(5.0)


def launched(kernel: str, call: CallFacts, ms: float, layer_host_ms: float) -> Row:
    """Return a row measured on a GPU."""
    return row(kernel, call, ms, layer_host_ms=summarize([layer_host_ms] * 5))


@pytest.mark.parametrize(
    ("busy", "host", "new_ms", "layer_host_ms", "swap_ms", "predicted_ms"),
    [
        (None, None, 0.5, 0.05, 2, 87.0),  # on a CPU: 100 − 30 · 0.5 + 2
        (99, 50, 0.5, 0.05, 0, 85.0),  # the GPU is the bottleneck
        (99, 50, 0.5, 0.55, 0, 85.0),  # the host has 15 ms more, within the GPU's time
        (99, 50, 0.5, 3.05, 2, 143.0),  # the host becomes the bottleneck: 1 + 2 + 50 + 30 · 3
        (40, 100, 0.5, 0.05, 0, 100.0),  # the host is the bottleneck, and its time is unchanged
        (40, 100, 0.5, 0.25, 3, 109.0),  # + 30 · 0.2 + 3
        (40, 90, 0.5, 0.01, 0, 98.8),  # − 30 · 0.04; another 10 ms are neither's
        (40, 100, 4.0, 0.05, 0, 130.0),  # the GPU becomes the bottleneck: 40 + 30 · 3
    ],
)
def test_forward_takes_the_longer_of_gpu_and_host(
    busy: float | None,
    host: float | None,
    new_ms: float,
    layer_host_ms: float,
    swap_ms: float,
    predicted_ms: float,
) -> None:
    call = facts("a", "layers.0", "decode")
    rows = [launched("old", call, 1.0, 0.05), launched("new", call, new_ms, layer_host_ms)]
    counted = census(("layers.0", "decode", 64, 300))
    busy, host = (None if each is None else each / 1000 for each in (busy, host))
    decode = Clocked((0.1,) * 5, 10, busy_seconds=busy, host_seconds=host)
    if swap_ms:
        decode = replace(decode, swap_ratios=(1 + swap_ms / 100,) * 5)
    clocked = Clocked((1.5,) * 5, swap_ratios=(1 + swap_ms / 150,) * 5)
    prediction = predict(counted, rows, NEW_EVERYWHERE, OLD.name, clocked, {"decode": decode})
    span = prediction.phases["decode"]
    assert 1000 * new_seconds(span).value == pytest.approx(predicted_ms)
    assert span.waiting_share == pytest.approx(0.6 if busy == 0.04 else 0.0)
    assert span.saved_seconds == pytest.approx(30 * (1 - new_ms) / 1000)
    assert span.swap_seconds == pytest.approx(swap_ms / 1000)
    # The run saves as much time as its forward passes.
    assert new_seconds(prediction.run).value == pytest.approx(
        1.5 - 10 * (100 - predicted_ms) / 1000
    )
    assert prediction.run.waiting_share == pytest.approx(0.4 if busy == 0.04 else 0.0)


def test_launches_of_a_recorded_decode_are_predicted() -> None:
    """Llama-2-7b on an H200: half of a token's 20.57 ms, the GPU waits for the host.

    The extra host time of a layer and the measured speed-up of five kernels are those of
    docs/whole-model.md and benchmarks/results/end_to_end.csv.
    """
    call = facts("a", "layers.0", "decode")
    counted = census(("layers.0", "decode", 64, 32))
    decode = Clocked((0.02057,) * 5, busy_seconds=0.0098, host_seconds=0.0205)
    recorded = {28: 0.96, 212: 0.77, 162: 0.81, 139: 0.81, 206: 0.74}
    for extra_us, measured in recorded.items():
        layer_ms = 0.6 + extra_us / 1000
        rows = [launched("old", call, 0.02, 0.6), launched("new", call, 0.02, layer_ms)]
        span = predicted(counted, rows, phases={"decode": decode}).phases["decode"]
        assert span.speedup.value == pytest.approx(measured, rel=0.04)


def test_calls_without_a_replayed_call_widen_the_interval() -> None:
    """Attention that was not recorded may gain as much as recorded calls, or nothing."""
    a, b = facts("a", "layers.0"), facts("b", "layers.1")
    rows = [row("old", a, 10.0), row("new", a, 5.0), row("old", b, 10.0), row("new", b, 12.0)]
    calls = [("layers.0", "denoise", 64, 10), ("layers.1", "denoise", 64, 10)]
    phases = {"denoise": Clocked(STEADY, attention_seconds=0.3)}
    counted = census(*calls, ("layers.0", "denoise", 999, 2))
    span = predicted(counted, rows, phases=phases).phases["denoise"]
    # The two calls take 300 − 200 ms; the ratios of the recorded calls are 0.5 and 1.2.
    new = new_seconds(span)
    assert (new.value, new.low, new.high) == pytest.approx((0.97, 0.92, 0.99))
    assert (span.speedup.low, span.speedup.high) == pytest.approx((1 / 0.99, 1 / 0.92))
    new = new_seconds(predicted(census(*calls[:1]), rows, phases={}).run)
    assert new.low == new.high


@pytest.mark.parametrize(("new_ms", "lost"), [(5.0, -0.01), (15.0, 0.01), (1000.0, 0.06)])
def test_calls_lose_time_in_a_model_on_a_cpu(new_ms: float, lost: float) -> None:
    """The own attention takes 1.2 times as long; a kernel loses time by its length, up to 4 · t."""
    call = facts("a", "layers.0")
    rows = [row("old", call, 10.0), row("new", call, new_ms)]
    phases = {"denoise": Clocked((0.5,) * 5, 2, attention_seconds=0.12)}  # 0.1 s in the replay
    prediction = predicted(census(("layers.0", "denoise", 64, 20)), rows, phases=phases)
    new, replayed = new_seconds(prediction.phases["denoise"]), 0.4 + new_ms / 100
    assert new.value == pytest.approx(replayed + lost)
    own, of_new = 0.02, lost + 0.02
    extremes = (replayed - own + 0.25 * of_new, replayed - own + 1.75 * of_new)
    assert (new.low, new.high) == pytest.approx(extremes, abs=0.05 * of_new)
    assert new_seconds(prediction.run).value == pytest.approx(1 + 2 * (replayed + lost - 0.5))
