"""Checks of the clock: measured times are compared with known times."""

from __future__ import annotations

import statistics
from collections.abc import Callable, Mapping

import torch

from replay.rows.row import Speedup
from replay.selftest import work
from replay.selftest.result import Result
from replay.timing.rounds import measure
from replay.timing.statistics import paired_speedup
from replay.timing.timer import Function

BLOCKS = 3
ROUNDS = 30
SECONDS = 1.0
"""Maximum seconds for each function in a block."""

RESOLUTION = {"cpu": 0.10, "cuda": 0.03}
RATIO_ERROR = {"cpu": 0.05, "cuda": 0.02}
DELAY_MS = {"cpu": 2.0, "cuda": 0.5}
DELAY_ERROR = {"cpu": 0.05, "cuda": 0.03}
LONGEST_NOTHING_MS = 0.01
PROFILER_ERROR = 0.02
SPREAD = {"cpu": 0.10, "cuda": 0.03}
"""Maximum accepted relative error, by type of device."""

BUSY = "something else uses this machine: end it, or measure at a quieter time"
CLOCKS = "lock the clocks (nvidia-smi -lgc on a GPU, the performance governor on a processor)"


def samples_of(
    functions: Mapping[str, Function], device: torch.device, seed: int = 0
) -> dict[str, tuple[float, ...]]:
    """Return milliseconds by round, measured as in a replay.

    Raises:
        RuntimeError: one of the functions failed.
    """
    found = measure(
        functions,
        device,
        cache="cold" if device.type == "cuda" else "warm",
        rounds=ROUNDS,
        seed=seed,
        max_seconds=SECONDS,
    )
    for name, samples in found.items():
        if samples.error is not None:
            raise RuntimeError(f"{name} failed") from samples.error
    return {name: samples.ms for name, samples in found.items()}


def same_kernel(device: torch.device) -> tuple[Result, Result, float]:
    """Measure one kernel under two names in several blocks.

    Returns:
        The check that both names tie, the check that the blocks agree, and the share by which two
        kernels must differ to be distinguished.
    """
    run = work.attention(work.SHAPES[device.type], device)
    found: list[Speedup] = []
    medians: list[float] = []
    for block in range(BLOCKS):
        ms = samples_of({"one": run, "other": run}, device, seed=block)
        found.append(paired_speedup(ms["one"], ms["other"]))
        medians.append(statistics.median(ms["one"] + ms["other"]))
    apart = sum(not each.holds(1) for each in found)
    low = min(each.low for each in found if each.low is not None)
    high = max(each.high for each in found if each.high is not None)
    # Differences within the widest interval of equal kernels cannot be detected.
    resolution = max(1 - low, high - 1)
    spread = (max(medians) - min(medians)) / statistics.median(medians)
    return (
        Result(
            "same kernel",
            # A 95 % interval is occasionally wrong.
            apart <= BLOCKS // 2 and resolution <= RESOLUTION[device.type],
            f"told apart in {apart} of {BLOCKS} blocks; intervals {low:.3f}× to {high:.3f}×, "
            f"{RESOLUTION[device.type]:.0%} allowed",
            BUSY,
            {"told_apart": apart, "blocks": BLOCKS, "low": low, "high": high},
        ),
        Result(
            "run to run",
            spread <= SPREAD[device.type],
            f"medians of {BLOCKS} blocks differ by {spread:.1%}, {SPREAD[device.type]:.0%} allowed",
            f"{BUSY}; {CLOCKS}",
            {"spread": spread, "medians_ms": medians},
        ),
        resolution,
    )


def known_ratio(device: torch.device) -> Result:
    """Check that twice the work takes twice the time."""
    spec = work.SHAPES[device.type]
    functions = {"once": work.attention(spec, device), "twice": work.twice(spec, device)}
    ms = samples_of(functions, device)
    found = paired_speedup(ms["twice"], ms["once"])
    error = abs(found.ratio / 2 - 1)
    return Result(
        "known ratio",
        error <= RATIO_ERROR[device.type] or found.holds(2),
        f"twice the work takes {found.ratio:.3f}× ({found.low:.3f}-{found.high:.3f})",
        f"{BUSY}; {CLOCKS}",
        {"ratio": found.ratio, "low": found.low or 0.0, "high": found.high or 0.0},
    )


def known_delay(device: torch.device) -> Result:
    """Check that a delay planted in a kernel is measured."""
    planted = DELAY_MS[device.type]
    run = work.attention(work.SMALL[device.type], device)
    wait = work.delay(device)(planted)

    def delayed() -> None:
        run()
        wait()

    ms = samples_of({"plain": run, "delayed": delayed}, device)
    pairs = zip(ms["delayed"], ms["plain"], strict=False)
    added = statistics.median(late - early for late, early in pairs)
    error = added / planted - 1
    return Result(
        "known delay",
        abs(error) <= DELAY_ERROR[device.type],
        f"of {planted:g} ms planted, {added:.4f} ms found: {error:+.1%}",
        f"{BUSY}; {CLOCKS}",
        {"planted_ms": planted, "found_ms": added},
    )


def nothing(device: torch.device) -> Result:
    """Check that an empty function takes only the timer's own time."""
    took = statistics.median(samples_of({"nothing": lambda: None}, device)["nothing"])
    return Result(
        "empty kernel",
        took <= LONGEST_NOTHING_MS,
        f"an empty function takes {took * 1000:.2f} µs, {LONGEST_NOTHING_MS * 1000:g} allowed",
        "a profiler or debugger is attached: run without it",
        {"ms": took},
    )


def profiler(device: torch.device) -> Result:
    """Compare a call's time by events with the profiler's times for the call's kernels."""
    run = work.attention(work.SHAPES[device.type], device)
    ours = statistics.median(samples_of({"run": run}, device)["run"])
    kernels = {name: len(times) for name, times in _kernel_times(run).items()}
    times = _kernel_times(lambda: samples_of({"run": run}, device))
    if not kernels or not kernels.keys() <= times.keys():
        return Result("profiler", None, "the profiler saw no kernel: not compared")
    # The first calls are a warm-up.
    theirs = sum(
        count * statistics.median(times[name][-count * ROUNDS :]) for name, count in kernels.items()
    )
    error = ours / theirs - 1
    return Result(
        "profiler",
        abs(error) <= PROFILER_ERROR,
        f"events {ours:.4f} ms, profiler {theirs:.4f} ms: {error:+.1%}",
        f"{BUSY}; {CLOCKS}",
        {"events_ms": ours, "profiler_ms": theirs},
    )


def _kernel_times(run: Callable[[], object]) -> dict[str, list[float]]:
    """Return the milliseconds of each GPU kernel during `run`, by name and in order."""
    activities = [torch.profiler.ProfilerActivity.CPU, torch.profiler.ProfilerActivity.CUDA]
    with torch.profiler.profile(activities=activities) as profile:
        run()
        torch.cuda.synchronize()
    times: dict[str, list[float]] = {}
    for event in profile.events() or ():
        if event.device_type.name == "CUDA":
            times.setdefault(event.name, []).append(event.time_range.elapsed_us() / 1000)
    return times
