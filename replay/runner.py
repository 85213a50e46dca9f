"""Runs kernels on calls: check every one, time those that ran, a row each."""

from __future__ import annotations

import contextlib
import io
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from torch import Tensor

from capture.call import AttentionCall
from capture.dataset import dtype_name
from capture.errors import DatasetError
from capture.strides import narrow_expanded
from replay import cost, reference
from replay.accuracy import Errors, compare, summary
from replay.machine import describe
from replay.registry import Kernel, catalogue, find
from replay.results import Accuracy, CallFacts, Comparison, Row, Status
from replay.statistics import MINIMUM_PAIRS, paired_speedup, summarize
from replay.timing import Cache, first_call, measure, peak_bytes
from replay.verdict import Tolerance, judge, tolerance
from replay.workloads import Workload

DEFAULT_BASELINE = "torch-default"

POISON = float("nan")
POISONED_BLOCKS = 4
"""Pieces of memory filled with NaN before a kernel runs: one for its output and some for the
contiguous or quantised copies of inputs that it may take first."""


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
    careful: bool = False
    """Wait for every sample before the next, so that what kills the process is known by name."""
    never: tuple[str, ...] = ()
    """Kernels that must not run, not even as the baseline."""

    def to_json(self) -> dict[str, Any]:
        """Plain JSON for a worker."""
        save_output = None if self.save_output is None else str(self.save_output.resolve())
        return {**vars(self), "device": str(self.device), "save_output": save_output}

    @classmethod
    def from_json(cls, data: dict[str, Any]) -> Settings:
        save_output = data["save_output"]
        return cls(
            **{
                **data,
                "device": torch.device(data["device"]),
                "save_output": None if save_output is None else Path(save_output),
                "never": tuple(data["never"]),
            }
        )


class ContextLost(Exception):
    """A kernel left the GPU unusable for this process; the message is what CUDA said."""


@dataclass
class Attempt:
    """A kernel on its way to a row."""

    kernel: Kernel
    call: AttentionCall
    """What it runs on: its own copy once it was seen to change its inputs."""
    row: Row

    @property
    def run(self) -> Callable[[], Tensor]:
        """What a model would execute at this place, and nothing besides."""
        attention, arguments = self.kernel.attention, self.call.arguments()
        return lambda: attention(**arguments)


def replay(
    workloads: Sequence[Workload],
    kernels: Sequence[Kernel],
    settings: Settings,
    on_progress: Callable[[Workload, str], None] | None = None,
    on_loaded: Callable[[CallFacts], None] | None = None,
) -> Iterator[Row]:
    """Rows of every kernel on every call, in order; a call that cannot be read is one error row.

    Everything runs in this process: a kernel that crashes takes it along
    (`replay.environments.replay_in_workers` is the same with workers).

    Kernels never share a result: each output is checked against the gold before anything is timed,
    all kernels of a call are timed together, in shuffled rounds, and what they return then is
    checked again.

    Raises:
        ContextLost: a kernel made the GPU unusable for this process.
    """
    report = on_progress or (lambda workload, stage: None)
    machine = describe(settings.device)
    for workload in workloads:
        report(workload, "loading")
        rows: list[Row]
        try:
            call = workload.load(settings.device)
            if on_loaded is not None:
                on_loaded(_facts(workload, call))
            with torch.inference_mode():
                rows = _replay_call(workload, call, kernels, settings, report)
        except DatasetError as error:
            rows = [Row("", CallFacts(workload.name), "error", str(error))]
        except (torch.OutOfMemoryError, MemoryError) as error:
            reason = f"{workload.name}: {_classify(error)[1]}"
            rows = [Row("", CallFacts(workload.name), "out-of-memory", reason)]
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
    _time(call, attempts, judged, baseline, settings, lambda name: report(workload, name))
    return [attempt.row for attempt in attempts]


def _baseline(call: AttentionCall, settings: Settings) -> str:
    """The kernel to compare with; PyTorch's default where the model's own cannot run here."""
    if settings.baseline is not None:
        return settings.baseline
    kernel = catalogue().get(call.origin.backend)
    if kernel is None or kernel.name in settings.never or _refusal(kernel, call, settings.device):
        return DEFAULT_BASELINE
    return kernel.name


def _refusal(
    kernel: Kernel, call: AttentionCall, device: torch.device
) -> tuple[Status, str] | None:
    """Why a kernel cannot run a call here, if it cannot."""
    try:
        kernel = kernel.loaded()
        if reason := kernel.unavailable(device):
            return "unavailable", reason
        if reason := kernel.unsupported(call):
            return "unsupported", reason
    except Exception as error:  # somebody's predicate is wrong, which costs its row only
        return _classify(error)
    return None


