"""Check of a model with a simulated process."""

from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any, cast

import pytest
import torch
from safetensors.torch import save_file

from capture.storage.capture_record import CaptureRecord
from replay.end_to_end.census_check import difference
from replay.end_to_end.drift import FIRST_GRADIENT
from replay.end_to_end.model_check import MOST_ROUNDS, SWAPPED, ModelResult, check
from replay.end_to_end.model_clock import RunTimes
from replay.end_to_end.model_process import BASELINE, ModelProcess, ModelRun, RunFailed, Variant
from replay.end_to_end.predicted_times import RUN
from replay.end_to_end.run_pace import BUILDING, COUNTING, RunPace
from replay.end_to_end.time_breakdown import break_down
from replay.rows.row import GpuState, KernelId, Row
from replay.timing.statistics import summarize
from tests import factories
from tests.factories import census
from tests.replay.cli.test_time_limit import Clock

CENSUS = census(("layers.0", "denoise", 64, 12))


class Pretended:
    """Simulated process with scripted kernels, whose runs take a second and have four forward
    passes.

    Attributes:
        log: variants in the order of their runs, `(name)` for runs with times by phase, and
            "count".
        deaths: number of runs of each variant after which the process dies.
    """

    def __init__(
        self,
        *,
        seconds: float = 1.0,
        deaths: Mapping[str, int] | None = None,
        errors: Mapping[str, int] | None = None,
        busy: float | None = None,
        census: dict[str, Any] | None = None,
    ) -> None:
        self.builds = 0
        self.is_built = False
        self.log: list[str] = []
        self.closed = False
        self.deaths, self.errors = dict(deaths or {}), dict(errors or {})
        self.seconds, self.busy = seconds, busy
        self.waits: Mapping[str, float] = {}
        self.census = census or CENSUS
        self.round = ""
        self.clock = Clock()
        self.pace = RunPace(self.clock)
        self.rounds: list[str] = []

    def build(self) -> None:
        if not self.is_built:
            self.builds += 1
            self.is_built = True
            with self.pace.running(BUILDING):
                self.clock.now += 2.0
                self.log.append("build")

    def run(
        self,
        variant: Variant,
        *,
        keep: Path | None = None,
        text: str | None = None,
        save: tuple[Path, str] | None = None,
        waits: Mapping[str, float] | None = None,
        drains: bool = False,
    ) -> ModelRun:
        self.build()
        with self.pace.running(variant.name):
            return self._run(variant, keep, waits, drains)

    def _run(
        self, variant: Variant, keep: Path | None, waits: Mapping[str, float] | None, drains: bool
    ) -> ModelRun:
        self.rounds.append(self.round)
        is_own = variant is BASELINE
        if drains:
            self.drained = variant.name
            run = self._ran(self.seconds)
            run.times.host["denoise"] = [0.24] * 4
            return run
        if waits is not None:
            self.log.append(f"({variant.name})")
            self.waits = waits
            return self._ran(self.seconds, self.busy, attention=0.6 if is_own else 0.4)
        self.log.append(variant.name)
        if self.errors.get(variant.name) == self.log.count(variant.name) - 1:
            raise RunFailed("error", "ValueError: no")
        if self.deaths.get(variant.name) == self.log.count(variant.name) - 1:
            self.is_built = False
            raise RunFailed("crash", "it crashed", "its last words")
        if keep is not None:
            save_file({"output": torch.ones(2, 8) + (0.0 if is_own else 0.5)}, keep)
        return self._ran(self.seconds if is_own else self.seconds / 2)

    def count(self) -> dict[str, Any]:
        self.build()
        with self.pace.running(COUNTING):
            self.clock.now += self.seconds
            self.log.append("count")
            return self.census

    def close(self) -> None:
        self.closed = True

    def _ran(self, seconds: float, busy: float | None = None, attention: float = 0.0) -> ModelRun:
        self.clock.now += seconds
        forward = seconds / 4 if busy is None else busy
        times = RunTimes(seconds, {"denoise": [forward] * 4}, {RUN: 60}, {"denoise": attention})
        peak = None if self.busy is None else 5
        state = None if self.busy is None else GpuState(1500, 300.0, None, None)
        return ModelRun(times, 8, 3, {"takes no mask": 4}, 0, ["layers.9"], peak, state)


class Drifting(Pretended):
    """Simulated process on a machine that slows by a tenth with every run."""

    def run(self, variant: Variant, **options: Any) -> ModelRun:
        self.seconds *= 1.1
        return super().run(variant, **options)


