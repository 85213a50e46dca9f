"""Predict a model's time with another kernel from the replay and the census.

    T_new = T_swapped − Σ count · (t_old − t_new) + Σ count · (lost_new − lost_old)

T_swapped is the model's time with its own kernel swapped in like any other kernel, so that it
includes the cost of swapping: T_old, the time with the model's own attention, times the median
ratio of adjacent runs. count comes from the census, and t_old and t_new are the median drop-in
times of baseline and kernel on the replayed calls that represent the counted ones
(`replay.plan.call_matching`). A call that the kernel does not support falls back to the model's own
attention and costs t_old. A call that no replayed call represents also costs t_old, and is
reported.

A call loses time on a CPU, where the model's other work empties the caches and a repeated call
finds them full. With the pace c, the time of the model's own kernel, swapped in, / its time in the
replay, lost_old = (c − 1) · t_old and lost_new = (c − 1) · min(t_new, 4 · t_old): a longer call
loses more, but a very long one fills the caches itself. Kernels differ, so the interval covers
lost_new from a quarter to 1.75 times of this. With unrecorded calls c is unknown, and taken as 1.
On a GPU, the replay empties the cache.

On a GPU, t_old and t_new are times of its own work, `busy` is the work of a forward, and the host
enqueues it in the time `host`, which includes the cost of swapping. The forward takes the longer of
both, as in a roofline of two resources (Williams et al. 2009), which holds for layers that are
alike. The rest of T_swapped stays the same:

    T_new = T_swapped − max(busy_old, host_old) + max(busy_new, host_new)
    busy_new = busy_old − Σ count · (t_old − t_new)
    host_new = host_old + Σ count · (layer_new − layer_old)

`layer` is the host's time to launch the call and the following kernels of its layer
(`layer_host_ms` of the rows). A kernel that is slow to launch can therefore make a model wait for
the host that did not wait before.

A run that trains has the same formula, in which t is the time of forward and backward together; a
call that a checkpoint repeats in the backward pass costs another forward. Backward passes are not
timed in the model: they lose as much time on a CPU as forward passes, and launches on a GPU are
left out.

The interval (95 %, percentile bootstrap) covers the scatter of its inputs: the rounds of the
replay, resampled for each replayed call, with the same rounds for both kernels if they were timed
together; and the rounds of T_old. A replayed call that represents many counted calls shifts their
times together. Calls that no replayed call represents take the rest u of the attention that was
timed in the model; the interval is wide enough for u · r instead of u, for r = 1 and every ratio
r = t_new / t_old of the kernel's replayed calls. The interval does not cover effects that the
replay cannot measure: layers whose cost differs from that of the layer replayed in their place, and
differences between replay and model (caches, clocks, launches that do or do not overlap with other
work). A measurement outside the interval means that one of these effects matters; `Clues` helps to
identify that effect.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from capture.hooks.phases import RECOMPUTE
from replay.end_to_end.cost_model import CallTotals, CostModel, Figure, resampled
from replay.end_to_end.predicted_times import RUN, Clocked, Estimate, Missing, PredictedTime
from replay.plan.call_matching import Counted, RowsByCall, match
from replay.plan.plan import DENOISE
from replay.plan.step_ranges import MOST_STEPS
from replay.rows.row import KernelId, Row
from replay.timing.statistics import percentile

NO_BACKWARD = "the rows have no times of backward passes: verify again with --backward"
"""Reason why a run that trains is not predicted."""

Chosen = Sequence[tuple[Counted, KernelId]]
Parts = dict[Figure, Chosen]
"""Calls by the figure that is their time."""

KernelAt = Callable[[str, str, int, int], KernelId]
"""Function from module, phase, key length and step to the kernel used there."""


@dataclass(frozen=True)
class Prediction:
    """Predicted times of a model with a kernel."""

    run: PredictedTime
    phases: dict[str, PredictedTime]
    """Times of the measured phases."""


def everywhere(kernel: KernelId) -> KernelAt:
    """Use the same kernel at every module."""
    return lambda module, phase, kv_len, step: kernel


def _divided(counted: Counted, kernel_at: KernelAt) -> Iterator[tuple[Counted, KernelId]]:
    """Divide calls among the kernels of their steps, with an equal number of calls at each step."""
    # Steps count only while denoising; other phases may have as many forward passes as tokens.
    first, last = counted.steps if counted.phase == DENOISE else (0, 0)
    steps = range(first, min(last, first + MOST_STEPS) + 1)
    numbers = Counter(
        kernel_at(counted.module, counted.phase, counted.kv_len, step) for step in steps
    )
    passed = 0
    for kernel, number in numbers.items():
        before, passed = passed, passed + number
        calls = counted.calls * passed // len(steps) - counted.calls * before // len(steps)
        yield replace(counted, calls=calls), kernel


def predict(
    census: Mapping[str, Any],
    rows: Iterable[Row],
    kernel_at: KernelAt,
    plain: str,
    run: Clocked,
    phases: Mapping[str, Clocked],
    *,
    stand_ins: bool = False,
    trains: bool = False,
    seed: int = 0,
) -> Prediction:
    """Predict the model's time with a kernel, for each phase and for the full run.

    A phase and the run have no prediction if the kernel was wrong at one of the phase's modules, or
    if it failed or was not timed on a replayed call that represents one of the phase's calls.

    Args:
        census: census of one run, as `capture.hooks.census.Census.to_json` writes it.
        rows: rows of a replay of the same recording and model. A kernel of another environment is
            compared with the baseline in that environment, if the replay includes it.
        kernel_at: the kernel of each module, phase, key length and step (`everywhere` for the
            same kernel at all modules).
        plain: the kernel of plain SDPA, which stands for the model's own attention where the model
            did not choose a kernel itself (`CallFacts.pinned`).
        run: one full run with the model's own attention.
        phases: one forward of each measured phase with the model's own attention.
        stand_ins: True if the baseline may stand for an engine's own function, because `run` and
            `phases` have `stand_in_seconds` (`replay.plan.call_matching.RowsByCall`).
        trains: True if the run has a backward pass for each call.

    Raises:
        CensusError: the census is empty.
        ValueError: the model's own attention has no time on one of the calls that the model made
            with a kernel of its choice, or on all calls; or a phase has no times.
    """
    replayed = RowsByCall(rows, plain, stand_ins=stand_ins)
    if unknown := replayed.unknown_own:
        raise ValueError(unknown)
    calls = replayed.timed()
    if not calls:
        raise ValueError(f"{plain} was timed on none of the replayed calls")
    chosen = [part for each in match(census, calls) for part in _divided(each, kernel_at)]
    by_phase = {phase: [each for each in chosen if each[0].phase == phase] for phase in phases}
    cost_model = CostModel(replayed, seed, phases)
    cost_model = replace(cost_model, pace=_pace(by_phase, cost_model))
    predicted = {
        phase: _span(phase, phases[phase], {"time_ms": of_phase}, cost_model)
        for phase, of_phase in by_phase.items()
    }
    parts: Parts = {"time_ms": chosen}
    if trains:
        cost_model = replace(cost_model, phases={})
        parts = {"both_ms": [each for each in chosen if each[0].phase != RECOMPUTE]}
        parts["time_ms"] = [each for each in chosen if each[0].phase == RECOMPUTE]
    return Prediction(_span(RUN, run, parts, cost_model), predicted)


def _pace(by_phase: Mapping[str, Chosen], cost_model: CostModel) -> dict[str, float]:
    """Return the pace of each phase on a CPU whose calls are all represented (`CostModel.pace`)."""
    pace = {}
    for phase, chosen in by_phase.items():
        clocked, tally = cost_model.phases[phase], CallTotals(chosen, cost_model)
        replayed = cost_model.attention_seconds(tally.represented) / clocked.forwards
        on_cpu = clocked.busy_seconds is None
        if on_cpu and clocked.attention_seconds and replayed and not tally.not_recorded:
            pace[phase] = clocked.attention_seconds / replayed
    return pace


def _span(phase: str, clocked: Clocked, parts: Parts, cost_model: CostModel) -> PredictedTime:
    tally = CallTotals([each for calls in parts.values() for each in calls], cost_model)
    tallies = [(CallTotals(calls, cost_model), figure) for figure, calls in parts.items()]
    forwards, reason = clocked.forwards, tally.reason
    if any(
        getattr(cost_model.replayed.own_row(call), figure) is None
        for each, figure in tallies
        for call in each.represented
    ):
        reason, tallies = NO_BACKWARD, [(tally, "time_ms")]
    old_median = percentile(clocked.seconds, 50)
    old_resampled = resampled(clocked.seconds, f"{cost_model.seed} {phase}")
    old = _interval(old_median, old_resampled, old_resampled)
    swapped_median, swapped_resampled = old_median, old_resampled
    if clocked.swap_ratios:
        swapped_median *= percentile(clocked.swap_ratios, 50)
        name = f"{cost_model.seed} {phase} swapped"
        swapped_resampled = old_resampled * resampled(clocked.swap_ratios, name)
    attention = sum(cost_model.attention_seconds(t.represented, f) for t, f in tallies) / forwards
    of_forward = cost_model.attention_seconds(tally.represented) / forwards
    longer = attention / of_forward if of_forward else 1.0
    saved = swapped = new = speedup = None
    # One unusable row makes the whole span unpredictable, because no other row times its calls.
    if not reason:
        saved = sum(cost_model.saved_seconds(t.swapped, f)[0] for t, f in tallies) / forwards
        swapped = sum(cost_model.swapped_seconds(t.swapped, f) for t, f in tallies) / forwards
        gains = [cost_model.gained_seconds(t.swapped, f) for t, f in tallies]
        gained, gained_resampled = (sum(each) for each in zip(*gains, strict=True))
        # Calls that no kernel handles have the model's own attention, not its stand-in.
        handled = swapped / attention if attention else 1.0
        own_seconds = clocked.stand_in_seconds * longer * (1 - handled)
        new_median = swapped_median - own_seconds - gained / forwards
        new_resampled = swapped_resampled - own_seconds - gained_resampled / forwards
        if min(new_median, float(new_resampled.min())) > 0:
            ratios = [1.0, *cost_model.ratios(tally.kernels_not_recorded)]
            unknown = max((clocked.attention_seconds or 0.0) * longer - attention, 0.0)
            # The model gains at most as much as its fastest call.
            fastest = torch.maximum(
                new_resampled - unknown * (1 - min(ratios)), new_resampled * min(ratios)
            )
            slowest = new_resampled + unknown * (max(ratios) - 1)
            new = _interval(new_median, fastest, slowest)
            ratios_resampled = (old_resampled / slowest, old_resampled / fastest)
            speedup = _interval(old_median / new_median, *ratios_resampled)
        else:
            # The replay is slower than the model, for example because of colder caches.
            reason = "the predicted saving exceeds the model's time"
    return PredictedTime(
        phase=phase,
        forwards=forwards,
        old_seconds=old,
        new_seconds=new,
        speedup=speedup,
        attention_seconds=attention,
        attention_share=attention / old_median,
        waiting_share=cost_model.waiting_seconds(phase) / forwards / old_median,
        saved_seconds=saved,
        swapped_seconds=swapped,
        swap_seconds=swapped_median - old_median,
        calls=tally.calls,
        fallbacks=dict(tally.fallbacks),
        fallback_seconds={
            reason: cost_model.attention_seconds(calls) / forwards
            for reason, calls in tally.refused.items()
        },
        not_recorded=[Missing(*site, calls) for site, calls in tally.not_recorded.items()],
        clues=cost_model.clues(tally.swapped, forwards),
        reason=reason,
    )


def _interval(value: float, lower: Tensor, upper: Tensor) -> Estimate:
    return Estimate(value, percentile(lower.tolist(), 2.5), percentile(upper.tolist(), 97.5))
