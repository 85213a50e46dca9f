"""Runs kernels on calls: check every one, time those that ran, a row each."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator, Sequence

import torch
from torch import Tensor

from capture.call import AttentionCall
from capture.dataset import dtype_name
from capture.errors import DatasetError
from replay.bench.check import (
    REFERENCE,
    Attempt,
    ContextLost,
    Judge,
    check,
    check_again,
    classify,
    core_fault,
    refusal,
    set_status,
    stderr_apart,
)
from replay.bench.settings import Settings
from replay.kernels.library import is_interpreted
from replay.kernels.registry import Kernel, catalogue, find
from replay.rows.row import CallFacts, Comparison, Row
from replay.timing import flops
from replay.timing.gpu_state import gpu_is_lost
from replay.timing.machine import describe
from replay.timing.rounds import measure
from replay.timing.statistics import MINIMUM_PAIRS, paired_speedup, summarize
from replay.workloads.recorded import Workload

DEFAULT_BASELINE = "torch-default"

LOADING = "loading the call"
TIMING = "preparing to time"
STAGES = (LOADING, REFERENCE, TIMING)
"""What progress reports while no kernel is at work; otherwise they are the kernel's name."""


def replay(
    workloads: Sequence[Workload],
    kernels: Sequence[Kernel],
    settings: Settings,
    on_progress: Callable[[Workload, str], None] | None = None,
    on_loaded: Callable[[CallFacts], None] | None = None,
) -> Iterator[Row]:
    """Rows of every kernel on every call, in order; a call that cannot be read is one error row.

    Everything runs in this process: a kernel that crashes takes it along
    (`replay.workers.environments.replay_in_workers` is the same with workers).

    Kernels never share a result: each output is checked against the gold before anything is timed,
    all kernels of a call are timed together, in shuffled rounds, and what they return then is
    checked again.

    Raises:
        ContextLost: a kernel made the GPU unusable for this process.
    """
    report = on_progress or (lambda workload, stage: None)
    machine = describe(settings.device)
    for workload in workloads:
        report(workload, LOADING)
        rows: list[Row]
        try:
            call = workload.load(settings.device)
            if on_loaded is not None:
                on_loaded(_facts(workload, call))
            with torch.no_grad():  # as models run: inference mode would make launches cheaper
                rows = _replay_call(workload, call, kernels, settings, report)
        except DatasetError as error:
            rows = [Row("", CallFacts(workload.name), "error", str(error))]
        except (RuntimeError, MemoryError) as error:
            if gpu_is_lost(settings.device):
                raise ContextLost(classify(error)[1]) from error
            status, reason = classify(error)
            if status != "out-of-memory":
                raise
            rows = [Row("", CallFacts(workload.name), status, f"{workload.name}: {reason}")]
        for row in rows:
            row.machine = machine
            yield row


def _replay_call(
    workload: Workload,
    call: AttentionCall,
    kernels: Sequence[Kernel],
    settings: Settings,
    report: Callable[[Workload, str], None],
) -> list[Row]:
    baseline = _baseline(call, settings, lambda name: report(workload, name))
    everyone = {kernel.name: kernel for kernel in (*kernels, *_extra(baseline, settings))}
    judged = Judge.of(call, settings, everyone, lambda stage: report(workload, stage))
    attempts = []
    facts = _facts(workload, call)
    for kernel in everyone.values():
        alive = functools.partial(report, workload, kernel.name)
        alive()
        attempts.append(check(facts, call, kernel, judged, settings, alive))
    report(workload, TIMING)
    timed = [attempt for attempt in attempts if not _is_only_checked(attempt)]
    _time(call, timed, judged, baseline, settings, lambda name: report(workload, name))
    return [attempt.row for attempt in attempts]


def _baseline(call: AttentionCall, settings: Settings, report: Callable[[str], None]) -> str:
    """The kernel to compare with; PyTorch's default where the model's own cannot run here."""
    if settings.baseline is not None:
        return settings.baseline
    kernel = catalogue().get(call.origin.backend)
    if kernel is None or kernel.name in settings.excluded:
        return DEFAULT_BASELINE
    report(kernel.name)
    return DEFAULT_BASELINE if refusal(kernel, call, settings.device) else kernel.name


