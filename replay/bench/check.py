"""Runs kernels on a call, outside of any timing, and has what they return judged."""

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
from replay.accuracy.errors import compare, summary
from replay.accuracy.judge import Expected, judge
from replay.bench.failures import ContextLost, Finding, classify
from replay.bench.inputs import POISON, Inputs, drop_in
from replay.bench.resources import launched_programs, peak_bytes
from replay.bench.settings import Settings, WorkerOptions
from replay.bench.stages import Checked, Confirmed, Timed
from replay.kernels.registry import Kernel
from replay.rows.row import Accuracy, Errors
from replay.timing.gpu_state import gpu_is_lost
from replay.timing.timer import first_call


def refusal(kernel: Kernel, call: AttentionCall, device: torch.device) -> Finding | None:
    """Why a kernel cannot run a call here, if it cannot."""
    try:
        kernel = kernel.loaded()
        if reason := kernel.unavailable(device):
            return Finding("unavailable", reason)
        if reason := kernel.unsupported(call):
            return Finding("unsupported", reason)
    except Exception as error:  # somebody's predicate is wrong, which costs its row only
        return classify(error)
    return None


@dataclass(frozen=True)
class Targets:
    """What outputs of a call are compared with."""

    expected: Expected
    captured: Tensor | None
    """What the model's own attention returned."""
    kernel: Tensor | None
    """What the kernel returns that errors are wanted against."""
    noise_floor: Errors | None

    @classmethod
    def of(cls, call: AttentionCall, kernel: Tensor | None = None) -> Targets:
        expected = Expected.of(call)
        floor = None if call.output is None else compare(call.output, expected.reference)
        return cls(expected, call.output, kernel, floor)


