"""Makes plans: at every layer the fastest kernel whose error stays inside a budget.

A kernel's error at a layer is the *worst* over the recorded calls of that layer, against the
high-precision reference. Errors depend on values, and a layer's values are its own: one
of which no call was replayed keeps the baseline, marked as not covered, whatever its neighbours
chose. Record at least one call of every layer to cover them all.

Times depend on sizes, so they are taken over all layers whose calls are alike: many rounds decide,
and equal layers do not choose unequally by chance.

A kernel that changes in place what later calls read again (`Row.overwrites`), a language model's
key say, is not chosen there, however right the calls were, one at a time.

A plan runs in one process. So kernels that were replayed in other environments are not chosen, and
of those that must not share a process with one another only one.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from replay.plan.matching import Counted, Replayed, match
from replay.plan.plan import METRICS, Budget, Choice, Plan, PlanError, Worst
from replay.rows.row import HERE, KernelId, Row, Status
from replay.timing.statistics import Interval, paired_ratios, speed_verdict, speedup_of


@dataclass(frozen=True)
class LayerCost:
    """What one kernel would cost at one layer, in time and in error."""

    module: str
    phase: str
    kernel: str
    status: Status | None
    """`ok` when every recorded call of the layer is; else one that is not. None without any."""
    reason: str
    """Why it is not ok, or has no time."""
    captured: int
    """Recorded calls of the layer."""
    calls: int
    """Calls of the layer in one run."""
    worst: Worst | None
    """None where no output was compared."""
    inside: bool
    """Whether every recorded call is ok and inside the budget."""
    overwrites: tuple[str, ...]
    """Inputs that it changes and later calls read again, so that it is not chosen."""
    time_ms: float | None
    """Of one call, the mean over the run's calls that are known; the baseline's where the kernel
    does not support one of the layer's. None where it failed or is wrong, or no call is known."""
    baseline_ms: float | None
    """The same with the baseline."""
    saved_ms: float | None
    """In one run; negative where the kernel is slower, None where it failed or is wrong."""


def choose(
    rows: Iterable[Row],
    census: Mapping[str, Any],
    budget: Budget,
    baseline: str,
    exclusive: Collection[str] = (),
) -> Plan:
    """For every layer of a census, the fastest kernel inside the budget.

    A kernel that was not ok on one of a layer's calls is never chosen there. Of kernels whose speed
    ties with the fastest's, the baseline comes first and then the order of the rows. A layer with
    no kernel inside the budget keeps the baseline; the baseline itself has to be inside to win over
    a slower kernel.

    Args:
        rows: the replay of one recording and model; samples are needed, so rows as `replay` yields
            them or as read from JSON.
        census: of that model, as `capture.census.Census.to_json` writes it.
        baseline: the kernel that the model itself uses.
        exclusive: kernels of which a process can hold one (`Kernel.own_process`): the plan uses
            the one that saves most.

    Returns:
        The plan; its `left_out` has the kernels that would have been chosen if they did not spoil
        what later calls read, or if a process could hold them all.

    Raises:
        PlanError: rows of several models, or none of the baseline.
        CensusError: the census is empty.
    """
    layers = _layers(rows, census, baseline)
    costs = [[_layer_cost(layer, kernel, budget) for kernel in layer.kernels] for layer in layers]
    spoiling = _left_out([_best(*each) for each in zip(layers, costs, strict=True)])

    def plan(barred: Collection[str]) -> Plan:
        choices = [
            _choice(_best(layer, [own, *(cost for cost in others if _is_free(cost, barred))]))
            for layer, (own, *others) in zip(layers, costs, strict=True)
        ]
        return Plan(layers[0].model, layers[0].weights, budget, baseline, choices, spoiling)

    free = plan(())
    rivals = [kernel for kernel in free.kernels if kernel in exclusive]
    if len(rivals) < 2:
        return free
    plans = {kernel: plan(set(exclusive) - {kernel, baseline}) for kernel in rivals}
    kept = max(rivals, key=lambda kernel: plans[kernel].saved_ms)
    reason = f"{kept} saves more, and a process holds only one of them"
    others = {each: reason for each in rivals if each != kept}
    return replace(plans[kept], left_out=spoiling | others)


