"""The end-to-end check: every kernel put back into the model, predicted and measured.

The model runs with its own attention and with each kernel in turn, in shuffled rounds. Its own runs
beside every two kernels, so that what a kernel is compared with ran within seconds of it: clocks
drift, and so does a host that others use. Before that every one runs once:
that run compiles, is not timed, and its outputs are what drift is computed from. After it every one
runs once more with a clock on each attention call, to say where a difference comes from.
"""

from __future__ import annotations

import random
import statistics
import tempfile
from collections.abc import Callable, Mapping, Sequence
from contextlib import closing
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any, Literal

from safetensors.torch import load_file
from torch import Tensor

from capture.dataset import CaptureRecord
from replay.end_to_end import drift
from replay.end_to_end.census_check import difference
from replay.end_to_end.model_clock import RunTimes
from replay.end_to_end.model_process import BASELINE, OWN, ModelProcess, Run, RunFailed, Variant
from replay.end_to_end.prediction import KernelAt, Prediction, everywhere, predict
from replay.end_to_end.span import RUN, Clocked, Span
from replay.end_to_end.typical import by_round, delayed
from replay.rows.row import KernelId, Row, Speedup, Status, TimeSummary
from replay.timing.defaults import MINIMUM_ROUNDS
from replay.timing.statistics import paired_speedup, summarize

MOST_ROUNDS = 10
ROUNDS_SECONDS = 6.0
"""Where nobody says how many rounds: as many as a kernel has in this time, but `MINIMUM_ROUNDS` at
least."""
NEIGHBOURS = 2
"""Kernels that share a run of the model's own attention in a round."""


@dataclass(frozen=True)
class Measured:
    """A span's time in the model: one forward of a phase, or one whole run."""

    ms: TimeSummary
    """Over the rounds, by each one's typical forwards (`replay.end_to_end.typical`)."""
    speedup: Speedup | None
    """Against the model's own attention, each run paired with one beside it; None for that itself.
    """
    tokens_per_second: float | None


@dataclass
class Checked:
    """One kernel in one model."""

    kernel: str
    model: str
    weights: str
    status: Status = "ok"
    reason: str = ""
    log: str = ""
    """The end of what the model's process had printed when it died."""
    measured: dict[str, Measured] = field(default_factory=dict)
    """By phase, and the whole `run`."""
    delayed: float = 0.0
    """The share of the runs' wall time that delays of single forwards took; not in `measured`."""
    runs: list[RunTimes] = field(default_factory=list)
    """As they were timed."""
    prediction: Prediction | None = None
    """None for the model's own attention, and where the replay allows none (`unpredicted`)."""
    unpredicted: str = ""
    hits: int = 0
    """Calls of one run that the kernel answered."""
    kept: int = 0
    """Calls of one run that a plan leaves to `OWN`."""
    fallbacks: dict[str, int] = field(default_factory=dict)
    """Calls of one run that the model's own attention answered, by reason."""
    missing: list[str] = field(default_factory=list)
    """Modules that a plan names and the model does not have."""
    changed_inputs: list[str] = field(default_factory=list)
    """Of query, key, value and attn_mask, what changed in place in the replay."""
    copies: int = 0
    """Outputs of one run that had to be copied into another layout."""
    peak_bytes: int | None = None
    drift: drift.Drift = field(default_factory=dict)
    attention_seconds: dict[str, float] = field(default_factory=dict)
    """Of all attention calls together as the model makes them: in one forward of a phase, and in
    the whole `run`."""
    own_attention_seconds: dict[str, float] = field(default_factory=dict)
    """The same with the model's own attention, in the same process."""
    more_launch_seconds: dict[str, float] = field(default_factory=dict)
    """What the host needs more for them than with the model's own attention, on a GPU."""
    busy_seconds: dict[str, float] = field(default_factory=dict)
    """How long a GPU works in one forward of a phase; the rest of it waits for the host."""
    sm_clock_mhz: float | None = None
    power_w: float | None = None

    def predicted(self, span: str) -> Span | None:
        if self.prediction is None:
            return None
        return self.prediction.run if span == RUN else self.prediction.phases.get(span)

    def prediction_error(self, span: str) -> float | None:
        """Predicted speed-up / measured speed-up - 1."""
        predicted, measured = self.predicted(span), self.measured.get(span)
        if predicted is None or predicted.speedup is None:
            return None
        if measured is None or measured.speedup is None:
            return None
        return predicted.speedup.value / measured.speedup.ratio - 1


