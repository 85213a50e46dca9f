"""Maker of plans: for every layer, the fastest kernel within an error budget.

Errors depend on values, which differ between layers, so a layer's errors come from its own calls.
Times depend on sizes, so times are pooled over all layers with matching calls. A layer whose
recorded calls differ in their key lengths has a choice for each range of lengths; neighbouring
ranges with the same kernel become one.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import groupby
from operator import attrgetter
from typing import Any, NamedTuple

from replay.plan.call_matching import Counted, RowsByCall, match
from replay.plan.key_lengths import KeyLengths, index_of, ranges_of
from replay.plan.plan import METRICS, Budget, LayerChoice, Plan, PlanError, Worst
from replay.plan.plan_device import measured_on
from replay.rows.row import HERE, KernelId, Row, Status
from replay.timing.statistics import MedianInterval, speed_verdict, speedup_between


class _Cost(NamedTuple):
    """Time and error of one kernel at one layer."""

    choice: LayerChoice
    """Choice of this kernel. Its time is the baseline's if the kernel does not support one of the
    layer's calls; it is None if the kernel failed or is wrong, or if no replayed call matches."""
    status: Status | None
    """Worst status on the layer's recorded calls; None if the layer has none."""
    reason: str
    """Reason why the status is not `ok`, or why there is no time."""
    overwrites: tuple[str, ...]
    """Inputs that the kernel changes although later calls read them; these rule the kernel out."""
    saved_ms: float | None
    """Time saved per run; negative if the kernel is slower, None if it failed or is wrong."""


def choose(
    rows: Iterable[Row],
    census: Mapping[str, Any],
    budget: Budget,
    baseline: str,
    exclusive: Collection[str] = (),
) -> Plan:
    """Choose, for every layer of a census, the fastest kernel within the budget.

    The baseline of a layer is the kernel that the model itself ran there, if it was timed. A
    kernel's error at a layer is its worst error over the layer's calls. A kernel that was not ok
    on a call, or that overwrites inputs of later calls (`Row.overwrites`), is never chosen for that
    layer. If kernels tie with the fastest, the baseline is preferred, then the first in the rows. A
    layer without replayed calls, or with no kernel within the budget, keeps the baseline. At other
    layers, the baseline is chosen only if it is within the budget. A plan runs in one process, so
    kernels replayed in other environments are not chosen.

    Args:
        rows: rows from a replay of one model's recording, with their samples.
        census: census of the model, in the form of `capture.hooks.census.Census.to_json`.
        baseline: the kernel of plain SDPA, which the model itself uses where it did not choose
            another (`CallFacts.pinned`).
        exclusive: kernels that cannot share a process (`Kernel.own_process`). The plan uses only
            the one that saves most.

    Returns:
        The plan. Its `left_out` names the kernels that were not chosen only because they overwrite
        inputs of later calls, or because they cannot share a process.

    Raises:
        PlanError: the rows come from several models or types of GPU, or the baseline has no rows.
        CensusError: the census is empty.
    """
    rows = list(rows)
    layers, device = _layers(rows, census, baseline), _device(rows)
    parts = [part for layer in layers for part in _parts(layer)]
    costs = [[_cost(part, kernel, budget) for kernel in part.kernels] for part in parts]
    left_out = _left_out([_best(*each) for each in zip(parts, costs, strict=True)])

    def plan(excluded: Collection[str]) -> Plan:
        best = []
        for part, (own, *others) in zip(parts, costs, strict=True):
            allowed = [
                cost
                for cost in others
                if cost.choice.kernel not in excluded and not cost.overwrites
            ]
            best.append((part, _best(part, [own, *allowed]).choice))
        choices = list(_joined(best, budget))
        return Plan(layers[0].model, layers[0].weights, budget, baseline, choices, left_out, device)

    # Exclusive kernels matter only if the best plan uses several of them.
    unrestricted = plan(())
    conflicting = [kernel for kernel in unrestricted.kernels if kernel in exclusive]
    if len(conflicting) < 2:
        return unrestricted
    plans = {kernel: plan(set(exclusive) - {kernel, baseline}) for kernel in conflicting}
    chosen = max(conflicting, key=lambda kernel: plans[kernel].saved_ms)
    reason = f"{chosen} saves more, and the two cannot share a process"
    others = {each: reason for each in conflicting if each != chosen}
    return replace(plans[chosen], left_out=left_out | others)


