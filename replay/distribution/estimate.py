"""The expected duration of a replay, before it starts and while it runs."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch

from capture.call.shape import Shape
from replay.bench.settings import Settings
from replay.distribution.pace import KernelWork
from replay.kernels.registry import Kernel
from replay.rows.row import KernelId
from replay.timing.defaults import MINIMUM_ROUNDS
from replay.timing.machine import cpu_flops_per_second
from replay.timing.rounds import MAXIMUM_WARM_UP_MS, MINIMUM_WARM_UP_MS
from replay.workloads.sources import CallMetadata
from replay.workloads.workload import Workload

RUNS_BESIDE_SAMPLES = 15
"""Number of runs of a kernel on a call for checks and warm-up, in addition to the samples."""
REFERENCE_RUNS = 5
"""Cost of the reference, in multiples of a kernel's operations at the reference's rate."""

WITH_BACKWARD = 8
"""Forward passes that take as long as a forward, a backward and both: a backward takes 2.5, and its
sample needs a forward of its own."""


@dataclass(frozen=True)
class Rates:
    """Rough rates of a device, to be corrected by the times of finished calls."""

    flops: float
    """Floating-point operations per second of a kernel."""
    reference_flops: float
    """Floating-point operations per second of the reference, in float64."""
    sample_seconds: float
    """Overhead of each sample, in seconds."""
    kernel_seconds: float
    """Overhead of each kernel on a call, in seconds."""

    @classmethod
    def of(cls, device: torch.device) -> Rates:
        if device.type == "cuda":
            return cls(3e14, 1e14, 5e-4, 0.3)
        measured = cpu_flops_per_second()
        # Default kernels reach half the rate of matrix products; float64 products are half as fast.
        return cls(measured / 2, measured / 2, 1e-4, 0.3)


def expected_seconds(
    calls: Sequence[Workload],
    assigned: Mapping[str, Sequence[Kernel]],
    settings: Settings,
    rates: Rates,
) -> dict[str, float]:
    """Estimate each call's seconds with all kernels and without compilation, keyed by label.

    A call of unknown size counts as the mean of the other calls.
    """
    kernels = sum(map(len, assigned.values()))
    metadata = {call.label: call.source.metadata() for call in calls}
    found = {
        name: call_seconds(flops(facts), kernels, settings, rates)
        for name, facts in metadata.items()
        if facts.shape is not None
    }
    mean = sum(found.values()) / len(found) if found else 1.0
    return {name: found.get(name, mean) for name in metadata}


def kernel_work(calls: Sequence[Workload], assigned: Mapping[str, Sequence[Kernel]]) -> KernelWork:
    """Return the kernels that run on each call, and the form of each call."""
    kernels = [KernelId(each.name, name) for name, own in assigned.items() for each in own]
    forms = {call.label: (call.on, call.source.metadata().form) for call in calls}
    return KernelWork([*map(str, kernels)], forms)


def flops(metadata: CallMetadata) -> float:
    """Return the number of operations of a call, with `is_causal` as the only mask."""
    shape = metadata.shape or Shape(0, 0, 0, 0, 0, 0, 0)
    pairs = shape.batch * shape.q_heads * shape.q_len * shape.kv_len
    return 2 * pairs * (shape.head_dim + shape.v_head_dim) / (2 if metadata.is_causal else 1)


def call_seconds(flops: float, kernels: int, settings: Settings, rates: Rates) -> float:
    """Estimate the seconds of a call from its operations and the number of kernels."""
    flops *= WITH_BACKWARD if settings.backward else 1
    run = flops / rates.flops + 1e-5
    sample = run * (1 + settings.calls_before) + rates.sample_seconds
    rounds = min(settings.rounds, max(settings.max_seconds / sample, MINIMUM_ROUNDS))
    warm_up = min(max(MINIMUM_WARM_UP_MS / 1e3, 3 * run), MAXIMUM_WARM_UP_MS / 1e3)
    beside = RUNS_BESIDE_SAMPLES * run + warm_up + rates.kernel_seconds
    reference = REFERENCE_RUNS * flops / rates.reference_flops + rates.kernel_seconds
    return reference + kernels * (rounds * sample + beside)


def together(seconds: Sequence[float], at_a_time: int) -> float:
    """Return the total duration of calls, in seconds, if `at_a_time` calls run concurrently."""
    return max(sum(seconds) / at_a_time, max(seconds, default=0.0))
