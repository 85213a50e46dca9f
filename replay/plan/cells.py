"""Cells of a plan, each with one kernel, and the time and error of every kernel at a cell.

A cell is a module in a phase, for a range of its key lengths and, in a search over denoising steps,
for a range of steps. Errors depend on values, which differ between cells, so a cell's errors come
from its own recorded calls. Times depend on sizes, so times are pooled over all matching calls.
"""

from __future__ import annotations

import functools
import itertools
import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, replace
from typing import Any, NamedTuple

from replay.plan.call_matching import Counted, RowsByCall, match
from replay.plan.key_lengths import KeyLengths, index_of, ranges_of
from replay.plan.plan import DENOISE, METRICS, Budget, LayerChoice, PlanError, Worst
from replay.plan.step_ranges import StepRange
from replay.plan.ties import is_tie
from replay.rows.errors_of_output import Errors
from replay.rows.row import HERE, CallFacts, KernelId, Row, Status


class _PerCall(NamedTuple):
    """Time of a call of a census, pooled over the replayed calls that represent it."""

    before_ms: float
    """Time of the baseline."""
    saved_ms: float | None
    """Time that a kernel saves; None if it has no time although it supports a call."""


@dataclass(frozen=True)
class Cell:
    """Cell with the rows and calls that its choice depends on."""

    model: str
    weights: str
    module: str
    phase: str
    baseline: str
    kernels: list[str]
    """Names of all kernels, with the baseline first."""
    replayed: RowsByCall
    counted: list[Counted]
    captured: dict[str, CallFacts]
    """The cell's own recorded calls, by name."""
    kv_lens: KeyLengths | None = None
    """Range of key lengths; None for those of the counted calls."""
    steps: StepRange | None = None
    """Range of denoising steps; None for all steps."""
    pooled: dict[tuple[int, str], _PerCall] = field(default_factory=dict)
    """Times by the identity of `Counted.shares` and by kernel; the parts of a cell share them."""
    ties: dict[tuple[object, ...], bool] = field(default_factory=dict)
    """Answers of `is_undecided`; all cells share them, as most have the same pooled calls."""

    def row(self, call: str, kernel: str) -> Row | None:
        """Return a row; for the baseline, of the kernel that the model itself ran on the call."""
        if kernel == self.baseline:
            return self.replayed.own_row(call)
        return self.replayed.row(call, KernelId(kernel))

    @property
    def has_batches(self) -> bool:
        """True if an inference engine made the calls, with many key lengths in each."""
        return any(counted.kv_len < 0 for counted in self.counted)

    @functools.cached_property
    def has_window(self) -> bool | None:
        """True if the layer has a sliding window; None if its calls do not tell."""
        calls = self.captured or {name for counted in self.counted for name in counted.shares}
        found = {self.replayed.facts(name).has_window for name in calls}
        return found.pop() if len(found) == 1 else None

    @property
    def lengths(self) -> KeyLengths:
        """Range of key lengths of the counted calls, over all steps."""
        kv_lens = [counted.kv_len for counted in self.counted]
        return self.kv_lens or KeyLengths(min(kv_lens), max(kv_lens))

    def covers(self, module: str, phase: str, kv_len: int, step: int) -> bool:
        """Return True if a call of the module belongs to the cell."""
        return (
            (module, phase) == (self.module, self.phase)
            and self.lengths.low <= kv_len <= self.lengths.high
            and (self.steps is None or self.steps.first <= step <= self.steps.last)
        )


class Cost(NamedTuple):
    """Time and error of one kernel at one cell."""

    choice: LayerChoice
    """Choice of this kernel. Its time is the baseline's if the kernel does not support one of the
    cell's calls; it is None if the kernel failed or is wrong, or if no replayed call matches."""
    status: Status | None
    """Worst status on the cell's recorded calls; None if the cell has none."""
    overwrites: tuple[str, ...]
    """Inputs that the kernel changes although later calls read them; these rule the kernel out."""
    saved_ms: float | None
    """Time saved per run; negative if the kernel is slower, None if it failed or is wrong."""
    total_ms: float | None
    """Time of the cell's calls per run; None where the choice has no time."""
    energy: float
    """Sum of `error_energy` over the cell's calls per run; NaN if it is not known."""


