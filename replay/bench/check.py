"""Runs a kernel once on a call and says whether what it returns is right.

Nothing is believed: output memory is poisoned before, inputs are compared after, and what comes
back is held against a reference that shares no code with any kernel.
"""

from __future__ import annotations

import contextlib
import gc
import io
import re
import traceback
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from torch import Tensor

from capture.call import AttentionCall
from capture.dataset import dtype_name
from capture.strides import narrow_expanded
from replay.accuracy import reference
from replay.accuracy.errors import compare, summary
from replay.accuracy.sparse import kept_share, restricted
from replay.accuracy.tolerance import Tolerance, Verdict, judge, tolerance
from replay.bench.resources import launched_programs, peak_bytes
from replay.bench.settings import Settings
from replay.kernels.registry import Kernel
from replay.rows.row import Accuracy, CallFacts, Errors, Row, Status
from replay.timing import flops
from replay.timing.gpu_state import gpu_is_lost
from replay.timing.timer import first_call

REFERENCE = "computing the reference"
"""What is reported, in place of a kernel's name, while there is no kernel at work."""

LONGEST_REASON = 500

POISON = float("nan")
POISONED_BLOCKS = 4
"""Pieces of memory filled with NaN before a kernel runs: one for its output and some for the
contiguous or quantised copies of inputs that it may take first."""


class ContextLost(Exception):
    """A kernel left this process unusable: its GPU refuses work, or its memory is gone."""

    def __init__(self, reason: str, status: Status = "crash") -> None:
        super().__init__(reason)
        self.status = status


@dataclass
class Attempt:
    """A kernel on its way to a row."""

    kernel: Kernel
    call: AttentionCall
    """What it runs on: its own copy once it was seen to change its inputs."""
    row: Row
    expected: Expected | None = None
    """What a sparse kernel must return; the others share the judge's."""

    @property
    def run(self) -> Callable[[], Tensor]:
        """What a model would execute at this place, and nothing besides."""
        attention, arguments = self.kernel.attention, _aliases(self.call)
        return lambda: attention(**arguments)


def check(
    facts: CallFacts,
    call: AttentionCall,
    kernel: Kernel,
    judged: Judge,
    settings: Settings,
    alive: Callable[[], None] = lambda: None,
) -> Attempt:
    """Run a kernel on a call for the first time and judge its output.

    Args:
        alive: called before each run, of which a slow kernel has several.

    Raises:
        ContextLost: the kernel made the GPU, or this process, unusable.
    """
    attempt = Attempt(kernel, call, Row(kernel.name, facts, "ok"))
    attempt.row.flop_per_byte = flops.arithmetic_intensity(call)
    refused = refusal(kernel, call, settings.device)
    if refused is not None:
        return set_status(attempt, *refused)
    attempt.kernel = kernel.loaded()
    try:
        _poison(judged.gold, call.dtype)
        try:
            alive()
            with stderr_apart(settings):
                output, attempt.row.first_call_ms = first_call(attempt.run, settings.device)
            # Before the inputs are restored, in case it returns one of them.
            output = output.clone() if isinstance(output, Tensor) else output
        finally:
            changed = _restore_inputs(call, judged.pristine)
            attempt.row.changed_inputs = changed
        wrong = _wrong_output(output, judged.gold) or _wrong_dtype(output, call)
        if wrong:
            return set_status(attempt, "error", wrong)
        if changed:  # its later calls must not reach the other kernels' inputs
            attempt.call = call.to(call.device)
        _judge_output(attempt, output, judged, settings)
        _look_closer(attempt, output, judged, alive)
        alive()
        attempt.row.peak_bytes = peak_bytes(attempt.run, settings.device)
        if settings.resources:
            attempt.row.programs = launched_programs(attempt.run)
    except Exception as error:
        if gpu_is_lost(settings.device):
            raise ContextLost(classify(error)[1]) from error
        status, reason = classify(error)
        traceback.clear_frames(error.__traceback__)  # they hold the kernel's tensors
        if status == "out-of-memory" and settings.in_worker and not _is_enough_left(judged):
            raise ContextLost(f"{reason}; it keeps the memory it took", status) from error
        return set_status(attempt, status, reason)
    # Outside: a full disk is not the kernel's error.
    if settings.save_output is not None:
        # A user's kernel is named by its path, which must not lead out of the directory.
        name = re.sub(r"[/\\:]+", "-", kernel.name)
        _save(output, settings.save_output / facts.name / f"{name}.safetensors")
    return attempt


