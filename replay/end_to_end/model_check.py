"""End-to-end check: run the model with every kernel and compare with the prediction.

The model runs with its own attention and with each kernel, in shuffled rounds. Every two kernels
share a run with the model's own attention only seconds away, because clocks and the load of a
shared host drift. Before the rounds, each variant runs once untimed to
compile; drift is computed from the outputs of this run. After the rounds, each variant runs once
more with a timer on every attention call, to explain differences.
"""

from __future__ import annotations

import random
import statistics
import tempfile
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from contextlib import closing
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path

from safetensors.torch import load_file
from torch import Tensor

from capture.storage.capture_record import CaptureRecord
from replay.end_to_end import drift
from replay.end_to_end.census_check import difference, shortfall
from replay.end_to_end.cost_model import median
from replay.end_to_end.first_step import wrong_first_step
from replay.end_to_end.model_clock import RunTimes
from replay.end_to_end.model_process import (
    BASELINE,
    OWN,
    ModelRun,
    ModelRuns,
    RunFailed,
    Variant,
)
from replay.end_to_end.predicted_times import RUN, Clocked, PredictedTime
from replay.end_to_end.prediction import KernelAt, Prediction, everywhere, predict
from replay.end_to_end.run_pace import BUILDING, NEIGHBOURS, expected_runs
from replay.end_to_end.undisturbed_times import by_round, delayed
from replay.plan.call_matching import RowsByCall
from replay.rows.row import CallFacts, KernelId, Row, Speedup, Status, TimeSummary
from replay.sketches.foretold_drift import ForetoldDrift
from replay.timing.defaults import MINIMUM_ROUNDS
from replay.timing.statistics import paired_speedup, summarize

MOST_ROUNDS = 10
ROUNDS_SECONDS = 6.0
"""Default seconds of timed rounds per kernel; at least `MINIMUM_ROUNDS` rounds are run."""
SWAPPED = "the model's own, swapped in"
"""Name of the variant that measures what swapping a kernel in costs."""


@dataclass(frozen=True)
class MeasuredSpan:
    """Measured time of a span: one forward of a phase, or one full run."""

    ms: TimeSummary
    """Statistics over the kernel's rounds, without interruptions
    (`replay.end_to_end.undisturbed_times`)."""
    speedup: Speedup | None
    """Speed-up over adjacent runs with the model's own attention; None for the baseline, and for a
    kernel that handled no call."""
    tokens_per_second: float | None
    """Tokens per `seconds`."""
    seconds: float
    """The measured time: the baseline's median / speed-up; for the baseline, its median. Unlike
    `ms`, it is not affected by a machine that was slower in the kernel's rounds."""


@dataclass
class ModelResult:
    """Result of one kernel in one model."""

    kernel: str
    model: str
    weights: str
    status: Status = "ok"
    reason: str = ""
    log: str = ""
    """Last output of the model's process, if it died."""
    measured: dict[str, MeasuredSpan] = field(default_factory=dict)
    """Measured times by phase, and for the full `run`."""
    delayed: float = 0.0
    """Share of the runs' wall time lost to delays of single forwards, which `measured` excludes."""
    runs: list[RunTimes] = field(default_factory=list)
    """Times of the runs, including delays."""
    prediction: Prediction | None = None
    """Prediction; None for the model's own attention, or if the replay allows no prediction."""
    unpredicted: str = ""
    """Reason why the replay allows no prediction."""
    short_census: str = ""
    """Attention calls that the model's recording did not count; empty if all were counted."""
    hits: int = 0
    """Calls per run that the kernel handled."""
    own_calls: int = 0
    """Calls per run that a plan leaves to the model's own attention."""
    fallbacks: dict[str, int] = field(default_factory=dict)
    """Calls per run that fell back to the model's own attention, by reason."""
    missing: list[str] = field(default_factory=list)
    """Modules that a plan names but the model does not have."""
    changed_inputs: list[str] = field(default_factory=list)
    """Inputs that the kernel changed in place during the replay: query, key, value or attn_mask."""
    copies: int = 0
    """Outputs per run that had to be copied into another layout."""
    peak_bytes: int | None = None
    drift: drift.Drift = field(default_factory=dict)
    foretold: ForetoldDrift | None = None
    """Error of the output that a sketch foretold; None without a sketch."""
    curves: dict[str, list[float]] = field(default_factory=dict)
    """Values of each step of a run that trains, by the names in `drift.TRAINING`."""
    steps: int = 0
    """Training steps of a run; 0 if it does not train."""
    wrong: str = ""
    """Reason why a kernel trains wrongly: its gradients in the replay, or its first step."""
    attention_seconds: dict[str, float] = field(default_factory=dict)
    """Time of all attention calls in the model, per forward of a phase and for the full `run`."""
    own_attention_seconds: dict[str, float] = field(default_factory=dict)
    """Time of all attention calls with the model's own attention, in the same process."""
    busy_seconds: dict[str, float] = field(default_factory=dict)
    """GPU busy time per forward of a phase; in the remaining time, the GPU waits for the host."""
    sm_clock_mhz: float | None = None
    power_w: float | None = None

    def predicted(self, span: str) -> PredictedTime | None:
        if self.prediction is None:
            return None
        return self.prediction.run if span == RUN else self.prediction.phases.get(span)

    def prediction_error(self, span: str) -> float | None:
        """Return predicted speed-up / measured speed-up - 1."""
        predicted, measured = self.predicted(span), self.measured.get(span)
        if predicted is None or predicted.speedup is None:
            return None
        if measured is None or measured.speedup is None:
            return None
        return predicted.speedup.value / measured.speedup.ratio - 1


