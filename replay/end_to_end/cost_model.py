"""Cost of counted calls: the kernels that run these calls, and the time needed."""

from __future__ import annotations

import zlib
from collections import Counter, defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Literal

import torch
from torch import Tensor

from replay.end_to_end.predicted_times import RUN, Calls, Clocked, Clues
from replay.plan.call_matching import Counted, RowsByCall
from replay.rows.row import KernelId, Row, TimeSummary
from replay.timing.statistics import percentile

RESAMPLES = 1000
"""Number of bootstrap resamples; sums over many calls need fewer than one call's median."""

MOST_LOST = 4.0
"""Length of a call, in calls of the model's own attention, beyond which it loses no more time to
cold caches; it then fills them itself."""

LEAST_LOSS, LOSSES = 0.25, 1.5
"""Least ratio of a kernel's loss in the model to the predicted loss, and the range of the ratio."""

Figure = Literal["time_ms", "both_ms", "layer_host_ms"]


class CallTotals:
    """Totals of counted calls, by the way they run and the replayed call that represents them."""

    def __init__(self, chosen: Sequence[tuple[Counted, KernelId]], cost_model: CostModel) -> None:
        self.represented: dict[str, float] = defaultdict(float)
        """Number of counted calls that each replayed call represents."""
        self.swapped: dict[tuple[str, KernelId], float] = defaultdict(float)
        """Number of counted calls that a kernel runs, by replayed call and kernel."""
        self.fallbacks: Counter[str] = Counter()
        self.refused: dict[str, dict[str, float]] = defaultdict(lambda: defaultdict(float))
        """Number of counted calls that fall back, by reason and replayed call."""
        self.not_recorded: Counter[tuple[str, str]] = Counter()
        self.kernels_not_recorded: set[KernelId] = set()
        self.reason = ""
        own = 0
        for counted, kernel in chosen:
            if not counted.shares:
                self.not_recorded[counted.module, counted.phase] += counted.calls
                self.kernels_not_recorded.add(kernel)
            for call, share in counted.shares.items():
                self.represented[call] += counted.calls * share
            is_plain = kernel == KernelId(cost_model.replayed.plain)
            if not is_plain or not all(map(cost_model.replayed.is_sdpa, counted.shares)):
                self._swap(counted, kernel, cost_model)
            elif counted.shares:
                own += counted.calls
        counts = [counted.calls for counted, _ in chosen]
        fell_back, missing = self.fallbacks.total(), self.not_recorded.total()
        swapped = sum(counts) - fell_back - missing - own
        self.calls = Calls(swapped, fell_back, own, missing)

    def _swap(self, counted: Counted, kernel: KernelId, cost_model: CostModel) -> None:
        refused, reason = 0.0, ""
        for call, share in counted.shares.items():
            row = cost_model.replayed.row(call, kernel)
            if row is not None and row.status == "unsupported":
                refused, reason = refused + share, row.reason
                self.refused[reason][call] += counted.calls * share
                continue
            self.reason = self.reason or _why_unusable(row, call, kernel, counted.module)
            self.swapped[call, kernel] += counted.calls * share
        if refused and (fell_back := round(counted.calls * refused / sum(counted.shares.values()))):
            self.fallbacks[reason] += fell_back


def _why_unusable(row: Row | None, call: str, kernel: KernelId, module: str) -> str:
    """State why a row does not predict a kernel at a module; empty if the row predicts it.

    A row that is inaccurate at another module still shows the kernel's speed; if that module is
    swapped too, the rows of its own calls report the inaccuracy.
    """
    if row is None:
        return f"{kernel} was not replayed on {call}"
    if row.is_unconfirmed:
        return f"its time on {call} is unconfirmed"
    fits = row.status == "ok" or (row.status == "inaccurate" and row.call.module != module)
    return "" if fits and row.time_ms is not None else f"{row.status} on {call}: {row.reason}"