def layer_costs(
    rows: Iterable[Row], census: Mapping[str, Any], budget: Budget, baseline: str
) -> list[LayerCost]:
    """What every kernel would cost at every layer of a census, the baseline's first at each.

    Times are those of all counterparts (`replay.plan.matching`), in other layers too; errors are of
    the layer's own calls alone.

    Raises:
        PlanError: rows of several models, or none of the baseline.
        CensusError: the census is empty.
    """
    return [
        _layer_cost(layer, kernel, budget)
        for layer in _layers(rows, census, baseline)
        for kernel in layer.kernels
    ]


@dataclass(frozen=True)
class Uniform:
    """What one kernel would do when it is used at every layer. Layers are counted once each."""

    kernel: str
    saved_ms: float | None
    """In one run, predicted; None where the kernel failed, or is wrong, on a call."""
    inside: int
    outside: int
    """Wrong, or right and outside the budget."""
    falls_back: int
    """Not supported there: the model's own attention answers."""
    failed: int
    """Crashed, out of memory, not timed …"""
    not_captured: int
    """No call of the layer was replayed, so nothing is known of its error."""
    worst_module: str
    """The layer with the worst figure of the budget's metric; empty when nothing was compared."""
    worst_phase: str
    worst_figure: float | None
    reason: str
    """Of the first layer where it failed, is wrong, or falls back."""
    overwrites: int = 0
    """Inside, but not to be used, since later calls read again what it changes; not in `inside`."""


def uniform(
    rows: Iterable[Row], census: Mapping[str, Any], budget: Budget, baseline: str
) -> list[Uniform]:
    """Each kernel used everywhere, the baseline first.

    Raises:
        PlanError: rows of several models, or none of the baseline.
        CensusError: the census is empty.
    """
    kernels: dict[str, list[LayerCost]] = {}
    for cost in layer_costs(rows, census, budget, baseline):
        kernels.setdefault(cost.kernel, []).append(cost)
    return [_uniform(kernel, costs, budget) for kernel, costs in kernels.items()]


def _uniform(kernel: str, costs: Sequence[LayerCost], budget: Budget) -> Uniform:
    compared = [(cost, cost.worst.of(budget.metric)) for cost in costs if cost.worst is not None]
    worst, figure = max(compared, key=lambda each: budget.badness(each[1]), default=(None, None))
    saved = [cost.saved_ms for cost in costs]
    statuses = [cost.status for cost in costs]
    inside = sum(cost.inside and not cost.overwrites for cost in costs)
    overwrites = sum(cost.inside and bool(cost.overwrites) for cost in costs)
    judged = statuses.count("ok") + statuses.count("inaccurate")
    falls_back, not_captured = statuses.count("unsupported"), statuses.count(None)
    return Uniform(
        kernel=kernel,
        saved_ms=None if None in saved else sum(each for each in saved if each is not None),
        inside=inside,
        outside=judged - inside - overwrites,
        overwrites=overwrites,
        falls_back=falls_back,
        failed=len(costs) - judged - falls_back - not_captured,
        not_captured=not_captured,
        worst_module=worst.module if worst else "",
        worst_phase=worst.phase if worst else "",
        worst_figure=figure,
        reason=next((cost.reason for cost in costs if cost.reason), ""),
    )


@dataclass(frozen=True)
class _Layer:
    """A layer, and what was replayed for it."""

    model: str
    weights: str
    module: str
    phase: str
    baseline: str
    kernels: list[str]
    """The baseline first."""
    replayed: Replayed
    counted: list[Counted]
    captured: list[str]
    """Names of its own recorded calls."""

    def row(self, call: str, kernel: str) -> Row | None:
        return self.replayed.row(call, KernelId(kernel))