def row(kernel: str, ms: float) -> Row:
    return factories.row(kernel, ms=ms, layer_host_ms=summarize([0.05] * 5))


def checked(
    process: Pretended,
    *kernels: str | Variant,
    rounds: int | None = 3,
    rows: list[Row] | None = None,
    missed_attention: Any = (),
    **options: Any,
) -> list[ModelResult]:
    record = CaptureRecord("model", "none", census=CENSUS, missed_attention=missed_attention)
    variants = [each if isinstance(each, Variant) else Variant(each, each) for each in kernels]
    if rows is None:
        rows = [row("torch-default", 50.0), *(row(each.name, 10.0) for each in variants)]
    simulated = cast("ModelProcess", process)
    return check(record, rows, variants, simulated, rounds=rounds, **options)


def test_runs_are_warm_interleaved_and_inspected_last() -> None:
    process = Pretended()
    own, a, b = checked(process, "a", "b", rounds=6)
    names = [BASELINE.name, "a", "b"]
    assert process.log[:5] == ["build", *names, "count"]
    rounds = [process.log[at : at + 3] for at in range(5, 23, 3)]
    assert [sorted(each) for each in rounds] == [sorted(names)] * 6
    assert len(set(map(tuple, rounds))) > 1
    assert process.log[23:] == [f"({name})" for name in names]
    assert process.closed
    assert (own.measured[RUN].speedup, own.measured[RUN].tokens_per_second) == (None, 60)
    for each in (a, b):
        assert each.measured[RUN].ms.n == 6
        assert each.measured[RUN].ms.p50 == 500
        assert each.measured["denoise"].ms.p50 == 125
        speedup = each.measured["denoise"].speedup
        assert (speedup.ratio, speedup.verdict) == (2, "fast")
        assert (each.hits, each.fallbacks) == (8, {"takes no mask": 4})
        assert (each.own_calls, each.missing) == (3, ["layers.9"])
        assert each.drift["relative_l1"] == pytest.approx(0.5)
        # The prediction is 1 s − 12 · 40 ms.
        predicted = each.predicted(RUN)
        assert predicted.new_seconds.value == pytest.approx(0.52)
        assert each.prediction_error(RUN) == pytest.approx(1 / 0.52 / 2 - 1)
        assert each.attention_seconds == {RUN: 0.4, "denoise": 0.1}
        assert each.own_attention_seconds == {RUN: 0.6, "denoise": 0.15}
        assert each.busy_seconds == {}
    assert process.waits == {"denoise": 0.25}


def test_own_kernel_is_swapped_in_to_measure_what_swapping_costs() -> None:
    process = Pretended()
    own, a = checked(process, "a", own_kernel="torch-default")
    assert process.log.count(SWAPPED) == 4  # a warm-up and three rounds
    # Every kernel halves the time. The own kernel takes 0.4 s in the model, 0.6 s in the replay,
    # so 12 calls save two thirds of 40 ms each.
    predicted = a.predicted(RUN)
    assert predicted.swap_seconds == pytest.approx(-0.5)
    assert predicted.new_seconds.value == pytest.approx(0.18)
    assert (own.measured[RUN].seconds, a.measured[RUN].seconds) == pytest.approx((1, 0.5))
    checked(on_gpu := Pretended(busy=0.1), "a", own_kernel="torch-default")
    assert on_gpu.drained == SWAPPED  # the host also swaps


def test_every_two_kernels_share_a_baseline_run() -> None:
    names = ["a", "b", "c", "d", "e"]
    process = Drifting()
    own, *kernels = checked(process, *names, rounds=8)
    rounds = process.log[8:-6]
    assert len(rounds) == 8 * 8
    for at in range(0, 64, 8):
        groups = [rounds[at : at + 3], rounds[at + 3 : at + 6], rounds[at + 6 : at + 8]]
        assert all(group.count(BASELINE.name) == 1 for group in groups)
        assert sorted(rounds[at : at + 8]) == sorted([*names, *[BASELINE.name] * 3])
    groups = [rounds[at : at + 3] for first in range(0, 64, 8) for at in (first, first + 3)]
    assert len({group.index(BASELINE.name) for group in groups}) > 1
    assert len({frozenset(group) for group in groups}) > 2
    assert own.measured[RUN].ms.n == 24
    for each in kernels:
        speedup = each.measured[RUN].speedup
        assert each.measured[RUN].ms.n == 8
        # The machine slows by a tenth with every run; a kernel halves the time.
        assert 2 / 1.1**2.5 < speedup.ratio < 2 * 1.1**2.5  # paired runs are two runs apart
        assert speedup.holds(2)