def _extra(baseline: str, settings: Settings) -> Iterator[Kernel]:
    """Kernels that must run although they were not asked for."""
    for name in (baseline, settings.reference):
        if name not in ("gold", "captured", *settings.never):
            yield find(name)


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
        pristine = {
            name: narrow_expanded(tensor).clone()
            for name, tensor in call.tensors().items()
            if name != "output"
        }
        named = kernels.get(settings.reference)
        output = None
        if named is not None and not _refusal(named, call, settings.device):
            try:
                output = named.attention(**call.arguments()).clone()
            except Exception:  # its own row tells what went wrong
                output = None
            finally:
                _restore_inputs(call, pristine)
        return cls(
            gold,
            tolerance(call, reference.same_dtype(call), gold),
            call.output,
            output,
            None if call.output is None else compare(call.output, gold),
            pristine,
        )


def _attempt(
    workload: Workload, call: AttentionCall, kernel: Kernel, judged: _Judge, settings: Settings
) -> Attempt:
    """Run a kernel once and judge its output."""
    attempt = Attempt(kernel, call, Row(kernel.name, _facts(workload, call), "ok"))
    attempt.row.flop_per_byte = cost.arithmetic_intensity(call)
    refusal = _refusal(kernel, call, settings.device)
    if refusal is not None:
        return _settle(attempt, *refusal)
    attempt.kernel = kernel.loaded()
    try:
        _poison(judged.gold, call.dtype)
        try:
            # Compilers report their search on stderr; it belongs to nobody's table.
            with contextlib.redirect_stderr(io.StringIO()):
                output, attempt.row.first_call_ms = first_call(attempt.run, settings.device)
            # Before the inputs are restored, in case it returns one of them.
            output = output.clone() if isinstance(output, Tensor) else output
        finally:
            changed = _restore_inputs(call, judged.pristine)
            attempt.row.flags += [f"changes its {name}" for name in changed]
        wrong = _wrong_output(output, judged.gold, call)
        if wrong:
            return _settle(attempt, "error", wrong)
        if changed:  # its later calls must not reach the other kernels' inputs
            attempt.call = call.to(call.device)
        _judge_output(attempt, output, judged, settings)
        _look_closer(attempt, output, judged)
        attempt.row.peak_bytes = peak_bytes(attempt.run, settings.device)
    except Exception as error:
        if _gpu_is_lost(settings.device):
            raise ContextLost(_classify(error)[1]) from error
        return _settle(attempt, *_classify(error))
    # Outside: a full disk is not the kernel's error.
    if settings.save_output is not None:
        _save(output, settings.save_output / workload.name / f"{kernel.name}.safetensors")
    return attempt


def _gpu_is_lost(device: torch.device) -> bool:
    """Whether CUDA refuses all further work, as it does after an illegal memory access."""
    if device.type != "cuda":
        return False
    try:
        torch.zeros(1, device=device).add_(1)
        torch.cuda.synchronize(device)
    except RuntimeError:
        return True
    return False


def _look_closer(attempt: Attempt, output: Tensor, judged: _Judge) -> None:
    """Flag an output that differs between calls, or that shows what its memory held before."""
    others = []
    for poison in (0.0, POISON, POISON):
        _poison(judged.gold, attempt.call.dtype, poison)
        again = attempt.run()
        others.append(again.clone())
        _restore_inputs(attempt.call, judged.pristine)
    zeroed, *same = others
    shows_poison = (output.isnan() & ~zeroed.isnan()) | (output.isnan() & ~judged.gold.isnan())
    unwritten = int((shows_poison & (zeroed == 0)).sum())
    if unwritten:
        attempt.row.flags.append(f"leaves {unwritten} output elements unwritten")
    elif any(not _same_bits(output, each) for each in same):
        largest = max(float((output - each).abs().nan_to_num().max()) for each in same)
        attempt.row.flags.append(f"not deterministic: calls differ by up to {largest:.1e}")


def _same_bits(one: Tensor, other: Tensor) -> bool:
    return bool(((one == other) | (one.isnan() & other.isnan())).all())


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
    verdict = judge(output, judged.gold, errors, attempt.kernel.accuracy_class, judged.tolerance)
    _settle(attempt, "ok" if verdict.passed else "inaccurate", verdict.sentence)