def stderr_apart(settings: Settings) -> contextlib.AbstractContextManager[object]:
    """Compilers report their search on stderr, which belongs in nobody's table.

    A worker's is kept by its parent, to show what it said before it died.
    """
    if settings.in_worker:
        return contextlib.nullcontext()
    return contextlib.redirect_stderr(io.StringIO())


def _is_enough_left(judged: Judge) -> bool:
    """Whether a kernel that ran out of memory gave back what the others need."""
    gc.collect()
    try:
        _poison(judged.gold, judged.gold.dtype)
    except (RuntimeError, MemoryError):
        return False
    return True


def _look_closer(
    attempt: Attempt, output: Tensor, judged: Judge, alive: Callable[[], None]
) -> None:
    """Flag an output that differs between calls, or that shows what its memory held before."""
    others = []
    for poison in (0.0, POISON, POISON):
        alive()
        _poison(judged.gold, attempt.call.dtype, poison)
        again = attempt.run()
        others.append(again.clone())
        _restore_inputs(attempt.call, judged.pristine)
    zeroed, *same = others
    unwritten = int((output.isnan() & (zeroed == 0)).sum())
    if unwritten:
        attempt.row.flags.append(f"leaves {unwritten} output elements unwritten")
    elif any(not _same_bits(output, each) for each in same):
        largest = max(float((output - each).abs().nan_to_num().max()) for each in same)
        attempt.row.flags.append(f"not deterministic: calls differ by up to {largest:.1e}")


def _same_bits(one: Tensor, other: Tensor) -> bool:
    return bool(((one == other) | (one.isnan() & other.isnan())).all())


def _judge_output(attempt: Attempt, output: Tensor, judged: Judge, settings: Settings) -> None:
    if attempt.kernel.chosen is not None:
        attempt.expected = Expected.of_chosen(attempt.call, attempt.kernel.chosen)
        attempt.row.kept = attempt.expected.kept
    errors, verdict = _hold_against(attempt, output, judged)
    is_sparse = attempt.expected is not None
    attempt.row.accuracy = Accuracy(
        gold=compare(output, judged.gold) if is_sparse else errors,
        captured=None if judged.captured is None else compare(output, judged.captured),
        reference=None if judged.reference is None else compare(output, judged.reference),
        noise_floor=judged.noise_floor,
        chosen=errors if is_sparse else None,
    )
    if settings.compare_stats:
        against = {"gold": judged.gold, "captured": judged.captured}.get(
            settings.reference, judged.reference
        )
        attempt.row.output_summary = summary(output)
        attempt.row.reference_summary = None if against is None else summary(against)
    set_status(attempt, "ok" if verdict.passed else "inaccurate", verdict.sentence)


def _hold_against(attempt: Attempt, output: Tensor, judged: Judge) -> tuple[Errors, Verdict]:
    """The errors that decide, which are those against `chosen` of a sparse kernel."""
    expected = attempt.expected or Expected(judged.gold, judged.tolerance)
    errors = compare(output, expected.gold)
    accuracy_class = attempt.kernel.accuracy_class
    verdict = judge(output, expected.gold, errors, accuracy_class, expected.tolerance)
    if attempt.expected is not None:
        verdict = replace(verdict, sentence=f"on the keys that it chose, {verdict.sentence}")
    return errors, verdict


def check_again(attempt: Attempt, judged: Judge) -> None:
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
        errors, verdict = _hold_against(attempt, output, judged)
    except Exception as error:
        set_status(attempt, *classify(error))
        return
    finally:
        _restore_inputs(attempt.call, judged.pristine)
    if not verdict.passed and attempt.row.accuracy is not None:
        which = "gold" if attempt.expected is None else "chosen"
        attempt.row.accuracy = replace(attempt.row.accuracy, **{which: errors})
        reason = f"right on its first call, wrong when called again: {verdict.sentence}"
        set_status(attempt, "inaccurate", reason)