def _layers(rows: Iterable[Row], census: Mapping[str, Any], baseline: str) -> list[_Layer]:
    rows = [row for row in rows if row.kernel and row.environment == HERE]
    models = dict.fromkeys((row.call.model, row.call.weights) for row in rows)
    if len(models) > 1:
        names = ", ".join(f"{model} ({weights})" for model, weights in models)
        raise PlanError(f"a plan is for one model, and these rows are of {names}")
    replayed = Replayed(rows)
    if not replayed.timed(KernelId(baseline)):
        raise PlanError(f"no replayed call has a time of the baseline: add {baseline} to --kernels")
    ((model, weights),) = models
    kernels = list(dict.fromkeys([baseline, *(row.kernel for row in rows)]))
    captured: dict[tuple[str, str], dict[str, None]] = {}
    for row in rows:
        captured.setdefault((row.call.module, row.call.phase), {})[row.call.name] = None
    layers: dict[tuple[str, str], _Layer] = {}
    for counted in match(census, replayed.timed(KernelId(baseline)), own_first=False):
        site = (counted.module, counted.phase)
        if site not in layers:
            own = list(captured.get(site, ()))
            layers[site] = _Layer(model, weights, *site, baseline, kernels, replayed, [], own)
        layers[site].counted.append(counted)
    return list(layers.values())


def _layer_cost(layer: _Layer, kernel: str, budget: Budget) -> LayerCost:
    status, reason = _status(layer, kernel)
    worst = _worst(layer, kernel)
    calls, before_ms = _known(layer)
    saved_ms = 0.0 if status == "unsupported" else _saved_ms(layer, kernel)
    if status not in ("ok", "unsupported", None) and kernel != layer.baseline:
        saved_ms = None
    is_timed = calls > 0 and saved_ms is not None
    return LayerCost(
        module=layer.module,
        phase=layer.phase,
        kernel=kernel,
        status=status,
        reason=reason,
        captured=len(layer.captured),
        calls=sum(counted.calls for counted in layer.counted),
        worst=worst,
        inside=status == "ok" and worst is not None and budget.holds(worst.of(budget.metric)),
        overwrites=_overwrites(layer, kernel),
        time_ms=(before_ms - (saved_ms or 0.0)) / calls if is_timed else None,
        baseline_ms=before_ms / calls if calls else None,
        saved_ms=saved_ms,
    )


def _known(layer: _Layer) -> tuple[int, float]:
    """The calls of one run for which replayed ones stand, and what they take with the baseline."""
    known = [counted for counted in layer.counted if counted.shares]
    total = sum(
        counted.calls * share * ms
        for counted in known
        for call, share in counted.shares.items()
        if (ms := _ms(layer, call, layer.baseline)) is not None
    )
    return sum(counted.calls for counted in known), total


def _saved_ms(layer: _Layer, kernel: str) -> float | None:
    """In one run, from the calls on which the kernel ran; None where it ran on none that stand for
    some. That it was wrong or failed in another layer says nothing about this one."""
    saved = 0.0
    for counted in layer.counted:
        gains = [
            (share, old - new)
            for call, share in counted.shares.items()
            if (old := _ms(layer, call, layer.baseline)) is not None
            and (new := _ms(layer, call, kernel)) is not None
        ]
        if not gains:
            if any(not _falls_back(layer, call, kernel) for call in counted.shares):
                return None
            continue
        weight = sum(share for share, _ in gains)
        saved += sum(counted.calls * share / weight * gain for share, gain in gains)
    return saved


def _falls_back(layer: _Layer, call: str, kernel: str) -> bool:
    row = layer.row(call, kernel)
    return row is not None and row.status == "unsupported"


def _ms(layer: _Layer, call: str, kernel: str) -> float | None:
    row = layer.row(call, kernel)
    return None if row is None or row.time_ms is None else row.time_ms.p50


def _status(layer: _Layer, kernel: str) -> tuple[Status | None, str]:
    """On the layer's own calls: failures first, then wrong outputs, then refusals."""
    if not layer.captured:
        return None, ""
    found: list[tuple[Status, str]] = []
    for call in layer.captured:
        row = layer.row(call, kernel)
        if row is None:
            found.append(("error", f"not replayed on {call}"))
        elif row.status != "ok":
            found.append((row.status, row.reason))
    mildness = {"unsupported": 2, "inaccurate": 1}
    return min(found, key=lambda each: mildness.get(each[0], 0), default=("ok", ""))


