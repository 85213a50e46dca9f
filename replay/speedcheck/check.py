"""The end-to-end check: every kernel put back into the model, predicted and measured.

The model runs with its own attention and with each kernel in turn, in shuffled rounds, so that a
clock that drifts moves all of them and each round gives a ratio. Before that every one runs once:
that run compiles, is not timed, and its outputs are what drift is computed from.
"""

from __future__ import annotations

import random
import statistics
import tempfile
from collections.abc import Mapping, Sequence
from contextlib import closing
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from safetensors.torch import load_file
from torch import Tensor

from capture.dataset import CaptureRecord
from replay.results import Row, Status
from replay.speedcheck import drift
from replay.speedcheck.prediction import RUN, Clocked, KernelAt, Prediction, Span, predict
from replay.speedcheck.process import BASELINE, ModelProcess, Run, RunFailed, Variant
from replay.statistics import Speedup, TimeSummary, paired_speedup, summarize

OWN = "torch-default"
"""The kernel that the model's own attention is in the replay: SDPA, which chooses by itself."""


@dataclass(frozen=True)
class Measured:
    """A span's time in the model: one forward of a phase, or one whole run."""

    ms: TimeSummary
    """Over the rounds; of a phase, each round's median forward."""
    speedup: Speedup | None
    """Against the model's own attention, paired by round; None for that itself."""
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
    prediction: Prediction | None = None
    """None for the model's own attention, and where the replay allows none (`unpredicted`)."""
    unpredicted: str = ""
    hits: int = 0
    """Calls of one run that the kernel answered."""
    fallbacks: dict[str, int] = field(default_factory=dict)
    """Calls of one run that the model's own attention answered, by reason."""
    copies: int = 0
    """Outputs of one run that had to be copied into another layout."""
    peak_bytes: int | None = None
    drift: drift.Drift = field(default_factory=dict)
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
class _Lane:
    """What is collected of a variant."""

    variant: Variant
    runs: list[Run] = field(default_factory=list)
    failure: RunFailed | None = None
    outputs: dict[str, Tensor] = field(default_factory=dict)


def check(
    capture: CaptureRecord,
    rows: Sequence[Row],
    variants: Sequence[Variant],
    process: ModelProcess,
    *,
    rounds: int,
    seed: int = 0,
    text: str | None = None,
    kernel_at: Mapping[str, KernelAt] | None = None,
    save_output: Path | None = None,
) -> list[Checked]:
    """Run the model with every variant; the first result is the model's own attention.

    Args:
        capture: the recording whose model it is, with its census.
        rows: the replay of that recording, `OWN` among its kernels.
        rounds: timed runs of each variant.
        text: for language models, a text to compute perplexity on.
        kernel_at: of variants that are plans, by name, which kernel they use where.
        save_output: a directory for pictures and texts of every variant.

    Raises:
        ModelRefused: the model cannot be built.
        RunFailed: it does not run with its own attention either.
    """
    lanes = [_Lane(variant) for variant in (BASELINE, *variants)]
    with closing(process), tempfile.TemporaryDirectory() as scratch:
        for number, lane in enumerate(lanes):
            file = Path(scratch) / f"{number}.safetensors"
            save = None if save_output is None else (save_output, capture.model)
            _attempt(lane, process, file, text, save)
            if file.is_file():
                lane.outputs = load_file(file)
            if lane.failure is not None and lane is lanes[0]:
                raise lane.failure
            lane.runs.clear()
        shuffled = random.Random(seed)
        for _ in range(rounds):
            for lane in shuffled.sample(lanes, len(lanes)):
                if lane.failure is None:
                    _attempt(lane, process)
                elif lane is lanes[0]:
                    raise lane.failure
    return [_checked(capture, rows, lane, lanes[0], kernel_at or {}, seed) for lane in lanes]


def _attempt(
    lane: _Lane,
    process: ModelProcess,
    file: Path | None = None,
    text: str | None = None,
    save: tuple[Path, str] | None = None,
) -> None:
    try:
        lane.runs.append(process.run(lane.variant, file, text, save))
    except RunFailed as failure:
        lane.failure = failure


def _checked(
    capture: CaptureRecord,
    rows: Sequence[Row],
    lane: _Lane,
    own: _Lane,
    kernel_at: Mapping[str, KernelAt],
    seed: int,
) -> Checked:
    name = lane.variant.name
    checked = Checked(name, capture.model, capture.weights)
    if lane.failure is not None:
        checked.status, checked.reason = lane.failure.status, str(lane.failure)
        checked.log = lane.failure.log
        return checked
    last = lane.runs[-1]
    checked.hits, checked.fallbacks, checked.copies = last.hits, last.fallbacks, last.copies
    checked.peak_bytes = max((run.peak_bytes for run in lane.runs if run.peak_bytes), default=None)
    states = [run.gpu for run in lane.runs if run.gpu is not None]
    checked.sm_clock_mhz = _median([state.sm_clock_mhz for state in states])
    checked.power_w = _median([state.power_w for state in states])
    is_own = lane is own
    for span, seconds in spans(lane.runs).items():
        before = spans(own.runs).get(span)
        compares = not is_own and before is not None and len(before) == len(seconds)
        checked.measured[span] = Measured(
            summarize([1000 * each for each in seconds]),
            paired_speedup(before or (), seconds, seed) if compares else None,
            _rate(last.times.tokens.get(span), seconds),
        )
    if is_own:
        return checked
    checked.drift = drift.compare(own.outputs, lane.outputs)
    try:
        checked.prediction = predict(
            capture.census,
            rows,
            name,
            OWN,
            Clocked(tuple(spans(own.runs)[RUN])),
            {
                phase: Clocked(
                    tuple(seconds),
                    len(own.runs[0].times.forwards[phase]),
                    own.runs[0].times.tokens.get(phase),
                )
                for phase, seconds in spans(own.runs).items()
                if phase != RUN
            },
            kernel_at=kernel_at.get(name),
            seed=seed,
        )
    except ValueError as error:
        checked.unpredicted = str(error)
    return checked


def spans(runs: Sequence[Run]) -> dict[str, list[float]]:
    """Seconds by round: of each phase the median forward, of the run the whole."""
    found: dict[str, list[float]] = {}
    for run in runs:
        for phase, forwards in run.times.forwards.items():
            found.setdefault(phase, []).append(statistics.median(forwards))
    found[RUN] = [run.times.run for run in runs]
    return found


def _rate(tokens: int | None, seconds: Sequence[float]) -> float | None:
    return None if tokens is None else tokens / statistics.median(seconds)


def _median(values: Sequence[Any]) -> float | None:
    known = [value for value in values if value is not None]
    return statistics.median(known) if known else None