@dataclass
class _Arm:
    """What is collected of a variant."""

    variant: Variant
    runs: list[Run] = field(default_factory=list)
    beside: list[int] = field(default_factory=list)
    """For each of them, which run of the model's own attention stood next to it."""
    inside: Run | None = None
    failure: RunFailed | None = None
    outputs: dict[str, Tensor] = field(default_factory=dict)
    warm_in: int = 0
    """The build of the model in which it ran last."""

    def seconds(self) -> dict[str, list[float]]:
        """Of one forward of each phase and of the whole `RUN`, by round."""
        return by_round([run.times for run in self.runs])

    @classmethod
    def of(cls, variant: Variant) -> _Arm:
        refused = RunFailed("unavailable", variant.refused) if variant.refused else None
        return cls(variant, failure=refused)


def check(
    capture: CaptureRecord,
    rows: Sequence[Row],
    variants: Sequence[Variant],
    process: ModelProcess,
    *,
    rounds: int | None = None,
    seed: int = 0,
    text: str | None = None,
    kernel_at: Mapping[str, KernelAt] | None = None,
    save_output: Path | None = None,
) -> list[Checked]:
    """Run the model with every variant; the first result is the model's own attention.

    Args:
        capture: the recording whose model it is, with its census.
        rows: the replay of that recording, `OWN` among its kernels.
        rounds: timed runs of each variant; None for as many as there is time for.
        text: for language models, a text to compute perplexity on.
        kernel_at: of variants that are plans, by name, which kernel they use where.
        save_output: a directory for pictures and texts of every variant.

    Raises:
        ModelRefused: the model cannot be built.
        RunFailed: it does not run with its own attention either.
    """
    own, *_ = arms = [_Arm(BASELINE), *map(_Arm.of, variants)]
    with closing(process), tempfile.TemporaryDirectory() as scratch:
        for number, arm in enumerate(arms):
            file = Path(scratch) / f"{number}.safetensors"
            save = None if save_output is None else (save_output, capture.model)
            _attempt(arm, process, partial(process.run, arm.variant, file, text, save))
            if arm.failure is None:
                arm.outputs = load_file(file)
        unlike = difference(capture.census, process.count())
        _run_rounds(arms, process, rounds, seed)
        waits = {
            phase: statistics.median(seconds)
            for phase, seconds in own.seconds().items()
            if phase != RUN
        }
        for arm in arms:
            look_inside = partial(process.look_inside, arm.variant, waits)
            arm.inside = _attempt(arm, process, look_inside)
    at = kernel_at or {}
    return [_checked(capture, rows, arm, own, at, seed, unlike) for arm in arms]


def _run_rounds(arms: Sequence[_Arm], process: ModelProcess, wanted: int | None, seed: int) -> None:
    own, *others = arms
    shuffle = random.Random(seed).shuffle
    done, total = 0, wanted or MOST_ROUNDS
    while done < total:
        kernels = [arm for arm in others if arm.failure is None]
        shuffle(kernels)
        for first in range(0, max(len(kernels), 1), NEIGHBOURS):
            together = [own, *kernels[first : first + NEIGHBOURS]]
            shuffle(together)
            for arm in together:
                run = _attempt(arm, process, partial(process.run, arm.variant))
                if run is not None:
                    arm.runs.append(run)
            for arm in together:
                if arm.failure is None:
                    arm.beside.append(len(own.runs) - 1)
        done += 1
        if wanted is None:
            taken = [run.times.run for arm in arms for run in arm.runs]
            affordable = int(ROUNDS_SECONDS / statistics.mean(taken))
            total = min(MOST_ROUNDS, max(affordable, MINIMUM_ROUNDS))


def _attempt(arm: _Arm, process: ModelProcess, run: Callable[[], Run]) -> Run | None:
    """A run of an arm, unless it has failed.

    Raises:
        RunFailed: the model's own attention fails.
    """
    if arm.failure is not None:
        return None
    is_own = arm.variant is BASELINE
    try:
        try:
            return _warm(arm, process, run)
        except RunFailed:
            if not is_own or not arm.warm_in or process.is_built:
                raise
            # It ran before: a kernel may have damaged the memory of the process that both used.
            return _warm(arm, process, run)
    except RunFailed as failure:
        if is_own:
            reason = f"the model fails with its own attention: {failure}"
            raise RunFailed(failure.status, reason, failure.log) from failure
        again = "" if process.is_built else "; the model was built anew for what came after"
        arm.failure = RunFailed(failure.status, f"{failure}{again}", failure.log)
        return None