def cells_of(rows: Iterable[Row], census: Mapping[str, Any], baseline: str) -> list[Cell]:
    """Return a cell for each module and phase of a census.

    Raises:
        PlanError: the rows come from several models, or the baseline has no rows.
        CensusError: the census is empty.
    """
    rows = [row for row in rows if row.kernel and row.environment == HERE]
    models = dict.fromkeys((row.call.model, row.call.weights) for row in rows)
    if len(models) > 1:
        names = ", ".join(f"{model} ({weights})" for model, weights in models)
        raise PlanError(f"a plan is for one model, but the rows are of {names}")
    replayed = RowsByCall(rows, baseline)
    timed = replayed.timed()
    if not timed:
        own = ", ".join(sorted({row.call.pinned or baseline for row in rows} or {baseline}))
        raise PlanError(
            f"a plan needs the time of the model's own attention, and {own} was not timed: add it "
            f"to --kernels if it is a kernel, or compare kernels in the model with `replay verify`"
        )
    ((model, weights),) = models
    captured: dict[tuple[str, str], dict[str, CallFacts]] = {}
    for row in rows:
        captured.setdefault((row.call.module, row.call.phase), {})[row.call.name] = row.call
    cells: dict[tuple[str, str], Cell] = {}
    ties: dict[tuple[object, ...], bool] = {}
    for counted in match(census, timed, own_first=False):
        site = (counted.module, counted.phase)
        if site not in cells:
            calls = captured.get(site, {})
            own = next((replayed.own(call) for call in (*calls, *counted.shares)), baseline)
            kernels = list(dict.fromkeys([own, *(row.kernel for row in rows)]))
            cells[site] = Cell(model, weights, *site, own, kernels, replayed, [], calls, ties=ties)
        cells[site].counted.append(counted)
    return list(cells.values())


def by_length(cell: Cell) -> list[Cell]:
    """Split a cell into one for each range of its recorded key lengths."""
    if cell.has_batches:
        return [cell]
    ranges = ranges_of(call.shape.kv_len for call in cell.captured.values())
    if len(ranges) < 2:
        return [cell]
    parts = [replace(cell, counted=[], captured={}) for _ in ranges]
    for counted in cell.counted:
        parts[index_of(counted.kv_len, ranges)].counted.append(counted)
    for name, call in cell.captured.items():
        parts[index_of(call.shape.kv_len, ranges)].captured[name] = call
    return [part for part in parts if part.counted]