@dataclass
class _Arm:
    """Runs of one variant."""

    variant: Variant
    runs: list[ModelRun] = field(default_factory=list)
    paired_with: list[int] = field(default_factory=list)
    """Index of the adjacent baseline run, for each run."""
    inside: ModelRun | None = None
    drained: ModelRun | None = None
    """Run that measured the host's time, with the model's own kernel swapped in if possible; only
    for the baseline, on a GPU."""
    failure: RunFailed | None = None
    outputs: dict[str, Tensor] = field(default_factory=dict)
    warm_in: int = 0
    """Number of the build, by `ModelRuns.builds`, in which the variant last ran."""

    def seconds(self) -> dict[str, list[float]]:
        """Return the time of one forward of each phase, and of `RUN`, by round."""
        return by_round([run.times for run in self.runs])

    def __post_init__(self) -> None:
        if self.variant.refused:
            self.failure = RunFailed("unavailable", self.variant.refused)


def check(
    capture: CaptureRecord,
    rows: Sequence[Row],
    variants: Sequence[Variant],
    process: ModelRuns,
    *,
    rounds: int | None = None,
    seed: int = 0,
    text: str | None = None,
    kernel_at: Mapping[str, KernelAt] | None = None,
    own_kernel: str | None = None,
    save_output: Path | None = None,
) -> list[ModelResult]:
    """Run the model with every variant; the first result is the model's own attention.

    Args:
        capture: the recording of this model, with its census.
        rows: rows of a replay of that recording, including the kernel `OWN`.
        rounds: timed runs of each variant; None for as many runs as fit into `ROUNDS_SECONDS`.
        text: for language models, a text to compute perplexity on.
        kernel_at: kernel of each module, phase, key length and step, by the name of each variant
            that is a plan.
        own_kernel: the kernel of `own_kernel_of`. It is also swapped in, to measure what swapping
            costs; None not to measure it.
        save_output: a directory for pictures and texts of every variant.

    Raises:
        ModelRefused: the model cannot be built.
        RunFailed: the model fails even with its own attention.
    """
    own, *_ = shown = [_Arm(variant) for variant in (BASELINE, *variants)]
    reference = None if own_kernel is None else _Arm(Variant(SWAPPED, own_kernel))
    arms = shown if reference is None else [*shown, reference]
    _expect(process, arms, rounds or MOST_ROUNDS, is_new=True)
    with closing(process), tempfile.TemporaryDirectory() as scratch:
        for number, arm in enumerate(arms):
            file = Path(scratch) / f"{number}.safetensors"
            save = None if save_output is None else (save_output, capture.model)
            run = partial(process.run, arm.variant, keep=file, text=text, save=save)
            _attempt(arm, process, run)
            if arm.failure is None:
                arm.outputs = load_file(file)
        # Calls are counted in a separate run, because counting makes compiled models run eagerly.
        mismatch = difference(capture.census, process.count())
        _run_rounds(arms, process, rounds, seed)
        # Typical times show how long a forward must wait while the host enqueues its kernels.
        waits = {
            phase: statistics.median(seconds)
            for phase, seconds in own.seconds().items()
            if phase != RUN
        }
        for arm in arms:
            arm.inside = _attempt(arm, process, partial(process.run, arm.variant, waits=waits))
        if _busy_seconds(own):
            # The host's time with a kernel includes that of swapping the kernel in.
            swapped = own if reference is None or reference.failure else reference
            drained = partial(process.run, swapped.variant, drains=True)
            own.drained = _attempt(swapped, process, drained)
    at = kernel_at or {}
    return [_checked(capture, rows, arm, own, reference, at, seed, mismatch) for arm in shown]