def test_other_kernels_are_warmed_up_again_after_a_crash() -> None:
    process = Pretended(deaths={"a": 2})
    own, a, b = checked(process, "a", "b")
    assert (a.status, a.reason) == (
        "crash",
        "it crashed; the model was rebuilt for the remaining runs",
    )
    assert a.log == "its last words"
    assert not a.measured
    assert process.builds == 2
    second = process.log[process.log.index("build", 1) + 1 :]
    for name in (BASELINE.name, "b"):
        assert own.measured[RUN].ms.n == b.measured[RUN].ms.n == 3
        # Each variant ran once in the first process, once to warm up, and three times to be timed.
        assert process.log.count(name) == 5
        assert second.count(name) >= 2
    assert process.log.count("a") == 3
    assert "(a)" not in process.log


def test_kernel_that_raises_keeps_the_process() -> None:
    process = Pretended(errors={"a": 0})
    _, a, b = checked(process, "a", "b")
    assert (a.status, a.reason) == ("error", "ValueError: no")
    assert process.builds == 1
    assert b.status == "ok"


def test_baseline_is_retried_after_a_kernel_may_have_broken_it() -> None:
    process = Pretended(deaths={BASELINE.name: 2})
    own, a = checked(process, "a")
    assert (own.status, a.status) == ("ok", "ok")
    assert process.builds == 2
    for broken in (Pretended(deaths={BASELINE.name: 0}), Pretended(errors={BASELINE.name: 1})):
        with pytest.raises(RunFailed, match="the model fails with its own attention: "):
            checked(broken, "a")
        assert broken.closed


def test_refused_variant_is_not_tried() -> None:
    process = Pretended()
    found = checked(process, Variant("a", "a", refused="another Python"), rows=[])
    assert [(each.status, each.reason) for each in found] == [
        ("ok", ""),
        ("unavailable", "another Python"),
    ]
    assert "a" not in process.log


@pytest.mark.parametrize(("seconds", "rounds"), [(0.01, MOST_ROUNDS), (1.0, 8), (60.0, 6)])
def test_rounds_fill_the_time_limit(seconds: float, rounds: int) -> None:
    # A run with the kernel takes half as long.
    own, a = checked(Pretended(seconds=seconds), "a", rounds=None)
    assert own.measured[RUN].ms.n == a.measured[RUN].ms.n == rounds