@dataclass(frozen=True)
class Uniform:
    """Results of using one kernel at every layer; all counts are numbers of layers."""

    kernel: str
    saved_ms: float | None
    """Predicted time saved per run; None if the kernel failed or is wrong on a call."""
    inside: int
    outside: int
    """Layers where the kernel is wrong or outside the budget."""
    falls_back: int
    """Layers where the kernel is not supported, so that the model's own attention runs."""
    failed: int
    """Layers where the kernel failed, such as by a crash or for lack of memory."""
    not_captured: int
    """Layers without a replayed call, where the kernel's error is unknown."""
    worst_module: str
    """Layer with the worst value of the budget's metric; empty if no output was compared."""
    worst_phase: str
    worst_figure: float | None
    reason: str
    """Reason from the first layer where the kernel failed, is wrong or falls back."""
    overwrites: int = 0
    """Number of layers that fit the budget but are excluded from `inside`, because later calls read
    inputs that the kernel changes."""


def uniform(
    rows: Iterable[Row], census: Mapping[str, Any], budget: Budget, baseline: str
) -> list[Uniform]:
    """Evaluate the use of each kernel at every layer, with the baseline first.

    Kernels that are unavailable at every layer are left out.

    Raises:
        PlanError: the rows come from several models, or the baseline has no rows.
        CensusError: the census is empty.
    """
    kernels: dict[str, list[_Cost]] = {}
    for layer in _layers(rows, census, baseline):
        for kernel in layer.kernels:
            kernels.setdefault(kernel, []).append(_cost(layer, kernel, budget))
    return [
        _uniform(kernel, costs, budget)
        for kernel, costs in kernels.items()
        if {cost.status for cost in costs} - {None} != {"unavailable"}
    ]


def _uniform(kernel: str, costs: Sequence[_Cost], budget: Budget) -> Uniform:
    choices = [cost.choice for cost in costs]
    compared = [(each, each.worst.of(budget.metric)) for each in choices if each.worst is not None]
    worst, figure = max(compared, key=lambda each: budget.badness(each[1]), default=(None, None))
    saved = [cost.saved_ms for cost in costs]
    statuses = [cost.status for cost in costs]
    inside = sum(cost.choice.inside and not cost.overwrites for cost in costs)
    overwrites = sum(cost.choice.inside and bool(cost.overwrites) for cost in costs)
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
    """Layer with the rows and calls that its choice depends on."""

    model: str
    weights: str
    module: str
    phase: str
    baseline: str
    kernels: list[str]
    """Names of all kernels, with the baseline first."""
    replayed: RowsByCall
    counted: list[Counted]
    captured: dict[str, int]
    """Key lengths of the layer's own recorded calls, by name."""

    def row(self, call: str, kernel: str) -> Row | None:
        """Return a row; for the baseline, of the kernel that the model itself ran on the call."""
        if kernel == self.baseline:
            return self.replayed.own_row(call)
        return self.replayed.row(call, KernelId(kernel))


def _layers(rows: Iterable[Row], census: Mapping[str, Any], baseline: str) -> list[_Layer]:
    rows = [row for row in rows if row.kernel and row.environment == HERE]
    models = dict.fromkeys((row.call.model, row.call.weights) for row in rows)
    if len(models) > 1:
        names = ", ".join(f"{model} ({weights})" for model, weights in models)
        raise PlanError(f"a plan is for one model, but the rows are of {names}")
    replayed = RowsByCall(rows, baseline)
    timed = replayed.timed()
    if not timed:
        raise PlanError(f"no replayed call has a baseline time: add {baseline} to --kernels")
    ((model, weights),) = models
    captured: dict[tuple[str, str], dict[str, int]] = {}
    for row in rows:
        calls = captured.setdefault((row.call.module, row.call.phase), {})
        calls[row.call.name] = row.call.shape.kv_len
    layers: dict[tuple[str, str], _Layer] = {}
    for counted in match(census, timed, own_first=False):
        site = (counted.module, counted.phase)
        if site not in layers:
            calls = captured.get(site, {})
            own = next((replayed.own(call) for call in (*calls, *counted.shares)), baseline)
            kernels = list(dict.fromkeys([own, *(row.kernel for row in rows)]))
            layers[site] = _Layer(model, weights, *site, own, kernels, replayed, [], calls)
        layers[site].counted.append(counted)
    return list(layers.values())