def own_kernel_of(rows: Sequence[Row]) -> str | None:
    """Return the kernel that stands for the model's own attention; None if there are several."""
    if all(
        row.call.entry_point == "sdpa" for row in rows
    ):  # also runs a backend that the model pinned
        return OWN
    replayed = RowsByCall(rows, OWN, stand_ins=True)
    names = {replayed.own(call.name) for call in replayed.timed()}
    return names.pop() if len(names) == 1 else None


def affordable_rounds(seconds: float) -> int:
    """Return the default number of rounds if a run takes some seconds."""
    return min(MOST_ROUNDS, max(int(ROUNDS_SECONDS / seconds), MINIMUM_ROUNDS))


def _run_rounds(arms: Sequence[_Arm], process: ModelRuns, requested: int | None, seed: int) -> None:
    own, *others = arms
    shuffle = random.Random(seed).shuffle
    done, total = 0, requested or MOST_ROUNDS
    while done < total:
        process.round = f"round {done + 1} of {total}" if done else "first round"
        _expect(process, arms, total - done, is_new=False)
        kernels = [arm for arm in others if arm.failure is None]
        shuffle(kernels)
        for first in range(0, max(len(kernels), 1), NEIGHBOURS):
            together = [own, *kernels[first : first + NEIGHBOURS]]
            # The order within a group is also random, so that no position is favoured.
            shuffle(together)
            for arm in together:
                run = _attempt(arm, process, partial(process.run, arm.variant))
                if run is not None:
                    arm.runs.append(run)
            for arm in together:
                if arm.failure is None:
                    arm.paired_with.append(len(own.runs) - 1)
        done += 1
        if requested is None:
            taken = [run.times.run for arm in arms for run in arm.runs]
            total = affordable_rounds(statistics.mean(taken))
    process.round = ""


def _expect(process: ModelRuns, arms: Sequence[_Arm], rounds: int, *, is_new: bool) -> None:
    names = [arm.variant.name for arm in arms if arm.failure is None]
    runs = expected_runs(names, rounds, is_new=is_new)
    process.pace.expect(runs - Counter({BUILDING: process.is_built}))


def _attempt(arm: _Arm, process: ModelRuns, run: Callable[[], ModelRun]) -> ModelRun | None:
    """Run a variant, unless it failed before."""
    if arm.failure is not None:
        return None
    is_own = arm.variant is BASELINE
    try:
        try:
            return _warm(arm, process, run)
        except RunFailed:
            if not is_own or not arm.warm_in or process.is_built:
                raise
            # The variant ran before, so a kernel may have corrupted the memory of the shared
            # process.
            return _warm(arm, process, run)
    except RunFailed as failure:
        if is_own:
            reason = f"the model fails with its own attention: {failure}"
            raise RunFailed(failure.status, reason, failure.log) from failure
        again = "" if process.is_built else "; the model was rebuilt for the remaining runs"
        arm.failure = RunFailed(failure.status, f"{failure}{again}", failure.log)
        return None


def _warm(arm: _Arm, process: ModelRuns, run: Callable[[], ModelRun]) -> ModelRun:
    """Run a variant; first warm it up if the process with its compiled code is gone."""
    process.build()
    if arm.warm_in not in (0, process.builds):
        process.run(arm.variant)
    ran = run()
    arm.warm_in = process.builds
    return ran


def _checked(
    capture: CaptureRecord,
    rows: Sequence[Row],
    arm: _Arm,
    own: _Arm,
    reference: _Arm | None,
    kernel_at: Mapping[str, KernelAt],
    seed: int,
    mismatch: str,
) -> ModelResult:
    """Collect the results of a variant.

    Args:
        mismatch: difference between the model and the recorded one; empty if they agree.
    """
    name = arm.variant.name
    checked = ModelResult(name, capture.model, capture.weights, short_census=shortfall(capture))
    if arm.failure is not None:
        checked.status, checked.reason = arm.failure.status, str(arm.failure)
        checked.log = arm.failure.log
        return checked
    choose = kernel_at.get(name) or everywhere(arm.variant.kernel_id)
    mine = [row for row in rows if row.id == _at(choose, row.call)]
    checked.changed_inputs = sorted({each for row in mine for each in row.changed_inputs})
    _fill_in_runs(checked, arm, own)
    curves = ((name, arm.outputs.get(name)) for name in drift.TRAINING)
    checked.curves = {name: each.tolist() for name, each in curves if each is not None}
    checked.steps = len(checked.curves.get("grad_norm", ()))
    if arm is own:
        return checked
    try:
        checked.drift = drift.compare(own.outputs, arm.outputs)
    except ValueError as error:
        checked.status, checked.reason = "error", str(error)
        return checked
    if checked.steps and checked.hits:
        checked.wrong = next((row.reason for row in mine if row.status == "inaccurate"), "")
        checked.wrong = checked.wrong or wrong_first_step(own.outputs, arm.outputs, mine)
    # Call counts of a different model predict nothing about this model.
    checked.unpredicted = mismatch
    if mismatch:
        return checked
    try:
        clocked = _clocked(own, reference)
        stand_ins = reference is not None and reference.failure is None
        checked.prediction = predict(
            capture.census,
            rows,
            choose,
            OWN,
            *clocked,
            stand_ins=stand_ins,
            trains=checked.steps > 0,
            seed=seed,
        )
    except ValueError as error:
        checked.unpredicted = str(error)
    return checked