def _extra(baseline: str, settings: Settings) -> Iterator[Kernel]:
    """Kernels that must run although they were not asked for."""
    for name in (baseline, settings.reference):
        if name not in ("gold", "captured", *settings.excluded):
            yield find(name)


def _is_only_checked(attempt: Attempt) -> bool:
    """Whether Triton's interpreter ran the kernel; then its row gets no time of any kind."""
    if attempt.kernel.library != "triton" or not is_interpreted():
        return False
    row = attempt.row
    row.first_call_ms = None
    if row.status == "ok":
        set_status(attempt, "not-timed", f"Triton's interpreter ran it; {row.reason}")
    return True


def _time(
    call: AttentionCall,
    attempts: list[Attempt],
    judged: Judge,
    baseline: str,
    settings: Settings,
    on_sample: Callable[[str], None],
) -> None:
    """Fill in the times of the kernels that ran; the incorrect are timed, never compared."""
    running = {
        each.kernel.name: each for each in attempts if each.row.status in ("ok", "inaccurate")
    }
    candidates: dict[str, Callable[[], Tensor]] = {name: each.run for name, each in running.items()}
    for name, each in running.items():
        if each.kernel.prepare is not None:
            on_sample(name)
            try:
                candidates[f"{name} core"] = each.kernel.prepare(each.call)
            except Exception as error:
                each.row.flags.append(f"no core time: {classify(error)[1]}")
    with stderr_apart(settings):
        measured = measure(
            candidates,
            settings.device,
            cache=settings.cache,
            rounds=settings.rounds,
            calls_before=settings.calls_before,
            seed=settings.seed,
            max_seconds=settings.max_seconds,
            on_sample=lambda name: on_sample(name.removesuffix(" core")),
            synchronous=settings.synchronous,
        )
    for name, each in running.items():
        if each.row.is_correct and measured[name].error is None:
            on_sample(name)
            check_again(each, judged)
    baseline_ms: tuple[float, ...] = ()
    if baseline in running and running[baseline].row.is_correct:
        baseline_ms = measured[baseline].ms
    for name, each in running.items():
        samples, row = measured[name], each.row
        row.gpu_before, row.gpu_during = samples.gpu_before, samples.gpu_during
        if samples.error is not None:
            set_status(each, *classify(samples.error))
        if each.row.status not in ("ok", "inaccurate"):
            continue
        row.time_ms = summarize(samples.ms)
        row.cache, row.calls_before = settings.cache, settings.calls_before
        row.host_ms = samples.host_ms
        if samples.layer_host_ms:
            row.layer_host_ms = summarize(samples.layer_host_ms)
        row.tflops = flops.tflops(call, row.time_ms.p50)
        row.gb_per_s = flops.gb_per_s(call, row.time_ms.p50)
        if (core := measured.get(f"{name} core")) is not None:
            on_sample(name)
            fault = classify(core.error)[1] if core.error is not None else ""
            if not fault and row.is_correct:
                fault = core_fault(each, candidates[f"{name} core"], judged)
            if fault:
                row.flags.append(f"no core time: {fault}")
            else:
                row.core_time_ms = summarize(core.ms)
        pairs = min(len(baseline_ms), len(samples.ms))
        if row.is_correct and name != baseline and pairs >= MINIMUM_PAIRS:
            ratio = paired_speedup(baseline_ms, samples.ms, settings.seed)
            row.comparison = Comparison(baseline, ratio)


def _facts(workload: Workload, call: AttentionCall) -> CallFacts:
    origin, mask = call.origin, call.attn_mask
    described = ""
    if mask is not None:
        kind = "bool" if mask.dtype == torch.bool else "float"
        described = f"{kind} {'×'.join(map(str, mask.shape))}"
    return CallFacts(
        name=workload.name,
        model=origin.model,
        weights=origin.weights,
        module=origin.module,
        phase=origin.phase,
        step=origin.step,
        call_index=origin.call_index,
        shape=call.shape,
        dtype=dtype_name(call.dtype),
        is_causal=call.is_causal,
        mask=described,
    )