def _overwrites(layer: _Layer, kernel: str) -> tuple[str, ...]:
    rows = [layer.row(call, kernel) for call in layer.captured]
    return tuple(sorted({name for row in rows if row is not None for name in row.overwrites}))


def _worst(layer: _Layer, kernel: str) -> Worst | None:
    rows = [layer.row(call, kernel) for call in layer.captured]
    found = [row.accuracy.reference for row in rows if row is not None and row.accuracy is not None]
    if not found:
        return None
    return Worst(
        **{
            metric: max(
                (float(getattr(errors, metric)) for errors in found),
                key=Budget(metric, 0.0).badness,
            )
            for metric in METRICS
        }
    )


def _best(layer: _Layer, costs: Sequence[LayerCost]) -> LayerCost:
    """Of the costs at a layer, the baseline's first."""
    timed = [cost for cost in costs if cost.inside and cost.time_ms is not None]
    if not timed:
        return costs[0]
    fastest = min(timed, key=lambda cost: cost.time_ms or 0.0)
    return next(
        cost for cost in timed if cost is fastest or _is_tie(layer, fastest.kernel, cost.kernel)
    )


def _is_free(cost: LayerCost, barred: Collection[str]) -> bool:
    return cost.kernel not in barred and not cost.overwrites


def _left_out(costs: Iterable[LayerCost]) -> dict[str, str]:
    """Why those of the fastest kernels that spoil something are not chosen."""
    phases: dict[tuple[str, tuple[str, ...]], dict[str, None]] = {}
    for cost in costs:
        if cost.overwrites:
            phases.setdefault((cost.kernel, cost.overwrites), {})[cost.phase] = None
    reasons: dict[str, list[str]] = {}
    for (kernel, names), where in phases.items():
        changes = f"changes {' and '.join(names)} in place, which later calls read again"
        reasons.setdefault(kernel, []).append(f"in {' and '.join(where)} it {changes}")
    return {kernel: "; ".join(each) for kernel, each in reasons.items()}


def _choice(cost: LayerCost) -> Choice:
    return Choice(
        module=cost.module,
        phase=cost.phase,
        kernel=cost.kernel,
        covered=cost.captured > 0,
        inside=cost.inside,
        worst=cost.worst,
        time_ms=cost.time_ms,
        baseline_ms=cost.baseline_ms,
        saved_ms=cost.saved_ms or 0.0,
        calls=cost.calls,
        captured=cost.captured,
    )


def _is_tie(layer: _Layer, fastest: str, other: str) -> bool:
    """Whether the rounds of the calls that stand for a layer's show no difference that matters."""
    paired: list[list[float]] = []
    apart: list[bool] = []
    for call in dict.fromkeys(call for counted in layer.counted for call in counted.shares):
        old, new = layer.row(call, other), layer.row(call, fastest)
        if old is None or new is None or old.time_ms is None or new.time_ms is None:
            continue
        if not old.shares_rounds(new):
            apart.append(_is_faster(new, old))
            continue
        paired.append(paired_ratios(old.time_ms.samples, new.time_ms.samples))
    if not all(apart):
        return True
    return speedup_of(*paired).is_tie if paired else not apart


def _is_faster(one: Row, other: Row) -> bool:
    """Of rows of two processes, whose rounds are not paired: by their intervals over a baseline."""
    mine, others = _interval(one), _interval(other)
    if mine is None or others is None:
        return False
    verdict, _ = speed_verdict(mine.low / others.high, mine.high / others.low)
    return verdict == "fast"


def _interval(row: Row) -> Interval | None:
    """Of its speed-up; the baseline has none over itself."""
    if row.speedup is None:
        return Interval(1.0, 1.0)
    if row.speedup.low is None or row.speedup.high is None:
        return None
    return Interval(row.speedup.low, row.speedup.high)