def core_fault(attempt: Attempt, core: Callable[[], Tensor], judged: Judge) -> str:
    """Why the time of a kernel's core means nothing; empty where it returns what the kernel must.

    Its dtype may be another: converting the output can be the drop-in's part.
    """
    try:
        _poison(judged.gold, attempt.call.dtype)
        output = core()
        wrong = _wrong_output(output, judged.gold)
        if wrong:
            return wrong
        _, verdict = _hold_against(attempt, output, judged)
    except Exception as error:
        return classify(error)[1]
    finally:
        _restore_inputs(attempt.call, judged.pristine)
    return "" if verdict.passed else f"it is wrong: {verdict.sentence}"


@dataclass(frozen=True)
class Expected:
    """What an output must be, and how near."""

    gold: Tensor
    tolerance: Tolerance
    kept: float | None = None

    @classmethod
    def of_chosen(cls, call: AttentionCall, chosen: Callable[[AttentionCall], Tensor]) -> Expected:
        """Attention to the keys that a sparse kernel chose."""
        kept = restricted(call, chosen(call))
        gold = reference.attention(kept, reference.gold_dtype(call.device, call.dtype))
        allowed = tolerance(kept, reference.same_dtype(kept), gold)
        return cls(gold, allowed, kept_share(call, kept))


@dataclass(frozen=True)
class Judge:
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
        report: Callable[[str], None],
    ) -> Judge:
        report(REFERENCE)
        gold = reference.attention(call, reference.gold_dtype(settings.device, call.dtype))
        pristine = {
            name: narrow_expanded(tensor).clone()
            for name, tensor in call.tensors().items()
            if name != "output"
        }
        named = kernels.get(settings.reference)
        output = None
        if named is not None:
            report(named.name)
            output = _output_of(named, call, settings, pristine)
            report(REFERENCE)
        return cls(
            gold,
            tolerance(call, reference.same_dtype(call), gold),
            call.output,
            output,
            None if call.output is None else compare(call.output, gold),
            pristine,
        )


def _output_of(
    named: Kernel, call: AttentionCall, settings: Settings, pristine: dict[str, Tensor]
) -> Tensor | None:
    """What a kernel returns, None where it fails: its own row tells what went wrong."""
    if refusal(named, call, settings.device) is not None:
        return None
    try:
        return named.attention(**_aliases(call)).clone()
    except Exception:
        return None
    finally:
        _restore_inputs(call, pristine)


def refusal(kernel: Kernel, call: AttentionCall, device: torch.device) -> tuple[Status, str] | None:
    """Why a kernel cannot run a call here, if it cannot."""
    try:
        kernel = kernel.loaded()
        if reason := kernel.unavailable(device):
            return "unavailable", reason
        if reason := kernel.unsupported(call):
            return "unsupported", reason
    except Exception as error:  # somebody's predicate is wrong, which costs its row only
        return classify(error)
    return None


def set_status(attempt: Attempt, status: Status, reason: str) -> Attempt:
    attempt.row.status, attempt.row.reason = status, reason
    return attempt


def classify(error: Exception) -> tuple[Status, str]:
    first = str(error).strip().partition("\n")[0]
    # It is shown in a terminal: no escape codes, no surrogates, no megabytes.
    text = "".join(letter if letter.isprintable() else " " for letter in first[:LONGEST_REASON])
    text = text.strip() or type(error).__name__
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


def _aliases(call: AttentionCall) -> dict[str, Any]:
    """The arguments; what a kernel resizes or transposes in place stays so for itself only."""
    return {
        name: value.detach() if isinstance(value, Tensor) else value
        for name, value in call.arguments().items()
    }


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


def _wrong_output(output: object, gold: Tensor) -> str:
    if not isinstance(output, Tensor):
        return f"returned {type(output).__name__}, not a tensor"
    if output.shape != gold.shape:
        return f"returned shape {tuple(output.shape)} where {tuple(gold.shape)} is right"
    if output.device != gold.device:
        return f"returned a tensor on {output.device} where {gold.device} is right"
    return ""


def _wrong_dtype(output: Tensor, call: AttentionCall) -> str:
    if output.dtype != call.dtype:
        return f"returned {dtype_name(output.dtype)} where {dtype_name(call.dtype)} is right"
    return ""


def _save(output: Tensor, path: Path) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    save_file({"output": output.to("cpu").contiguous()}, path)
