"""Runs kernels on calls: check every one, time those that ran, a row each."""

from __future__ import annotations

import contextlib
import io
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
from safetensors.torch import save_file
from torch import Tensor

from capture.call import AttentionCall
from capture.dataset import dtype_name
from capture.errors import DatasetError
from replay import cost, reference
from replay.accuracy import Errors, Tolerance, compare, judge, summary, tolerance
from replay.machine import describe
from replay.registry import Kernel, catalogue
from replay.results import Accuracy, CallFacts, Comparison, Row, Status
from replay.statistics import MINIMUM_PAIRS, paired_speedup, summarize
from replay.timing import Cache, first_call, measure, peak_bytes
from replay.workloads import Workload

DEFAULT_BASELINE = "torch-default"


@dataclass(frozen=True)
class Settings:
    """How a replay runs."""

    device: torch.device
    cache: Cache
    rounds: int = 30
    max_seconds: float = 20.0
    """Time for the samples of one kernel on one call; a slow kernel gets fewer rounds."""
    seed: int = 0
    baseline: str | None = None
    """Kernel the speed-ups are against; None is the backend the model used."""
    reference: str = "gold"
    """`gold`, `captured` or a kernel: an output to compare with beside the first two."""
    compare_stats: bool = False
    save_output: Path | None = None


@dataclass
class Attempt:
    """A kernel on its way to a row."""

    kernel: Kernel
    run: Callable[[], Tensor]
    row: Row


def replay(
    workloads: Sequence[Workload],
    kernels: Sequence[Kernel],
    settings: Settings,
    on_progress: Callable[[Workload, str], None] | None = None,
) -> Iterator[Row]:
    """Rows of every kernel on every call, in order; a call that cannot be read is one error row.

    Kernels never share a result: each output is checked against the gold before anything is timed,
    and all kernels of a call are timed together, in shuffled rounds.
    """
    report = on_progress or (lambda workload, stage: None)
    machine = describe(settings.device)
    for workload in workloads:
        report(workload, "loading")
        try:
            call = workload.load(settings.device)
        except DatasetError as error:
            yield Row("", CallFacts(workload.name), "error", str(error), machine=machine)
            continue
        with torch.inference_mode():
            rows = _replay_call(workload, call, kernels, settings, report)
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
    baseline = _baseline(call, settings)
    everyone = {kernel.name: kernel for kernel in (*kernels, *_extra(baseline, settings))}
    judged = _Judge.of(call, settings, everyone, lambda: report(workload, "reference"))
    attempts = []
    for kernel in everyone.values():
        report(workload, kernel.name)
        attempts.append(_attempt(workload, call, kernel, judged, settings))
    report(workload, "timing")
    _time(call, attempts, baseline, settings)
    return [attempt.row for attempt in attempts]


def _baseline(call: AttentionCall, settings: Settings) -> str:
    """The kernel to compare with; PyTorch's default where the model's own cannot run here."""
    if settings.baseline is not None:
        return settings.baseline
    kernel = catalogue().get(call.origin.backend)
    if kernel is None or kernel.unavailable(settings.device) or kernel.unsupported(call):
        return DEFAULT_BASELINE
    return kernel.name


def _extra(baseline: str, settings: Settings) -> Iterator[Kernel]:
    """Kernels that must run although they were not asked for."""
    kernels = catalogue()
    yield kernels[baseline]
    if settings.reference not in ("gold", "captured"):
        yield kernels[settings.reference]


@dataclass(frozen=True)
class _Judge:
    """What outputs of one call are held against."""

    gold: Tensor
    tolerance: Tolerance
    captured: Tensor | None
    reference: Tensor | None
    noise_floor: Errors | None
    pristine: dict[str, Tensor]

    @classmethod
    def of(
        cls,
        call: AttentionCall,
        settings: Settings,
        kernels: dict[str, Kernel],
        report: Callable[[], None],
    ) -> _Judge:
        report()
        gold = reference.attention(call, reference.gold_dtype(settings.device, call.dtype))
        named = kernels.get(settings.reference)
        output = None
        if named is not None and not (named.unavailable(call.device) or named.unsupported(call)):
            with contextlib.suppress(Exception):  # its own row tells what went wrong
                output = named.attention(**call.arguments()).clone()
        return cls(
            gold,
            tolerance(call, reference.same_dtype(call), gold),
            call.output,
            output,
            None if call.output is None else compare(call.output, gold),
            {name: getattr(call, name).clone() for name in ("query", "key", "value")},
        )


