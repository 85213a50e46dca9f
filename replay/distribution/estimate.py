"""The expected duration of a replay, before it starts and while it runs."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch

from capture.call.shape import Shape
from replay.bench.confirmation import MOST_BLOCKS
from replay.bench.settings import Settings
from replay.distribution.pace import KernelWork
from replay.isolation.block import BLOCK_MS, LEAST_CALLS
from replay.kernels.registry import Kernel
from replay.rows.row import DEFAULT_BASELINE, KernelId
from replay.timing.cores import usable_cpus
from replay.timing.defaults import MINIMUM_ROUNDS
from replay.timing.machine import cpu_flops_per_second
from replay.timing.rounds import MAXIMUM_WARM_UP_MS, MINIMUM_WARM_UP_MS
from replay.workloads.sources import CallMetadata
from replay.workloads.workload import Workload

RUNS_BESIDE_SAMPLES = 15
"""Number of runs of a kernel on a call for checks and warm-up, in addition to the samples."""
REFERENCE_RUNS = 5
"""Cost of the reference, in multiples of a kernel's operations at the reference's rate."""

WITH_BACKWARD = 3.5
"""Forward passes that take as long as a forward and a backward, which follow each other in both
samples of a backward."""
RUNS_OF_BACKWARD = 3
"""Number of backward passes that check a kernel's gradients."""


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
    is_busy: bool = False
    """True if other programs use all processors, so that samples are repeated to the time limit."""

    @classmethod
    def of(cls, device: torch.device) -> Rates:
        if device.type == "cuda":
            return cls(3e14, 1e14, 5e-4, 0.3)
        measured = cpu_flops_per_second()
        # Default kernels reach half the rate of matrix products; float64 products are half as fast.
        is_busy = os.getloadavg()[0] >= usable_cpus()
        return cls(measured / 2, measured / 2, 1e-4, 0.3, is_busy)


def expected_seconds(
    calls: Sequence[Workload],
    assigned: Mapping[str, Sequence[Kernel]],
    settings: Settings,
    rates: Rates,
) -> dict[str, float]:
    """Estimate each call's seconds with all kernels and without compilation, keyed by label.

    A call of unknown size counts as the mean of the other calls.
    """
    kernels = [kernel for own in assigned.values() for kernel in own]
    baseline = settings.baseline or DEFAULT_BASELINE
    is_added = baseline not in (kernel.name for kernel in kernels)
    own = sum(bool(kernel.source) for kernel in kernels)
    metadata = {call.label: call.source.metadata() for call in calls}
    found = {
        name: call_seconds(flops(facts), len(kernels) + is_added, settings, rates, own)
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


def call_seconds(
    flops: float, kernels: int, settings: Settings, rates: Rates, own: int = 0
) -> float:
    """Estimate the seconds of a call from its operations and the number of kernels.

    Args:
        kernels: number of kernels, with the baseline.
        own: number of kernels in processes of their own. Each times a known kernel too, and is
            confirmed by blocks beside the baseline's, in which other work takes as long as calls.
    """
    forward = flops / rates.flops + 1e-5
    runs = [forward, *[WITH_BACKWARD * forward] * 2 * settings.backward]

    def timed(run: float) -> float:
        sample = run * (1 + settings.calls_before) + rates.sample_seconds
        rounds = min(settings.rounds, max(settings.max_seconds / sample, MINIMUM_ROUNDS))
        warm_up = min(max(MINIMUM_WARM_UP_MS / 1e3, 3 * run), MAXIMUM_WARM_UP_MS / 1e3)
        return max(rounds * sample, settings.max_seconds * rates.is_busy) + warm_up

    passes = RUNS_BESIDE_SAMPLES + RUNS_OF_BACKWARD * WITH_BACKWARD * settings.backward
    of_kernel = sum(map(timed, runs)) + passes * forward + rates.kernel_seconds
    block = max(BLOCK_MS / 1e3, LEAST_CALLS * forward)
    of_process = timed(forward) + 4 * MOST_BLOCKS * block
    reference = REFERENCE_RUNS * (1 + WITH_BACKWARD * settings.backward)
    judging = reference * flops / rates.reference_flops + rates.kernel_seconds
    return judging + kernels * of_kernel + own * of_process


def together(seconds: Sequence[float], at_a_time: int) -> float:
    """Return the total duration of calls, in seconds, if `at_a_time` calls run concurrently."""
    return max(sum(seconds) / at_a_time, max(seconds, default=0.0))