def _warm(arm: _Arm, process: ModelProcess, run: Callable[[], Run]) -> Run:
    """A run; one more before it where what the arm had compiled went with the process."""
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
    kernel_at: Mapping[str, KernelAt],
    seed: int,
    unlike: str,
) -> Checked:
    """
    Args:
        unlike: why nothing recorded predicts this model; empty where it does.
    """
    name = arm.variant.name
    checked = Checked(name, capture.model, capture.weights)
    if arm.failure is not None:
        checked.status, checked.reason = arm.failure.status, str(arm.failure)
        checked.log = arm.failure.log
        return checked
    _fill_in_runs(checked, arm)
    choose = kernel_at.get(name) or everywhere(arm.variant.kernel_id)
    mine = [row for row in rows if row.id == choose(row.call.module, row.call.phase)]
    checked.changed_inputs = sorted({each for row in mine for each in row.changed_inputs})
    checked.own_attention_seconds = _of_calls(own.inside, "attention")
    launch, own_launch = _of_calls(arm.inside, "launch"), _of_calls(own.inside, "launch")
    checked.more_launch_seconds = {
        span: launch[span] - own_launch[span] for span in launch if span in own_launch
    }
    own_seconds = own.seconds()
    for span, seconds in arm.seconds().items():
        before = [own_seconds[span][each] for each in arm.beside] if span in own_seconds else []
        compares = arm is not own and bool(before)
        checked.measured[span] = Measured(
            summarize([1000 * each for each in seconds]),
            paired_speedup(before, seconds) if compares else None,
            _rate(arm.runs[-1].times.tokens.get(span), seconds),
        )
    if arm is own:
        return checked
    try:
        checked.drift = drift.compare(own.outputs, arm.outputs)
    except ValueError as error:
        checked.status, checked.reason = "error", str(error)
        return checked
    checked.unpredicted = unlike
    if unlike:
        return checked
    try:
        run, phases = _clocked(own)
        checked.prediction = predict(
            capture.census, rows, choose, KernelId(OWN), run, phases, seed=seed
        )
    except ValueError as error:
        checked.unpredicted = str(error)
    return checked


def _fill_in_runs(checked: Checked, arm: _Arm) -> None:
    last = arm.runs[-1]
    checked.runs = [run.times for run in arm.runs]
    checked.delayed = delayed(checked.runs)
    checked.hits, checked.fallbacks, checked.copies = last.hits, last.fallbacks, last.copies
    checked.kept, checked.missing = last.kept, last.missing
    checked.peak_bytes = max((run.peak_bytes for run in arm.runs if run.peak_bytes), default=None)
    states = [run.gpu for run in arm.runs if run.gpu is not None]
    checked.sm_clock_mhz = _median([state.sm_clock_mhz for state in states])
    checked.power_w = _median([state.power_w for state in states])
    checked.attention_seconds = _of_calls(arm.inside, "attention")
    checked.busy_seconds = _busy_seconds(arm.inside)


def _of_calls(inside: Run | None, what: Literal["attention", "launch"]) -> dict[str, float]:
    """What all attention calls take in one forward of each phase, and in the whole `RUN`; empty
    where it was not measured."""
    if inside is None:
        return {}
    seconds = inside.times.attention if what == "attention" else inside.times.launch
    if not seconds:
        return {}
    forwards = inside.times.forwards.items()
    return {RUN: sum(seconds.values())} | {
        phase: seconds.get(phase, 0.0) / len(each) for phase, each in forwards
    }


def _busy_seconds(inside: Run | None) -> dict[str, float]:
    """How long a GPU works in a forward of each phase; of a CPU, nothing is known."""
    if inside is None or inside.peak_bytes is None:
        return {}
    return {phase: statistics.fmean(each) for phase, each in inside.times.forwards.items()}


def _clocked(own: _Arm) -> tuple[Clocked, dict[str, Clocked]]:
    """What a prediction needs of the model with its own attention: the run, and every phase."""
    own_seconds, busy = own.seconds(), _busy_seconds(own.inside)
    run, times = Clocked(tuple(own_seconds.pop(RUN))), own.runs[0].times
    return run, {
        phase: Clocked(
            tuple(seconds), len(times.forwards[phase]), times.tokens.get(phase), busy.get(phase)
        )
        for phase, seconds in own_seconds.items()
    }


def _rate(tokens: int | None, seconds: Sequence[float]) -> float | None:
    return None if tokens is None else tokens / statistics.median(seconds)


def _median(values: Sequence[Any]) -> float | None:
    known = [value for value in values if value is not None]
    return statistics.median(known) if known else None