def _attempt(
    workload: Workload, call: AttentionCall, kernel: Kernel, judged: _Judge, settings: Settings
) -> Attempt:
    """Run a kernel once and judge its output."""
    # A closure over this call's arguments: what a model would execute at this place.
    arguments = call.arguments()
    row = Row(kernel.name, _facts(workload, call), "ok")
    attempt = Attempt(kernel, lambda: kernel.attention(**arguments), row)
    attempt.row.flop_per_byte = cost.arithmetic_intensity(call)
    reason = kernel.unavailable(settings.device)
    if reason:
        return _settle(attempt, "unavailable", reason)
    reason = kernel.unsupported(call)
    if reason:
        return _settle(attempt, "unsupported", reason)
    try:
        _poison(judged.gold, call.dtype)
        # Compilers report their search on stderr; it belongs to nobody's table.
        with contextlib.redirect_stderr(io.StringIO()):
            output, attempt.row.first_call_ms = first_call(attempt.run, settings.device)
        _restore_inputs(call, judged.pristine, attempt.row)
        wrong = _wrong_output(output, judged.gold, call)
        if wrong:
            return _settle(attempt, "error", wrong)
        output = output.clone()  # the next call may reuse its memory (CUDA graphs)
        _judge_output(attempt, output, judged, settings)
        attempt.row.peak_bytes = peak_bytes(attempt.run, settings.device)
        if settings.save_output is not None:
            _save(output, settings.save_output / workload.name / f"{kernel.name}.safetensors")
    except Exception as error:
        return _settle(attempt, *_classify(error))
    return attempt


def _judge_output(attempt: Attempt, output: Tensor, judged: _Judge, settings: Settings) -> None:
    errors = compare(output, judged.gold)
    attempt.row.accuracy = Accuracy(
        gold=errors,
        captured=None if judged.captured is None else compare(output, judged.captured),
        reference=None if judged.reference is None else compare(output, judged.reference),
        noise_floor=judged.noise_floor,
    )
    if settings.compare_stats:
        against = {"gold": judged.gold, "captured": judged.captured}.get(
            settings.reference, judged.reference
        )
        attempt.row.output_summary = summary(output)
        attempt.row.reference_summary = None if against is None else summary(against)
    verdict = judge(errors, attempt.kernel.accuracy_class, judged.tolerance)
    _settle(attempt, "ok" if verdict.passed else "inaccurate", verdict.sentence)


def _time(call: AttentionCall, attempts: list[Attempt], baseline: str, settings: Settings) -> None:
    """Fill in the times of the kernels that ran; the incorrect are timed, never compared."""
    running = {each.kernel.name: each for each in attempts if each.row.first_call_ms is not None}
    running = {name: each for name, each in running.items() if each.row.accuracy is not None}
    contestants: dict[str, Callable[[], object]] = {
        name: each.run for name, each in running.items()
    }
    for name, each in running.items():
        if each.kernel.prepare is not None:
            contestants[f"{name} core"] = each.kernel.prepare(call)
    with contextlib.redirect_stderr(io.StringIO()):
        measured = measure(
            contestants,
            settings.device,
            cache=settings.cache,
            rounds=settings.rounds,
            seed=settings.seed,
            max_seconds=settings.max_seconds,
        )
    baseline_ms: tuple[float, ...] = ()
    if baseline in running and running[baseline].row.is_correct:
        baseline_ms = measured[baseline].ms
    for name, each in running.items():
        samples, row = measured[name], each.row
        row.gpu_before, row.gpu_after = samples.gpu_before, samples.gpu_after
        if samples.error is not None:
            _settle(each, *_classify(samples.error))
            continue
        row.time_ms, row.host_ms = summarize(samples.ms), samples.host_ms
        row.tflops = cost.tflops(call, row.time_ms.p50)
        row.gb_per_s = cost.gb_per_s(call, row.time_ms.p50)
        core = measured.get(f"{name} core")
        if core is not None and core.error is None:
            row.core_time_ms = summarize(core.ms)
        pairs = min(len(baseline_ms), len(samples.ms))
        if row.is_correct and name != baseline and pairs >= MINIMUM_PAIRS:
            ratio = paired_speedup(baseline_ms, samples.ms, settings.seed)
            row.comparison = Comparison(baseline, ratio)


def _settle(attempt: Attempt, status: Status, reason: str) -> Attempt:
    attempt.row.status, attempt.row.reason = status, reason
    return attempt


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


def _classify(error: Exception) -> tuple[Status, str]:
    text = str(error).strip().partition("\n")[0] or type(error).__name__
    out_of_memory = isinstance(error, torch.OutOfMemoryError | MemoryError)
    if out_of_memory or "not enough memory" in text or "can't allocate memory" in text:
        return "out-of-memory", text
    return "error", f"{type(error).__name__}: {text}"


def _poison(like: Tensor, dtype: torch.dtype) -> None:
    """Leave NaN in the memory an output will probably get, so that an unwritten one is seen."""
    torch.full(like.shape, float("nan"), dtype=dtype, device=like.device)


def _restore_inputs(call: AttentionCall, pristine: dict[str, Tensor], row: Row) -> None:
    """Flag a kernel that changed its inputs, and undo the change."""
    for name, before in pristine.items():
        now = getattr(call, name)
        unchanged = torch.equal(now, before)
        if not unchanged and not bool(((now == before) | (now.isnan() & before.isnan())).all()):
            row.flags.append(f"changes its {name}")
            now.copy_(before)


def _wrong_output(output: object, gold: Tensor, call: AttentionCall) -> str:
    if not isinstance(output, Tensor):
        return f"returned {type(output).__name__}, not a tensor"
    if output.shape != gold.shape:
        return f"returned shape {tuple(output.shape)} where {tuple(gold.shape)} is right"
    if output.dtype != call.dtype:
        return f"returned {dtype_name(output.dtype)} where {dtype_name(call.dtype)} is right"
    return ""


def _save(output: Tensor, path: Path) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    save_file({"output": output.to("cpu").contiguous()}, path)