@pytest.mark.parametrize(("compilation", "after"), [(0.0, 1 / 3), (3.0, 1 / 2)])
@pytest.mark.parametrize(
    ("kernels", "errors"), [("a", {}), ("abcde", {}), ("abcde", {"b": 0, "d": 2})]
)
def test_time_left_is_right_within_30_percent_once_compiled(
    kernels: str, errors: dict[str, int], compilation: float, after: float
) -> None:
    class Compiling(Pretended):
        def _run(self, variant: Variant, *options: Any) -> ModelRun:
            self.clock.now += compilation * (variant.name not in (BASELINE.name, *self.log))
            seen.append((self.clock.now, self.pace.left(), self.pace.total))
            return super()._run(variant, *options)

    seen: list[tuple[float, float | None, int]] = []
    process = Compiling(errors=errors)
    begin = process.clock.now
    checked(process, *kernels, own_kernel="torch-default", rounds=None)
    end = process.clock.now
    assert (process.pace.done, process.pace.left()) == (process.pace.total, 0)
    assert [left is None for _, left, _ in seen[:2]] == [True, False]
    assert {total for *_, total in seen[len(seen) // 2 :]} == {process.pace.total}
    for now, left, _ in seen:
        if after < (now - begin) / (end - begin) < 0.8:
            assert left == pytest.approx(end - now, rel=0.3)


def test_launch_bound_gpu_is_reported() -> None:
    process = Pretended(busy=0.1)
    own, a = checked(process, "a")
    assert process.drained == BASELINE.name
    assert own.busy_seconds == {"denoise": 0.1}
    predicted = a.predicted("denoise")
    assert predicted.waiting_share == pytest.approx(0.6)
    assert (a.peak_bytes, a.sm_clock_mhz, a.power_w) == (5, 1500, 300.0)


def calls_on(length: int, phase: str = "denoise") -> dict[str, Any]:
    """Return a census of 12 calls of this length."""
    size = [1, 2, length, 32]
    row = {"module": "layers.0", "phase": phase, "signature": 0, "calls": 12}
    return {"signatures": [{"query": size, "key": size, "value": size}], "rows": [row]}


def test_changed_model_is_reported_and_not_predicted() -> None:
    _, a = checked(Pretended(census=calls_on(96)), "a")
    assert a.prediction is None
    assert a.unpredicted == (
        "the model built here is not the one recorded: layers.0 (denoise) calls attention 0 times "
        "on [1, 2, 64, 32] × [1, 2, 64, 32], not 12 times as recorded: capture it again"
    )
    assert a.measured[RUN].speedup is not None
    batches = calls_on(-1, "prefill"), calls_on(-1, "extend")
    assert difference(*batches).endswith(
        "capture it again, with the engine's prefix caching turned off"
    )


def test_run_that_trains_is_predicted_from_times_of_forward_and_backward() -> None:
    class Training(Pretended):
        factor = 1.25

        def run(self, variant: Variant, *, keep: Path | None = None, **options: Any) -> ModelRun:
            ran = super().run(variant, keep=keep, **options)
            if keep is not None:
                is_own = variant is BASELINE
                loss = torch.tensor([2.0, 1.0 + is_own])
                first = torch.ones(4) * (1 if is_own else self.factor)
                save_file({"loss": loss, "grad_norm": 2 * loss, f"{FIRST_GRADIENT}k": first}, keep)
            return ran

    own, a = checked(Training(), "a")
    assert (own.curves["loss"], a.curves["loss"]) == ([2.0, 2.0], [2.0, 1.0])
    assert (a.drift["baseline_loss"], a.drift["loss"]) == (2.0, 1.0)
    assert (own.steps, own.wrong, a.steps, a.wrong) == (2, "", 2, "")
    assert a.predicted("denoise").speedup is not None
    assert a.predicted(RUN).speedup is None
    assert a.predicted(RUN).reason.endswith("--backward")
    rows = [
        replace(row(kernel, ms), both_ms=summarize([both] * 5))
        for kernel, ms, both in (("torch-default", 50.0, 60.0), ("a", 10.0, 15.0))
    ]
    _, a = checked(Training(), "a", rows=rows)
    assert a.predicted(RUN).attention_seconds == pytest.approx(12 * 0.06)
    assert a.predicted(RUN).new_seconds.value == pytest.approx(1 - 12 * 0.045)
    # The first step has equal weights, so its gradients must agree; those of later steps need not.
    process = Training()
    process.factor = 1.75
    _, a = checked(process, "a", rows=rows)
    assert a.wrong == (
        "in the first step, the gradient of k differs from that with the model's own attention by "
        "75 %"
    )
    wrong = [rows[0], replace(rows[1], status="inaccurate", reason="grad_key is wrong: …")]
    assert checked(process, "a", rows=wrong)[1].wrong == "grad_key is wrong: …"


def test_kernel_without_a_call_has_no_speedup() -> None:
    class Refused(Pretended):
        def _ran(self, *arguments: Any, **options: Any) -> ModelRun:
            return replace(super()._ran(*arguments, **options), hits=0)

    _, a = checked(Refused(), "a")
    assert a.measured[RUN].speedup is None
    assert break_down(a, RUN) == "it answered no call: takes no mask"


def test_inputs_changed_in_the_replay_are_listed() -> None:
    rows = [row("torch-default", 50.0), row("a", 10.0), row("b", 10.0)]
    rows[1] = replace(rows[1], changed_inputs=("key",))
    planned = Variant("plan", "", plan=Path("plan.json"))
    rows = [replace(each, call=replace(each.call, step=1)) for each in rows]
    a, b = KernelId("a"), KernelId("b")
    plan = {
        "plan": lambda module, phase, kv_len, step: a if (module, step) == ("layers.0", 1) else b
    }
    found = checked(Pretended(), "a", "b", planned, rows=rows, kernel_at=plan)
    assert [each.changed_inputs for each in found] == [[], ["key"], [], ["key"]]


def test_times_of_runs_include_delays() -> None:
    class Interrupted(Pretended):
        def _ran(
            self, seconds: float, busy: float | None = None, attention: float = 0.0
        ) -> ModelRun:
            run = super()._ran(seconds, busy, attention)
            run.times.forwards["denoise"][len(self.log) % 4] += 0.5
            run.times.run += 0.5
            return run

    own, a = checked(Interrupted(), "a", rounds=5)
    assert (own.measured[RUN].ms.p50, a.measured[RUN].ms.p50) == pytest.approx((1000, 500))
    assert (own.delayed, a.delayed) == pytest.approx((0.5 / 1.5, 0.5))
    assert [times.run for times in a.runs] == [1.0] * 5
    assert all(sorted(times.forwards["denoise"])[-1] == 0.625 for times in a.runs)
