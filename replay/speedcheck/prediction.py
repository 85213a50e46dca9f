"""How long the model will take with another kernel, from the replay and the census alone.

    T_new = T_old − Σ count · (t_old − t_new)

T_old is the model's measured time, count comes from the census, and t_old and t_new are the median
drop-in times of baseline and kernel on the replayed calls that stand for the counted ones
(`replay.counterparts`). A call that the kernel does not support falls back on the model's own
attention and costs t_old; so does one that no replayed call stands for, which is reported.

The interval (95 %, percentile bootstrap) covers the scatter of the figures that went in: the rounds
of the replay, drawn anew for each replayed call, the same rounds for both kernels where they were
timed together; and the rounds of T_old. A replayed call that stands for many moves them all at
once. The interval does not cover what the replay cannot know: calls that were not replayed, layers
that cost something else than the one replayed in their place, and how the model differs from it
(caches, clocks, launches that hide behind other work or do not). A measurement outside the interval
says that one of these matters; `Clues` helps to find which.
"""

from __future__ import annotations

import zlib
from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from typing import Any

import torch
from torch import Tensor

from replay.counterparts import Counted, Replayed, match
from replay.results import Row
from replay.statistics import TimeSummary, percentile

RESAMPLES = 1000
"""Bootstrap resamples; sums over many calls need fewer than a single call's median."""

RUN = "run"
"""In place of a phase: one whole run of the model."""

KernelAt = Callable[[str, str], str]
"""Which kernel (`Row.label`) a module uses in a phase."""


@dataclass(frozen=True)
class Clocked:
    """The model's measured time with its own attention."""

    seconds: tuple[float, ...]
    """One forward of the phase, or one run; an entry per round."""
    forwards: int = 1
    """How many of them one run has; 1 for the run itself."""
    tokens: int | None = None
    """Tokens that one forward reads (prefill) or makes (decode), over the batch."""


@dataclass(frozen=True)
class Interval:
    """A figure and its 95 % interval."""

    value: float
    low: float
    high: float


@dataclass(frozen=True)
class Missing:
    """Calls that no replayed call stands for."""

    module: str
    phase: str
    calls: int


@dataclass(frozen=True)
class Calls:
    """The attention calls of one run, by what becomes of them; each is in one kind."""

    swapped: int = 0
    """The kernel answers."""
    fell_back: int = 0
    """The kernel does not support them: the model's own attention answers."""
    kept: int = 0
    """The plan leaves them to the baseline."""
    not_recorded: int = 0
    """Nothing is known of them; the prediction takes them as unchanged."""


@dataclass(frozen=True)
class Clues:
    """What may explain a prediction that fails; None where the replay did not measure it."""

    launch_seconds: float | None = None
    """What the host needs to launch the kernel's calls (GPU only). Hidden behind other work in the
    replay, not always in the model: where it exceeds the calls' own time, the model waits for it.
    """
    preparation_seconds: float | None = None
    """What layout changes and quantisation before the kernel's core take; part of the prediction.
    """
    sm_clock_mhz: float | None = None
    """Median over the replayed calls, while the kernel's rounds ran."""
    power_w: float | None = None


@dataclass(frozen=True)
class Span:
    """One forward of a phase, or one whole run. Seconds are those of one forward (or run)."""

    phase: str
    """`prefill`, `decode`, `denoise`, `encode`, or `RUN`."""
    forwards: int
    """In one run."""
    old_seconds: Interval
    """Measured, with the model's own attention: median over the rounds."""
    new_seconds: Interval | None
    """Predicted; None where the kernel cannot stand in the model, for `reason`."""
    speedup: Interval | None
    """old / new."""
    old_tokens_per_second: Interval | None
    new_tokens_per_second: Interval | None
    attention_seconds: float
    """Σ count · t_old of the calls that are known."""
    attention_share: float
    """Of `old_seconds`. A lower bound while calls are not recorded; above 1 when the replay is
    slower than the model, so that the two cannot be compared."""
    calls: Calls
    """Of one run, whatever the span."""
    fallbacks: dict[str, int] = field(default_factory=dict)
    """The calls that fall back, by reason."""
    not_recorded: list[Missing] = field(default_factory=list)
    """By module, in the census's order."""
    clues: Clues = field(default_factory=Clues)
    reason: str = ""
    """Why there is no prediction: `inaccurate on call-3: cosine 0.81 …`."""


@dataclass(frozen=True)
class Prediction:
    """What a kernel will do to a model's time."""

    kernel: str
    baseline: str
    run: Span
    phases: dict[str, Span]
    """Those whose time was measured."""

    def to_json(self) -> dict[str, Any]:
        """Plain JSON: the fields, by name."""
        return asdict(self)