def _at(choose: KernelAt, call: CallFacts) -> KernelId:
    return choose(call.module, call.phase, call.shape.kv_len, call.step)


def _fill_in_runs(checked: ModelResult, arm: _Arm, own: _Arm) -> None:
    last = arm.runs[-1]
    checked.runs = [run.times for run in arm.runs]
    checked.delayed = delayed(checked.runs)
    checked.hits, checked.fallbacks, checked.copies = last.hits, last.fallbacks, last.copies
    checked.own_calls, checked.missing = last.own_calls, last.missing
    checked.peak_bytes = max((run.peak_bytes for run in arm.runs if run.peak_bytes), default=None)
    states = [run.gpu for run in arm.runs if run.gpu is not None]
    checked.sm_clock_mhz = median(state.sm_clock_mhz for state in states)
    checked.power_w = median(state.power_w for state in states)
    if arm.inside is not None and own.inside is not None:
        checked.attention_seconds = _attention(arm)
        checked.own_attention_seconds = _attention(own)
        checked.busy_seconds = _busy_seconds(arm)
    own_seconds = own.seconds()
    for span, seconds in arm.seconds().items():
        tokens = last.times.tokens.get(span)
        speedup, typical = None, statistics.median(seconds)
        if arm is not own and (last.hits or arm.variant.plan) and span in own_seconds:
            # A kernel's runs are compared with the adjacent baseline runs, not with all of them.
            speedup = paired_speedup([own_seconds[span][at] for at in arm.paired_with], seconds)
            typical = statistics.median(own_seconds[span]) / speedup.ratio
        checked.measured[span] = MeasuredSpan(
            summarize([1000 * each for each in seconds]),
            speedup,
            None if tokens is None else tokens / typical,
            typical,
        )


def _attention(arm: _Arm) -> dict[str, float]:
    """Return the time of all attention calls per forward of each phase, and in a run as `RUN`."""
    if arm.inside is None or not (seconds := arm.inside.times.attention):
        return {}
    return {RUN: sum(seconds.values())} | {
        phase: seconds.get(phase, 0.0) / len(each)
        for phase, each in arm.inside.times.forwards.items()
    }


def _busy_seconds(arm: _Arm) -> dict[str, float]:
    """Return the GPU's busy time per forward of each phase; empty on a CPU."""
    if arm.inside is None or arm.inside.peak_bytes is None:
        return {}
    return {phase: statistics.fmean(each) for phase, each in arm.inside.times.forwards.items()}


def _clocked(own: _Arm, reference: _Arm | None) -> tuple[Clocked, dict[str, Clocked]]:
    """Return the baseline's times for the run and for every phase, as predictions need them.

    Args:
        reference: runs with the model's own kernel swapped in, if there are any.
    """
    ratios: dict[str, tuple[float, ...]] = {}
    own_seconds, busy = own.seconds(), _busy_seconds(own)
    if reference is not None and reference.failure is None:
        ratios = {
            span: tuple(
                each / own_seconds[span][at]
                for each, at in zip(seconds, reference.paired_with, strict=True)
            )
            for span, seconds in reference.seconds().items()
            if span in own_seconds
        }
    attention, longer = _attention(own), dict[str, float]()
    if reference is not None and reference.inside is not None:
        of_own, attention = attention, _attention(reference)
        if reference.variant.kernel != OWN:
            longer = {span: attention[span] - of_own[span] for span in attention if span in of_own}
    host = {} if own.drained is None else own.drained.times.host
    run = Clocked(
        tuple(own_seconds.pop(RUN)),
        attention_seconds=attention.get(RUN),
        stand_in_seconds=longer.get(RUN, 0.0),
        swap_ratios=ratios.get(RUN, ()),
    )
    times = own.runs[0].times
    return run, {
        phase: Clocked(
            tuple(seconds),
            len(times.forwards[phase]),
            busy.get(phase),
            statistics.median(host[phase]) if phase in host else None,
            attention.get(phase),
            longer.get(phase, 0.0),
            ratios.get(phase, ()),
        )
        for phase, seconds in own_seconds.items()
    }