def _parts(layer: _Layer) -> list[_Layer]:
    """Split a layer into one part for each range of its recorded key lengths."""
    ranges = ranges_of(layer.captured.values())
    if len(ranges) < 2:
        return [layer]
    parts = [replace(layer, counted=[], captured={}) for _ in ranges]
    for counted in layer.counted:
        parts[index_of(counted.kv_len, ranges)].counted.append(counted)
    for call, kv_len in layer.captured.items():
        parts[index_of(kv_len, ranges)].captured[call] = kv_len
    return [part for part in parts if part.counted]


def _joined(choices: Sequence[tuple[_Layer, LayerChoice]], budget: Budget) -> Iterator[LayerChoice]:
    """Join neighbouring parts of a layer that have the same kernel."""
    alike = attrgetter("module", "phase", "kernel", "inside")
    for (_, _, kernel, _), group in groupby(choices, key=lambda each: alike(each[1])):
        parts, found = zip(*group, strict=True)
        if len(parts) == 1:
            yield found[0]
            continue
        counted = [counted for part in parts for counted in part.counted]
        captured = {call: kv_len for part in parts for call, kv_len in part.captured.items()}
        yield _cost(replace(parts[0], counted=counted, captured=captured), kernel, budget).choice


def _device(rows: Iterable[Row]) -> str:
    """Return the type of device that the rows were measured on."""
    timed = (measured_on(row.machine) for row in rows if row.time_ms is not None)
    devices = sorted({device for device in timed if device})
    if len(devices) > 1:
        raise PlanError(
            f"a plan is for one type of GPU, but the rows were measured on {', '.join(devices)}: "
            "make one from the rows of each"
        )
    return devices[0] if devices else ""


def _cost(layer: _Layer, kernel: str, budget: Budget) -> _Cost:
    status, reason = _status(layer, kernel)
    worst = _worst(layer, kernel)
    calls, before_ms = _known(layer)
    kv_lens = [counted.kv_len for counted in layer.counted]
    saved_ms = 0.0 if status == "unsupported" else _saved_ms(layer, kernel)
    if status not in ("ok", "unsupported", None) and kernel != layer.baseline:
        saved_ms = None
    is_timed = calls > 0 and saved_ms is not None
    choice = LayerChoice(
        module=layer.module,
        phase=layer.phase,
        kernel=kernel,
        covered=bool(layer.captured),
        inside=status == "ok" and worst is not None and budget.holds(worst.of(budget.metric)),
        worst=worst,
        time_ms=(before_ms - (saved_ms or 0.0)) / calls if is_timed else None,
        baseline_ms=before_ms / calls if calls else None,
        saved_ms=saved_ms or 0.0,
        calls=sum(counted.calls for counted in layer.counted),
        captured=len(layer.captured),
        kv_lens=KeyLengths(min(kv_lens), max(kv_lens)),
        baseline=layer.baseline,
    )
    rows = filter(None, (layer.row(call, kernel) for call in layer.captured))
    overwrites = tuple(sorted({name for row in rows for name in row.overwrites}))
    return _Cost(choice, status, reason, overwrites, saved_ms)


def _known(layer: _Layer) -> tuple[int, float]:
    """Return the number of calls per run that match replayed calls, and their baseline time."""
    known = [counted for counted in layer.counted if counted.shares]
    total = sum(
        counted.calls * share * ms
        for counted in known
        for call, share in counted.shares.items()
        if (ms := _ms(layer, call, layer.baseline)) is not None
    )
    return sum(counted.calls for counted in known), total