@dataclass(frozen=True)
class CostModel:
    """Time of calls with each kernel."""

    replayed: RowsByCall
    seed: int
    phases: Mapping[str, Clocked]
    pace: Mapping[str, float] = field(default_factory=dict)
    """Time of the model's own kernel, swapped in, / its time in the replay, by phase; CPUs only."""

    def waiting_seconds(self, phase: str) -> float:
        """Return the time that the GPU waits for the host in a phase's forwards or a full run."""
        spans = self.phases.values() if phase == RUN else [self.phases[phase]]
        return sum(clocked.forwards * clocked.waiting_seconds for clocked in spans)

    def attention_seconds(
        self, represented: Mapping[str, float], figure: Figure = "time_ms"
    ) -> float:
        """Return the baseline's time for the represented calls."""
        return sum(
            count * time.p50 / 1000
            for call, count in represented.items()
            if (time := getattr(self.replayed.own_row(call), figure, None)) is not None
        )

    def swapped_seconds(
        self, swapped: Mapping[tuple[str, KernelId], float], figure: Figure = "time_ms"
    ) -> float:
        """Return the baseline's time for the calls that kernels run, as in `saved_seconds`."""
        return sum(
            count * percentile(self._samples(*each, figure)[0], 50) / 1000
            for each, count in swapped.items()
        )

    def saved_seconds(
        self, swapped: Mapping[tuple[str, KernelId], float], figure: Figure = "time_ms"
    ) -> tuple[float, Tensor]:
        """Compute Σ count · (t_old − t_new), and the same sum for each resample of the rounds.

        Raises:
            ValueError: a call has no such figure.
        """
        saved, saved_resampled = 0.0, torch.zeros(RESAMPLES, dtype=torch.float64)
        for (call, kernel), count in swapped.items():
            before, after, paired = self._samples(call, kernel, figure)
            saved += count * (percentile(before, 50) - percentile(after, 50)) / 1000
            old = resampled(before, f"{self.seed} {call}")
            # Equal names draw the same rounds, which keeps the two kernels paired.
            new = resampled(after, f"{self.seed} {call}{'' if paired else kernel}")
            saved_resampled += count * (old - new) / 1000
        return saved, saved_resampled

    def gained_seconds(
        self, swapped: Mapping[tuple[str, KernelId], float], figure: Figure = "time_ms"
    ) -> tuple[float, Tensor]:
        """Sum the gain over the phases of the calls, by the formula of `prediction`.

        Raises:
            ValueError: a phase runs on a GPU, but the cost of launches was not measured.
        """
        by_phase: dict[str, dict[tuple[str, KernelId], float]] = defaultdict(dict)
        for (call, kernel), count in swapped.items():
            row = self.replayed.row(call, kernel)
            by_phase[row.call.phase if row else ""][call, kernel] = count
        gained, gained_resampled = 0.0, torch.zeros(RESAMPLES, dtype=torch.float64)
        for phase, counts in by_phase.items():
            saved, saved_resampled = self.saved_seconds(counts, figure)
            clocked = self.phases.get(phase)
            if clocked is None or clocked.busy_seconds is None or clocked.host_seconds is None:
                old, new = self._lost_seconds(counts, self.pace.get(phase, 1.0), figure)
                generator = torch.Generator().manual_seed(self.seed)
                drawn = torch.rand(RESAMPLES, generator=generator, dtype=torch.float64)
                gained += saved + old - new
                gained_resampled += saved_resampled + old - new * (LEAST_LOSS + drawn * LOSSES)
                continue
            spared, spared_resampled = self.saved_seconds(counts, "layer_host_ms")
            busy = clocked.forwards * clocked.busy_seconds
            host = clocked.forwards * clocked.host_seconds
            gained += max(busy, host) - max(busy - saved, host - spared)
            new_resampled = torch.maximum(busy - saved_resampled, host - spared_resampled)
            gained_resampled += max(busy, host) - new_resampled
        return gained, gained_resampled

    def _lost_seconds(
        self, swapped: Mapping[tuple[str, KernelId], float], pace: float, figure: Figure
    ) -> tuple[float, float]:
        """Return the time that the calls lose in the model: with its own kernel, and swapped."""
        lost_old = lost_new = 0.0
        for each, count in swapped.items():
            before, after, _ = self._samples(*each, figure)
            old, new = percentile(before, 50) / 1000, percentile(after, 50) / 1000
            lost_old += count * (pace - 1) * old
            lost_new += count * (pace - 1) * min(new, MOST_LOST * old)
        return lost_old, lost_new

    def ratios(self, kernels: Iterable[KernelId]) -> list[float]:
        """Return t_new / t_old of every replayed call that one of the kernels ran."""
        times = [
            (new.p50, old.p50)
            for kernel in kernels
            for call in self.replayed.timed()
            if (new := _time(self.replayed.row(call.name, kernel))) is not None
            and (old := _time(self._baseline_row(call.name, kernel))) is not None
        ]
        return [new / old for new, old in times]

    def clues(self, swapped: Mapping[tuple[str, KernelId], float], forwards: int) -> Clues:
        """Collect clues from the calls that kernels run, per forward."""
        preparation: list[float] = []
        costliest, scatter = 0.0, None
        states = []
        for (call, kernel), count in swapped.items():
            row = self.replayed.row(call, kernel)
            if row is None or row.time_ms is None:
                continue
            # The call with the largest total is used, because its scatter moves the prediction
            # most.
            for time in (row.time_ms, _time(self.replayed.own_row(call))):
                if time is not None and count * time.p50 > costliest:
                    costliest, scatter = count * time.p50, time.p90 / time.p10
            if row.core_time_ms is not None:
                preparation.append(count * (row.time_ms.p50 - row.core_time_ms.p50))
            if row.gpu_during is not None:
                states.append(row.gpu_during)
        launches = None
        if swapped and all(self._has_launches(*each) for each in swapped):
            launches, _ = self.saved_seconds(swapped, "layer_host_ms")
        return Clues(
            None if launches is None else -launches / forwards,
            sum(preparation) / 1000 / forwards if preparation else None,
            scatter,
            median(state.sm_clock_mhz for state in states),
            median(state.power_w for state in states),
        )

    def _samples(
        self, call: str, kernel: KernelId, figure: Figure
    ) -> tuple[Sequence[float], Sequence[float], bool]:
        """Return milliseconds of baseline and kernel by round, and True if they share rounds."""
        old, new = self._baseline_row(call, kernel), self.replayed.row(call, kernel)
        assert old is not None
        assert new is not None
        before, after = getattr(old, figure), getattr(new, figure)
        if before is None or after is None:
            raise ValueError(f"{call} was replayed without {figure}: replay it again")
        if not old.shares_rounds(new):
            return before.samples, after.samples, False
        rounds = min(len(before.samples), len(after.samples))
        return before.samples[:rounds], after.samples[:rounds], True

    def _has_launches(self, call: str, kernel: KernelId) -> bool:
        rows = self._baseline_row(call, kernel), self.replayed.row(call, kernel)
        return all(row is not None and row.layer_host_ms is not None for row in rows)

    def _baseline_row(self, call: str, kernel: KernelId) -> Row | None:
        """Return the baseline's row in the kernel's environment; by default, in this one."""
        row = self.replayed.own_row(call, kernel.environment)
        return row if _time(row) is not None else self.replayed.own_row(call)


def _time(row: Row | None) -> TimeSummary | None:
    return None if row is None else row.time_ms


def resampled(samples: Sequence[float], name: str) -> Tensor:
    """Return bootstrap medians (RESAMPLES,); equal names draw the same rounds."""
    ordered, ranked = torch.tensor(samples, dtype=torch.float64).sort()
    count = len(ordered)
    rank_of_round = torch.empty(count, dtype=torch.int32)
    rank_of_round[ranked] = torch.arange(count, dtype=torch.int32)
    generator = torch.Generator().manual_seed(zlib.crc32(name.encode()))
    drawn = torch.randint(count, (RESAMPLES, count), generator=generator)
    # Ranks are sorted instead of samples, because integers sort ten times faster.
    ranks = rank_of_round[drawn].sort(dim=1).values.long()
    return (ordered[ranks[:, (count - 1) // 2]] + ordered[ranks[:, count // 2]]) / 2


def median(figures: Iterable[float | None]) -> float | None:
    """Return the median of the known figures; None if there are none."""
    known = [figure for figure in figures if figure is not None]
    return percentile(known, 50) if known else None