def _check_again(attempt: Attempt, judged: _Judge) -> None:
    """Judge what a kernel returns after it was timed.

    The first call is not what was timed: from the third one a CUDA graph may be replayed, and a
    graph can have lost a launch. It writes where it wrote before, so that memory is poisoned too.
    """
    run = attempt.run
    try:
        _restore_inputs(attempt.call, judged.pristine)
        narrow_expanded(run()).fill_(float("nan"))
        _restore_inputs(attempt.call, judged.pristine)
        _poison(judged.gold, attempt.call.dtype)
        output = run()
        errors = compare(output, judged.gold)
        accuracy_class = attempt.kernel.accuracy_class
        verdict = judge(output, judged.gold, errors, accuracy_class, judged.tolerance)
    except Exception as error:
        _settle(attempt, *_classify(error))
        return
    finally:
        _restore_inputs(attempt.call, judged.pristine)
    if not verdict.passed and attempt.row.accuracy is not None:
        attempt.row.accuracy = replace(attempt.row.accuracy, gold=errors)
        reason = f"right on its first call, wrong when called again: {verdict.sentence}"
        _settle(attempt, "inaccurate", reason)


def _time(
    call: AttentionCall,
    attempts: list[Attempt],
    judged: _Judge,
    baseline: str,
    settings: Settings,
    on_sample: Callable[[str], None],
) -> None:
    """Fill in the times of the kernels that ran; the incorrect are timed, never compared."""
    running = {
        each.kernel.name: each for each in attempts if each.row.status in ("ok", "inaccurate")
    }
    contestants: dict[str, Callable[[], object]] = {
        name: each.run for name, each in running.items()
    }
    for name, each in running.items():
        if each.kernel.prepare is not None:
            try:
                contestants[f"{name} core"] = each.kernel.prepare(each.call)
            except Exception as error:
                each.row.flags.append(f"no core time: {_classify(error)[1]}")
    with contextlib.redirect_stderr(io.StringIO()):
        measured = measure(
            contestants,
            settings.device,
            cache=settings.cache,
            rounds=settings.rounds,
            seed=settings.seed,
            max_seconds=settings.max_seconds,
            on_sample=lambda name: on_sample(name.removesuffix(" core")),
            careful=settings.careful,
        )
    for name, each in running.items():
        if each.row.is_correct and measured[name].error is None:
            _check_again(each, judged)
    baseline_ms: tuple[float, ...] = ()
    if baseline in running and running[baseline].row.is_correct:
        baseline_ms = measured[baseline].ms
    for name, each in running.items():
        samples, row = measured[name], each.row
        row.gpu_before, row.gpu_during = samples.gpu_before, samples.gpu_during
        if samples.error is not None:
            _settle(each, *_classify(samples.error))
        if each.row.status not in ("ok", "inaccurate"):
            continue
        row.time_ms, row.host_ms = summarize(samples.ms), samples.host_ms
        row.tflops = cost.tflops(call, row.time_ms.p50)
        row.gb_per_s = cost.gb_per_s(call, row.time_ms.p50)
        core = measured.get(f"{name} core")
        if core is not None and core.error is not None:
            row.flags.append(f"no core time: {_classify(core.error)[1]}")
        elif core is not None:
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


def _poison(like: Tensor, dtype: torch.dtype, value: float = POISON) -> None:
    """Leave `value` in the memory an output will probably get, so that an unwritten one is seen.

    Without it that memory may still hold another kernel's right answer.
    """
    blocks = [
        torch.full(like.shape, value, dtype=dtype, device=like.device)
        for _ in range(POISONED_BLOCKS)
    ]
    del blocks


def _restore_inputs(call: AttentionCall, pristine: dict[str, Tensor]) -> list[str]:
    """Undo what a kernel did to its inputs; the names of those that it changed."""
    changed = []
    for name, before in pristine.items():
        now = narrow_expanded(getattr(call, name))
        if torch.equal(now, before):
            continue
        if not bool(((now == before) | ((now != now) & (before != before))).all()):
            changed.append(name)
            now.copy_(before)
    return changed


def _wrong_output(output: object, gold: Tensor, call: AttentionCall) -> str:
    if not isinstance(output, Tensor):
        return f"returned {type(output).__name__}, not a tensor"
    if output.shape != gold.shape:
        return f"returned shape {tuple(output.shape)} where {tuple(gold.shape)} is right"
    if output.device != gold.device:
        return f"returned a tensor on {output.device} where {gold.device} is right"
    if output.dtype != call.dtype:
        return f"returned {dtype_name(output.dtype)} where {dtype_name(call.dtype)} is right"
    return ""


def _save(output: Tensor, path: Path) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    save_file({"output": output.to("cpu").contiguous()}, path)