def _saved_ms(layer: _Layer, kernel: str) -> float | None:
    """Return the time saved per run, computed from the calls on which the kernel ran.

    Return None if the kernel has no time for a row of the census although it supports a matching
    call. Calls that the kernel does not support save no time.
    """
    saved = 0.0
    for counted in layer.counted:
        gains = [
            (share, old - new)
            for call, share in counted.shares.items()
            if (old := _ms(layer, call, layer.baseline)) is not None
            and (new := _ms(layer, call, kernel)) is not None
        ]
        if not gains:
            rows = [layer.row(call, kernel) for call in counted.shares]
            if any(row is None or row.status != "unsupported" for row in rows):
                return None
            continue
        weight = sum(share for share, _ in gains)
        saved += sum(counted.calls * share / weight * gain for share, gain in gains)
    return saved


def _ms(layer: _Layer, call: str, kernel: str) -> float | None:
    row = layer.row(call, kernel)
    return row.time_ms.p50 if row and row.time_ms and row.is_comparable else None


def _status(layer: _Layer, kernel: str) -> tuple[Status | None, str]:
    """Return the worst status on the layer's own calls (failed, inaccurate, then unsupported)."""
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


def _worst(layer: _Layer, kernel: str) -> Worst | None:
    rows = [layer.row(call, kernel) for call in layer.captured]
    found = [row.accuracy.reference for row in rows if row is not None and row.accuracy is not None]
    if not found:
        return None
    worst = {}
    for metric in METRICS:
        figures = [float(getattr(errors, metric)) for errors in found]
        worst[metric] = max(figures, key=Budget(metric, 0.0).badness)
    return Worst(**worst)


def _best(layer: _Layer, costs: Sequence[_Cost]) -> _Cost:
    """Choose from the kernels' costs at a layer, which start with the baseline's cost."""
    timed = [cost for cost in costs if cost.choice.inside and cost.choice.time_ms is not None]
    if not timed:
        return costs[0]
    fastest = min(timed, key=lambda cost: cost.choice.time_ms or 0.0)
    return next(
        cost
        for cost in timed
        if cost is fastest or _is_undecided(layer, fastest.choice.kernel, cost.choice.kernel)
    )


def _left_out(costs: Iterable[_Cost]) -> dict[str, str]:
    """Return why kernels that are the fastest but overwrite inputs are not chosen."""
    phases: dict[tuple[str, tuple[str, ...]], dict[str, None]] = {}
    for cost in costs:
        if cost.overwrites:
            choice = cost.choice
            phases.setdefault((choice.kernel, cost.overwrites), {})[choice.phase] = None
    reasons: dict[str, list[str]] = {}
    for (kernel, names), where in phases.items():
        changes = f"changes {' and '.join(names)} in place, which later calls read again"
        reasons.setdefault(kernel, []).append(f"in {' and '.join(where)} it {changes}")
    return {kernel: "; ".join(each) for kernel, each in reasons.items()}


def _is_undecided(layer: _Layer, fastest: str, other: str) -> bool:
    """Return True if the rounds of the layer's calls show no relevant difference in speed."""
    paired = []
    unpaired: list[bool] = []
    for call in dict.fromkeys(call for counted in layer.counted for call in counted.shares):
        old, new = layer.row(call, other), layer.row(call, fastest)
        if old is None or new is None or old.time_ms is None or new.time_ms is None:
            continue
        if not old.shares_rounds(new):
            unpaired.append(_is_faster(new, old))
            continue
        paired.append((old.time_ms, new.time_ms))
    # A single call without a clear difference is enough for a tie.
    if not all(unpaired):
        return True
    return not speedup_between(*paired).differs if paired else not unpaired


def _is_faster(one: Row, other: Row) -> bool:
    """Compare, by speed-up over the baseline, rows of two processes, whose rounds are unpaired."""
    mine, others = _interval(one), _interval(other)
    if mine is None or others is None:
        return False
    verdict, _ = speed_verdict(mine.low / others.high, mine.high / others.low)
    return verdict == "fast"


def _interval(row: Row) -> MedianInterval | None:
    """Return the interval of a row's speed-up, which is exactly 1 for the baseline's own row."""
    if row.speedup is None:
        return MedianInterval(1.0, 1.0)
    if row.speedup.low is None or row.speedup.high is None:
        return None
    return MedianInterval(row.speedup.low, row.speedup.high)