class Checker:
    """Checks kernels on one call.

    Args:
        inputs: of the call, as they were before any kernel ran.
        save_to: a directory for the kernels' outputs.
    """

    def __init__(
        self,
        call: AttentionCall,
        inputs: Inputs,
        targets: Targets,
        settings: Settings,
        options: WorkerOptions,
        save_to: Path | None = None,
    ) -> None:
        self._call = call
        self._inputs = inputs
        self._targets = targets
        self._settings = settings
        self._options = options
        self._save_to = save_to

    def check(self, kernel: Kernel, alive: Callable[[], None] = lambda: None) -> Checked:
        """Run a kernel for the first time and judge its output.

        Args:
            alive: called before each run, of which a slow kernel has several.

        Raises:
            ContextLost: the kernel made the GPU, or this process, unusable.
        """
        refused = refusal(kernel, self._call, self._settings.device)
        if refused is not None:
            return Checked(kernel, self._call, refused)
        checked = Checked(kernel.loaded(), self._call, Finding("ok"))
        try:
            checked, output, error = self._first_call(checked, alive)
            if error is not None:
                raise error
            if wrong := self._malformed(output):
                return replace(checked, finding=Finding("error", wrong))
            if checked.changed_inputs:  # later calls must not reach the other kernels' inputs
                checked = replace(checked, call=self._call.to(self._call.device))
            checked = self._judged(checked, output)
            checked = replace(checked, flags=self._flags(checked, output, alive))
            alive()
            checked = replace(
                checked,
                peak_bytes=peak_bytes(checked.run, self._settings.device),
                programs=(
                    tuple(launched_programs(checked.run)) if self._settings.resources else ()
                ),
            )
        except Exception as error:
            return replace(checked, finding=self._failure(error))
        if self._save_to is not None:  # outside: a full disk is not the kernel's error
            _save(output, kernel, self._save_to)
        return checked

    def confirm(self, timed: Timed) -> Confirmed:
        """Judge what a kernel, and its core, return after they were timed.

        The first call is not what was timed: from the third one a CUDA graph may be replayed, and a
        graph can have lost a launch. It writes where it wrote before, so that memory is poisoned
        too.
        """
        checked, finding, accuracy = timed.checked, timed.checked.finding, timed.checked.accuracy
        if timed.samples is not None and timed.samples.error is not None:
            return Confirmed(timed, classify(timed.samples.error), accuracy, "")
        if timed.samples is not None and finding.status == "ok":
            finding, accuracy = self._judged_again(checked)
        return Confirmed(timed, finding, accuracy, self._core_fault(timed, finding))

    def _first_call(
        self, checked: Checked, alive: Callable[[], None]
    ) -> tuple[Checked, Any, Exception | None]:
        """What was learnt, and what the kernel returned or raised."""
        output, milliseconds, failure = None, None, None
        self._inputs.poison(self._call)
        alive()
        try:
            with stderr_apart(self._options):
                output, milliseconds = first_call(checked.run, self._settings.device)
            # Before the inputs are restored, in case it returns one of them.
            output = output.clone() if isinstance(output, Tensor) else output
        except Exception as error:
            failure = error
        changed = self._inputs.restore(self._call)
        checked = replace(checked, changed_inputs=changed, first_call_ms=milliseconds)
        return checked, output, failure

    def _judged(self, checked: Checked, output: Tensor) -> Checked:
        targets, chosen = self._targets, checked.kernel.chosen
        expected = targets.expected
        if chosen is not None:
            expected = Expected.of(checked.call, chosen(checked.call))
        verdict = judge(output, expected, checked.kernel.accuracy_class)
        is_sparse = chosen is not None
        accuracy = Accuracy(
            reference=(
                compare(output, targets.expected.reference) if is_sparse else verdict.errors
            ),
            captured=None if targets.captured is None else compare(output, targets.captured),
            kernel=None if targets.kernel is None else compare(output, targets.kernel),
            noise_floor=targets.noise_floor,
            chosen=verdict.errors if is_sparse else None,
            where=verdict.where,
        )
        finding = Finding("ok" if verdict.passed else "inaccurate", verdict.sentence)
        if checked.is_interpreted and verdict.passed:
            finding = Finding("not-timed", f"Triton's interpreter ran it; {verdict.sentence}")
        checked = replace(checked, finding=finding, expected=expected, accuracy=accuracy)
        if not self._settings.compare_stats:
            return checked
        against = {"reference": targets.expected.reference, "captured": targets.captured}.get(
            self._settings.errors_against, targets.kernel
        )
        return replace(
            checked,
            output_summary=summary(output),
            reference_summary=None if against is None else summary(against),
        )

    def _flags(
        self, checked: Checked, output: Tensor, alive: Callable[[], None]
    ) -> tuple[str, ...]:
        """Whether outputs differ between calls, or show what their memory held before."""
        others = []
        for poison in (0.0, POISON, POISON):
            alive()
            self._inputs.poison(checked.call, poison)
            others.append(checked.run().clone())
            self._inputs.restore(checked.call)
        zeroed, *same = others
        unwritten = int((output.isnan() & (zeroed == 0)).sum())
        if unwritten:
            return (f"leaves {unwritten} output elements unwritten",)
        if any(not _same_bits(output, each) for each in same):
            largest = max(float((output - each).abs().nan_to_num().max()) for each in same)
            return (f"not deterministic: calls differ by up to {largest:.1e}",)
        return ()

    def _failure(self, error: Exception) -> Finding:
        finding = classify(error)
        if gpu_is_lost(self._settings.device):
            raise ContextLost(finding.reason) from error
        traceback.clear_frames(error.__traceback__)  # they hold the kernel's tensors
        starved = finding.status == "out-of-memory" and self._options.in_worker
        if starved and not self._is_enough_left():
            raise ContextLost(
                f"{finding.reason}; it keeps the memory it took", finding.status
            ) from error
        return finding

    def _is_enough_left(self) -> bool:
        """Whether a kernel that ran out of memory gave back what the others need."""
        gc.collect()
        try:
            self._inputs.poison(self._call)
        except (RuntimeError, MemoryError):
            return False
        return True

    def _judged_again(self, checked: Checked) -> tuple[Finding, Accuracy | None]:
        assert checked.expected is not None
        assert checked.accuracy is not None
        run = checked.run
        try:
            self._inputs.restore(checked.call)
            narrow_expanded(run()).fill_(POISON)
            self._inputs.restore(checked.call)
            self._inputs.poison(checked.call)
            verdict = judge(run(), checked.expected, checked.kernel.accuracy_class)
        except Exception as error:
            return classify(error), checked.accuracy
        finally:
            self._inputs.restore(checked.call)
        if verdict.passed:
            return checked.finding, checked.accuracy
        reason = f"right on its first call, wrong when called again: {verdict.sentence}"
        accuracy = replace(checked.accuracy, where=verdict.where)
        if checked.kernel.chosen is None:
            accuracy = replace(accuracy, reference=verdict.errors)
        else:
            accuracy = replace(accuracy, chosen=verdict.errors)
        return Finding("inaccurate", reason), accuracy

    def _core_fault(self, timed: Timed, finding: Finding) -> str:
        """Why the time of a kernel's core means nothing; a wrong kernel's core is not judged.

        Its dtype may be another: converting the output can be the drop-in's part.
        """
        if timed.core is None or timed.core_samples is None:
            return timed.core_fault
        if timed.core_samples.error is not None:
            return classify(timed.core_samples.error).reason
        if finding.status != "ok":
            return ""
        checked = timed.checked
        assert checked.expected is not None
        try:
            self._inputs.poison(checked.call)
            output = timed.core()
            if wrong := self._malformed(output, any_dtype=True):
                return wrong
            verdict = judge(output, checked.expected, checked.kernel.accuracy_class)
        except Exception as error:
            return classify(error).reason
        finally:
            self._inputs.restore(checked.call)
        return "" if verdict.passed else f"it is wrong: {verdict.sentence}"

    def _malformed(self, output: object, *, any_dtype: bool = False) -> str:
        right = self._targets.expected.reference
        if not isinstance(output, Tensor):
            return f"returned {type(output).__name__}, not a tensor"
        if output.shape != right.shape:
            return f"returned shape {tuple(output.shape)} where {tuple(right.shape)} is right"
        if output.device != right.device:
            return f"returned a tensor on {output.device} where {right.device} is right"
        dtype = self._call.dtype
        if output.dtype != dtype and not any_dtype:
            return f"returned {dtype_name(output.dtype)} where {dtype_name(dtype)} is right"
        return ""


def output_of(kernel: Kernel, call: AttentionCall, inputs: Inputs) -> Tensor | None:
    """What a kernel returns, None where it fails: its own row says what went wrong."""
    if refusal(kernel, call, call.device) is not None:
        return None
    try:
        return drop_in(kernel.loaded().attention, call)().clone()
    except Exception:
        return None
    finally:
        inputs.restore(call)


def stderr_apart(options: WorkerOptions) -> contextlib.AbstractContextManager[object]:
    """Compilers report their search on stderr, which belongs in nobody's table.

    A worker's is kept by its parent, to show what it said before it died.
    """
    if options.in_worker:
        return contextlib.nullcontext()
    return contextlib.redirect_stderr(io.StringIO())


def _save(output: Tensor, kernel: Kernel, directory: Path) -> None:
    # A user's kernel is named by its path, which must not lead out of the directory.
    name = re.sub(r"[/\\:]+", "-", kernel.name)
    directory.mkdir(parents=True, exist_ok=True)
    save_file({"output": output.to("cpu").contiguous()}, directory / f"{name}.safetensors")


def _same_bits(one: Tensor, other: Tensor) -> bool:
    return bool(((one == other) | (one.isnan() & other.isnan())).all())