def by_step(cell: Cell) -> list[Cell]:
    """Split a denoising cell into ranges of steps, each around one recorded step.

    A step that was not recorded belongs to the recorded step that is nearer, of two the earlier.
    """
    recorded = sorted({call.step for call in cell.captured.values()})
    if cell.phase != DENOISE or len(recorded) < 2:
        return [cell]
    first = min(recorded[0], *(counted.steps.first for counted in cell.counted))
    last = max(recorded[-1], *(counted.steps.last for counted in cell.counted))
    starts = [first, *((one + other) // 2 + 1 for one, other in itertools.pairwise(recorded))]
    ends = [*(start - 1 for start in starts[1:]), last]
    ranges = itertools.starmap(StepRange, zip(starts, ends, strict=True))
    parts = []
    for steps in ranges:
        counted = [_within(each, steps) for each in cell.counted]
        captured = {
            name: call
            for name, call in cell.captured.items()
            if steps.first <= call.step <= steps.last
        }
        part = replace(
            cell,
            counted=[each for each in counted if each.calls],
            captured=captured,
            kv_lens=None if cell.has_batches else cell.lengths,
            steps=steps,
        )
        parts.append(part)
    return [part for part in parts if part.counted]


def _within(counted: Counted, steps: StepRange) -> Counted:
    """Return the share of a row of the census in a range of steps, as if its calls were even."""
    first, last = counted.steps
    number = last - first + 1

    def calls_before(step: int) -> int:
        return round(counted.calls * min(max(step - first, 0), number) / number)

    calls = calls_before(steps.last + 1) - calls_before(steps.first)
    return replace(counted, calls=calls)


def cost_of(cell: Cell, kernel: str, budget: Budget) -> Cost:
    """Return the time and error of a kernel at a cell."""
    status = _status(cell, kernel)
    per_call = [(counted, _per_call(cell, counted, kernel)) for counted in cell.counted]
    calls = sum(counted.calls for counted in cell.counted if counted.shares)
    before_ms = math.fsum(counted.calls * each.before_ms for counted, each in per_call)
    saved = [
        None if each.saved_ms is None else counted.calls * each.saved_ms
        for counted, each in per_call
    ]
    has_failed = status not in ("ok", "unsupported", None) and kernel != cell.baseline
    saved_ms = None if has_failed or None in saved else math.fsum(filter(None, saved))
    if status == "unsupported":
        saved_ms = 0.0
    total_ms = before_ms - saved_ms if calls and saved_ms is not None else None
    rows = [row for call in cell.captured if (row := cell.row(call, kernel)) is not None]
    errors = [row.accuracy.reference for row in rows if row.accuracy is not None]
    worst = _worst(errors)
    choice = LayerChoice(
        module=cell.module,
        phase=cell.phase,
        kernel=kernel,
        covered=bool(cell.captured),
        inside=status == "ok" and worst is not None and budget.holds(worst.of(budget.metric)),
        worst=worst,
        time_ms=None if total_ms is None else total_ms / calls,
        baseline_ms=before_ms / calls if calls else None,
        saved_ms=saved_ms or 0.0,
        calls=sum(counted.calls for counted in cell.counted),
        captured=len(cell.captured),
        kv_lens=None if cell.has_batches else cell.lengths,
        baseline=cell.baseline,
        steps=cell.steps,
        has_window=cell.has_window,
    )
    overwrites = tuple(sorted({name for row in rows for name in row.overwrites}))
    energies = [error_energy(each) for each in errors]
    energy = choice.calls * math.fsum(energies) / len(energies) if energies else math.nan
    return Cost(choice, status, overwrites, saved_ms, total_ms, energy)


def error_energy(errors: Errors) -> float:
    """Return the mean squared error over the squared mean absolute value of the reference.

    Rows do not hold the norm of the reference, from which the squared relative L2 error would
    follow, but its mean absolute value follows from `mae` and `relative_l1`. Hence this figure is
    the squared relative L2 error times a factor of at least 1 (π/2 for normal values), which is
    the same for all kernels at a call.
    """
    if errors.mae == 0:
        return 0.0
    return errors.mse * (errors.relative_l1 / errors.mae) ** 2


def _per_call(cell: Cell, counted: Counted, kernel: str) -> _PerCall:
    """Return a call's time with the baseline, and the time saved on calls that the kernel ran.

    Calls that the kernel does not support save no time.
    """
    key = (id(counted.shares), kernel)
    if key not in cell.pooled:
        cell.pooled[key] = _pooled(cell, counted.shares, kernel)
    return cell.pooled[key]


def _pooled(cell: Cell, shares: Mapping[str, float], kernel: str) -> _PerCall:
    known = [
        (share, old, _ms(cell, call, kernel))
        for call, share in shares.items()
        if (old := _ms(cell, call, cell.baseline)) is not None
    ]
    before_ms = math.fsum(share * old for share, old, _ in known)
    gains = [(share, old - new) for share, old, new in known if new is not None]
    if gains:
        # Calls without a time are represented by the others.
        weight = math.fsum(share for share, _ in gains) / math.fsum(shares.values())
        return _PerCall(before_ms, math.fsum(share / weight * gain for share, gain in gains))
    rows = [cell.row(call, kernel) for call in shares]
    is_timeless = any(row is None or row.status != "unsupported" for row in rows)
    return _PerCall(before_ms, None if is_timeless else 0.0)


def _ms(cell: Cell, call: str, kernel: str) -> float | None:
    row = cell.row(call, kernel)
    return row.time_ms.p50 if row and row.time_ms and row.is_comparable else None


def _status(cell: Cell, kernel: str) -> Status | None:
    """Return the worst status on the cell's own calls (failed, inaccurate, then unsupported)."""
    if not cell.captured:
        return None
    found: list[Status] = []
    for call in cell.captured:
        row = cell.row(call, kernel)
        found.append("error" if row is None else row.status)
    mildness = {"ok": 3, "unsupported": 2, "inaccurate": 1}
    return min(found, key=lambda status: mildness.get(status, 0))


def _worst(errors: Iterable[Errors]) -> Worst | None:
    errors = list(errors)
    if not errors:
        return None
    worst = {}
    for metric in METRICS:
        figures = [float(getattr(each, metric)) for each in errors]
        worst[metric] = max(figures, key=Budget(metric, 0.0).badness)
    return Worst(**worst)


def decided_saving(cell: Cell, cost: Cost) -> float | None:
    """Return the time that a cost saves per run; 0 if the rounds show no relevant difference."""
    if not cost.saved_ms:
        return cost.saved_ms
    faster, slower = cost.choice.kernel, cell.baseline
    if cost.saved_ms < 0:
        faster, slower = slower, faster
    return 0.0 if is_undecided(cell, faster, slower) else cost.saved_ms


def is_undecided(cell: Cell, fastest: str, other: str) -> bool:
    """Return True if the rounds of the cell's calls show no relevant difference in speed."""
    calls = tuple(dict.fromkeys(call for counted in cell.counted for call in counted.shares))
    key = (calls, cell.baseline, fastest, other)
    if key not in cell.ties:
        cell.ties[key] = is_tie(
            [(cell.row(call, other), cell.row(call, fastest)) for call in calls]
        )
    return cell.ties[key]