def predict(
    census: Mapping[str, Any],
    rows: Iterable[Row],
    kernel: str,
    baseline: str,
    run: Clocked,
    phases: Mapping[str, Clocked],
    *,
    kernel_at: KernelAt | None = None,
    seed: int = 0,
) -> Prediction:
    """Predict the model's time with a kernel, phase by phase and as a whole.

    A kernel that was wrong at a module, or that failed or was not timed on a call that stands for
    one of its calls, leaves that phase, and the run, without a prediction.

    Args:
        census: of one run, as `capture.census.Census.to_json` writes it.
        rows: the replay of the same recording and model. A kernel of another environment is held
            against the baseline there, where that was replayed too.
        kernel: `Row.label`, or what to call a choice made by `kernel_at`.
        baseline: the kernel that the model itself uses.
        run: one whole run with it.
        phases: one forward of each phase that was measured; the run has one row more, of all.
        kernel_at: a kernel for each module and phase, as a plan has them, instead of the same for
            all.
        seed: of the bootstrap.

    Raises:
        CensusError: the census is empty.
        ValueError: the baseline was timed on none of the calls, or a phase has no seconds.
    """
    replayed = Replayed(rows)
    calls = replayed.timed(baseline)
    if not calls:
        raise ValueError(f"{baseline} was timed on none of the replayed calls")
    choose = kernel_at or (lambda module, phase: kernel)
    counted = match(census, calls)
    ledger = _Ledger(replayed, baseline, seed)

    def span(phase: str, clocked: Clocked, of: Sequence[Counted]) -> Span:
        return _span(
            phase, clocked, [(each, choose(each.module, each.phase)) for each in of], ledger
        )

    return Prediction(
        kernel,
        baseline,
        span(RUN, run, counted),
        {
            phase: span(phase, clocked, [each for each in counted if each.phase == phase])
            for phase, clocked in phases.items()
        },
    )


def _span(
    phase: str, clocked: Clocked, chosen: Sequence[tuple[Counted, str]], ledger: _Ledger
) -> Span:
    tally = _Tally(chosen, ledger)
    old_median = percentile(clocked.seconds, 50)
    old_resampled = _resampled_medians(clocked.seconds, f"{ledger.seed} {phase}")
    old = _interval(old_median, old_resampled)
    attention = ledger.attention_seconds(tally.stands_for) / clocked.forwards
    span = Span(
        phase=phase,
        forwards=clocked.forwards,
        old_seconds=old,
        new_seconds=None,
        speedup=None,
        old_tokens_per_second=_rate(clocked.tokens, old),
        new_tokens_per_second=None,
        attention_seconds=attention,
        attention_share=attention / old_median,
        calls=tally.calls,
        fallbacks=dict(tally.fallbacks),
        not_recorded=[Missing(*site, calls) for site, calls in tally.not_recorded.items()],
        clues=ledger.clues(tally.swapped, clocked.forwards),
        reason=tally.reason,
    )
    if tally.reason:
        return span
    saved, saved_resampled = ledger.saved_seconds(tally.swapped)
    new_median = old_median - saved / clocked.forwards
    new_resampled = old_resampled - saved_resampled / clocked.forwards
    if min(new_median, float(new_resampled.min())) <= 0:
        return replace(span, reason="the replay would save more time than the model takes")
    new = _interval(new_median, new_resampled)
    return replace(
        span,
        new_seconds=new,
        speedup=_interval(old_median / new_median, old_resampled / new_resampled),
        new_tokens_per_second=_rate(clocked.tokens, new),
    )


class _Tally:
    """What becomes of counted calls, and how many of them each replayed call stands for."""

    def __init__(self, chosen: Sequence[tuple[Counted, str]], ledger: _Ledger) -> None:
        self.stands_for: dict[str, float] = defaultdict(float)
        self.swapped: dict[tuple[str, str], float] = defaultdict(float)
        """By replayed call and kernel: the calls that the kernel answers."""
        self.fallbacks: Counter[str] = Counter()
        self.not_recorded: Counter[tuple[str, str]] = Counter()
        self.reason = ""
        kept = 0
        for counted, kernel in chosen:
            if not counted.shares:
                self.not_recorded[counted.module, counted.phase] += counted.calls
            for call, share in counted.shares.items():
                self.stands_for[call] += counted.calls * share
            if kernel != ledger.baseline:
                self._swap(counted, kernel, ledger)
            elif counted.shares:
                kept += counted.calls
        counts = [counted.calls for counted, _ in chosen]
        fell_back, missing = self.fallbacks.total(), self.not_recorded.total()
        swapped = sum(counts) - fell_back - missing - kept
        self.calls = Calls(swapped, fell_back, kept, missing)

    def _swap(self, counted: Counted, kernel: str, ledger: _Ledger) -> None:
        refused, reason = 0.0, ""
        for call, share in counted.shares.items():
            row = ledger.replayed.row(call, kernel)
            if row is not None and row.status == "unsupported":
                refused, reason = refused + share, row.reason
                continue
            self.reason = self.reason or _unfit(row, call, kernel, counted.module)
            self.swapped[call, kernel] += counted.calls * share
        if fell_back := round(counted.calls * refused):
            self.fallbacks[reason] += fell_back


def _unfit(row: Row | None, call: str, kernel: str, module: str) -> str:
    """Why a row says nothing about a kernel at a module.

    One that was wrong at another module still says how fast it is; where that module is swapped
    too, its own calls say that it was wrong.
    """
    if row is None:
        return f"{kernel} was not replayed on {call}"
    fits = row.status == "ok" or (row.status == "inaccurate" and row.call.module != module)
    return "" if fits and row.time_ms is not None else f"{row.status} on {call}: {row.reason}"


@dataclass(frozen=True)
class _Ledger:
    """What calls cost with one kernel and another."""

    replayed: Replayed
    baseline: str
    seed: int

    def attention_seconds(self, stands_for: Mapping[str, float]) -> float:
        """Of the calls with the baseline."""
        return sum(
            count * time.p50 / 1000
            for call, count in stands_for.items()
            if (time := _time(self.replayed.row(call, self.baseline))) is not None
        )

    def saved_seconds(self, swapped: Mapping[tuple[str, str], float]) -> tuple[float, Tensor]:
        """Σ count · (t_old − t_new): the figure, and as each resample of the rounds has it."""
        saved, resampled = 0.0, torch.zeros(RESAMPLES, dtype=torch.float64)
        for (call, kernel), count in swapped.items():
            before, after, paired = self._samples(call, kernel)
            saved += count * (percentile(before, 50) - percentile(after, 50)) / 1000
            old = _resampled_medians(before, f"{self.seed} {call}")
            # The same name draws the same rounds.
            new = _resampled_medians(after, f"{self.seed} {call}{'' if paired else kernel}")
            resampled += count * (old - new) / 1000
        return saved, resampled

    def clues(self, swapped: Mapping[tuple[str, str], float], forwards: int) -> Clues:
        """Of the calls that kernels answer, in one of so many forwards."""
        launch, preparation = [], []
        states = []
        for (call, kernel), count in swapped.items():
            row = self.replayed.row(call, kernel)
            if row is None or row.time_ms is None:
                continue
            if row.host_ms is not None:
                launch.append(count * row.host_ms)
            if row.core_time_ms is not None:
                preparation.append(count * (row.time_ms.p50 - row.core_time_ms.p50))
            if row.gpu_during is not None:
                states.append(row.gpu_during)
        return Clues(
            sum(launch) / 1000 / forwards if launch else None,
            sum(preparation) / 1000 / forwards if preparation else None,
            _median(state.sm_clock_mhz for state in states),
            _median(state.power_w for state in states),
        )

    def _samples(self, call: str, kernel: str) -> tuple[Sequence[float], Sequence[float], bool]:
        """Milliseconds of baseline and kernel by round, and whether the rounds are the same."""
        _, at, environment = kernel.partition("@")
        new = self.replayed.row(call, kernel)
        old = self.replayed.row(call, f"{self.baseline.partition('@')[0]}{at}{environment}")
        alongside = _time(old) is not None
        if not alongside:
            old = self.replayed.row(call, self.baseline)
        assert old is not None
        assert new is not None
        assert old.time_ms is not None
        assert new.time_ms is not None
        before, after = old.time_ms.samples, new.time_ms.samples
        if not (alongside and self.replayed.share_rounds(old, new)):
            return before, after, False
        rounds = min(len(before), len(after))
        return before[:rounds], after[:rounds], True


def _time(row: Row | None) -> TimeSummary | None:
    return None if row is None else row.time_ms


def _resampled_medians(samples: Sequence[float], name: str) -> Tensor:
    """Medians (RESAMPLES,) of samples drawn with replacement; a name always draws the same."""
    generator = torch.Generator().manual_seed(zlib.crc32(name.encode()))
    count = len(samples)
    drawn = torch.randint(count, (RESAMPLES, count), generator=generator)
    ordered = torch.tensor(samples, dtype=torch.float64)[drawn].sort(dim=1).values
    return (ordered[:, (count - 1) // 2] + ordered[:, count // 2]) / 2


def _interval(value: float, resampled: Tensor) -> Interval:
    figures = resampled.tolist()
    return Interval(value, percentile(figures, 2.5), percentile(figures, 97.5))


def _rate(tokens: int | None, seconds: Interval) -> Interval | None:
    if tokens is None:
        return None
    return Interval(tokens / seconds.value, tokens / seconds.high, tokens / seconds.low)


def _median(figures: Iterable[float | None]) -> float | None:
    known = [figure for figure in figures if figure is not None]
    return percentile(known, 50) if known else None
