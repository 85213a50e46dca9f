"""The check of a kernel's output in untimed runs, before and after the kernel is timed."""

from __future__ import annotations

import contextlib
import gc
import io
import math
import statistics
import time
import traceback
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any
from urllib.parse import quote

import torch
from safetensors import SafetensorError
from safetensors.torch import save_file
from torch import Tensor

from attention_replay.errors import Error
from capture.call.strides import narrow_expanded
from replay.bench.forms import Forms
from replay.bench.resources import launched_programs, with_peak_bytes
from replay.bench.settings import Settings, WorkerOptions
from replay.bench.stages import CheckedKernel, ReverifiedKernel, TimedKernel
from replay.isolation.inputs import POISON, Inputs, drop_in
from replay.isolation.judge import OTHER_TIMER, OutputJudge
from replay.isolation.output_form import malformed
from replay.isolation.process_state import ProcessState
from replay.kernels.failures import CannotJudge, ContextLost, Finding, classify
from replay.kernels.registry import Kernel, ScaledCore
from replay.rows.errors_of_output import Accuracy
from replay.timing import in_a_row
from replay.timing.gpu_state import gpu_is_lost
from replay.timing.rounds import Samples
from replay.timing.timer import first_call

LONGEST_FILE_NAME = 200
"""Maximum number of characters of a kernel's file name; file systems allow 255 bytes."""

BETWEEN_CALLS_MS = 0.005
"""Time that a GPU needs between two calls in a row, however short the calls are."""
PATIENCE_S = 2.0
"""Time for more tries if calls in a row seem slower than the samples. Other processes on the same
GPU slow down most tries."""


class OutputNotSaved(Error):
    """Failure of `--save-output` to write a file."""


class Checker:
    """Checks of kernels on one call.

    Args:
        inputs: inputs of all forms of the call, as they were before any kernel ran.
        process_state: state of the process before any kernel was imported.
        save_to: directory for the kernels' outputs.
    """

    def __init__(
        self,
        forms: Forms,
        inputs: Inputs,
        process_state: ProcessState,
        judge: OutputJudge,
        settings: Settings,
        options: WorkerOptions,
        save_to: Path | None = None,
    ) -> None:
        self._forms = forms
        self._call = forms.call
        self._inputs = inputs
        self._process_state = process_state
        self._judge = judge
        self._settings = settings
        self._options = options
        self._save_to = save_to

    def check(self, kernel: Kernel, alive: Callable[[], None] = lambda: None) -> CheckedKernel:
        """Run a kernel for the first time and judge its output.

        Args:
            alive: called before each run, to show progress during slow kernels.

        Raises:
            ContextLost: the kernel made the GPU, or this process, unusable.
        """
        call, restated_as, refused = self._forms.form(
            kernel, self._settings.device, for_model=self._settings.for_model
        )
        self._process_state.restore(kernel.name)  # importing the library may change it
        if refused is not None:
            return CheckedKernel(kernel, call, refused)
        checked = CheckedKernel(kernel.loaded(), call, Finding("ok"), restated_as=restated_as)
        try:
            checked, output, error = self._first_call(checked, alive)
            if error is not None:
                raise error
            if wrong := self._process_state.replaced(kernel.name) or malformed(output, self._call):
                return replace(checked, finding=Finding("error", wrong))
            if checked.changed_inputs:  # later calls must not reach the other kernels' inputs
                checked = replace(checked, call=call.to(call.device))
            checked = self._judged(checked, output)
            checked = self._called_again(checked, output, alive)
            if self._settings.resources:
                alive()
                checked = replace(checked, programs=tuple(launched_programs(checked.run)))
        except BaseException as error:
            return replace(checked, finding=self._failure(error))
        finally:
            self._process_state.restore(kernel.name)
        if self._save_to is not None:  # not in a `try`: a full disk is not the kernel's error
            _save(output, kernel, self._save_to)
        return checked

    def reverify(self, timed: TimedKernel) -> ReverifiedKernel:
        """Judge the outputs of a kernel and its core again after they were timed.

        Timed calls may differ from the first call: from the third call on, a kernel may replay a
        CUDA graph that lacks a launch. A graph writes to the same memory each time, so its output
        memory is poisoned too.
        """
        checked, finding, accuracy = timed.checked, timed.checked.finding, timed.checked.accuracy
        kernel, core_fault = checked.kernel.name, ""
        if timed.samples is not None and timed.samples.error is not None:
            finding = classify(timed.samples.error)
        else:
            if timed.samples is not None and finding.status == "ok":
                try:
                    while_timed = self._timed_finding(timed)
                except (CannotJudge, OSError) as error:
                    while_timed = classify(error)
                last: list[Any] = []
                if while_timed.status == "ok":
                    while_timed = self._in_a_row(checked, timed.samples, last)
                finding, accuracy = self._judged_again(checked, timed.samples, last)
                finding = finding if while_timed.status == "ok" else while_timed
            core_fault = self._core_fault(timed, finding)
        self._process_state.restore(kernel)
        if finding.status == "ok" and (replaced := self._process_state.replaced(kernel)):
            finding = Finding("error", replaced)
        return ReverifiedKernel(
            timed, finding, accuracy, core_fault, self._process_state.flags(kernel)
        )

    def _timed_finding(self, timed: TimedKernel) -> Finding:
        """Judge outputs of timed calls, whose inputs differed from call to call."""
        checked = timed.checked
        if replaced := self._process_state.replaced(checked.kernel.name):
            return Finding("error", replaced)
        if fault := timed.fault or timed.block_fault:
            return Finding("error", f"right when it was checked; {fault}")
        kernel = checked.kernel
        for samples, when in (
            (timed.drawn_samples, "when timed"),
            (timed.block_samples, "when its energy was measured"),
        ):
            wrong = self._judge.judge_samples(
                kernel.name, kernel.accuracy_class, list(samples), checked.chosen
            )
            if wrong:
                return Finding("inaccurate", f"right when it was checked, wrong {when}: {wrong}")
        return checked.finding

    def _first_call(
        self, checked: CheckedKernel, alive: Callable[[], None]
    ) -> tuple[CheckedKernel, Any, BaseException | None]:
        """Call the kernel; return the updated check, its output, and the error that it raised."""
        output, milliseconds, failure = None, None, None
        self._inputs.poison(self._call)
        alive()
        try:
            with stderr_apart(self._options):
                try:
                    output, milliseconds = first_call(checked.run, self._settings.device)
                finally:
                    self._process_state.restore(checked.kernel.name)
            # Clone before the inputs are restored, because the output may be one of the inputs.
            output = output.clone() if isinstance(output, Tensor) else output
        except BaseException as error:
            failure = error
        changed = self._inputs.restore(checked.call)
        checked = replace(checked, changed_inputs=changed, first_call_ms=milliseconds)
        return checked, output, failure

    def _judged(self, checked: CheckedKernel, output: Tensor) -> CheckedKernel:
        kernel = checked.kernel
        chosen = None if kernel.chosen is None else kernel.chosen(checked.call)
        judged = self._judge.judge(kernel.name, kernel.accuracy_class, output, chosen)
        finding = judged.finding
        if checked.is_interpreted and finding.status == "ok":
            finding = Finding("not-timed", f"Triton's interpreter ran it; {finding.reason}")
        return replace(
            checked,
            finding=finding,
            chosen=chosen,
            accuracy=judged.accuracy,
            kept=judged.kept,
            output_summary=judged.output_summary,
            reference_summary=judged.reference_summary,
        )

    def _called_again(
        self, checked: CheckedKernel, output: Tensor, alive: Callable[[], None]
    ) -> CheckedKernel:
        """Call the kernel twice more, to find outputs that differ, share memory or have gaps.

        The calls also measure the memory that a call needs.
        """
        others, earlier = [], None
        for poison in (0.0, POISON):
            alive()
            self._inputs.poison(checked.call, poison)
            again, peak_bytes = with_peak_bytes(checked.run, self._settings.device)
            if wrong := malformed(again, self._call):
                reason = f"right on its first call; when called again, {wrong}"
                return replace(checked, finding=Finding("error", reason))
            checked = replace(checked, peak_bytes=peak_bytes)
            others.append(again.clone())
            # Compare addresses and not tensors: a CUDA graph that has been replayed refuses access
            # to its earlier output.
            memory = again.untyped_storage().data_ptr()
            if earlier is not None and earlier[1] == memory:
                flag = "returns the same memory again: a later call overwrites an earlier output"
                checked = replace(checked, flags=(*checked.flags, flag))
            earlier = again, memory
            self._inputs.restore(checked.call)
        del earlier, again
        unwritten = int((output.isnan() & (others[0] == 0)).sum())
        if unwritten:
            flag = f"leaves {unwritten} output elements unwritten"
            return replace(checked, flags=(*checked.flags, flag))
        unlike = [other for other in others if not _same_bits(output, other)]
        if not unlike:
            return checked
        largest = max(float((output - other).abs().nan_to_num().max()) for other in unlike)
        flag = f"not deterministic: calls differ by up to {largest:.1e}"
        checked = replace(checked, not_deterministic=flag)
        for other in unlike if checked.finding.status == "ok" else ():
            judged = self._judged(checked, other)
            if judged.finding.status == "inaccurate":
                return replace(judged, finding=_wrong_again(judged.finding.reason))
        return checked

    def _failure(self, error: BaseException) -> Finding:
        finding = classify(error)
        if gpu_is_lost(self._settings.device):
            raise ContextLost(finding.reason) from error
        traceback.clear_frames(error.__traceback__)  # the frames hold the kernel's tensors
        starved = finding.status == "out-of-memory" and self._options.in_worker
        if starved and not self._is_enough_left():
            raise ContextLost(
                f"{finding.reason}; it keeps the memory it took", finding.status
            ) from error
        return finding

    def _is_enough_left(self) -> bool:
        """Return whether a kernel that ran out of memory freed enough for the other kernels."""
        gc.collect()
        try:
            self._inputs.poison(self._call)
        except (RuntimeError, MemoryError):
            return False
        return True

    def _in_a_row(self, checked: CheckedKernel, samples: Samples, last: list[Any]) -> Finding:
        """Check that calls in a row leave no work behind and are about as fast as the samples.

        Args:
            last: receives the output of the last call.
        """
        device, call_ms = self._settings.device, statistics.median(samples.ms)
        limit_ms = OTHER_TIMER * call_ms + BETWEEN_CALLS_MS
        fastest_ms, tries = math.inf, 0
        began = time.monotonic()

        def run() -> None:
            last.clear()  # frees the previous output before the call, as in a sample
            last.append(checked.run())

        try:
            while tries < in_a_row.TRIES or time.monotonic() - began < PATIENCE_S:
                tries += 1
                seen = in_a_row.look(run, device, call_ms, samples.host_ms or 0.0)
                if seen.left_ms:
                    return Finding(
                        "error",
                        f"{seen.left_ms:.3g} ms of its work outlive the call, on a stream that "
                        "is not waited for",
                    )
                fastest_ms = min(fastest_ms, seen.gpu_ms or 0.0)
                if fastest_ms <= limit_ms:
                    return checked.finding
        except BaseException as error:
            return classify(error)
        finally:
            self._inputs.restore(checked.call)
        return Finding(
            "error",
            f"its samples say {call_ms:.3g} ms a call, and calls in a row took {fastest_ms:.3g} ms "
            "each by another clock: something changed the timer",
        )

    def _judged_again(
        self, checked: CheckedKernel, samples: Samples, last: list[Any]
    ) -> tuple[Finding, Accuracy | None]:
        """Judge the output of one more call, which the judge times if it has a clock.

        Args:
            last: holds the output of an earlier call, if one was made after the samples.
        """
        kernel, run = checked.kernel, checked.run
        try:
            if not last:
                self._inputs.restore(checked.call)
                last.append(run())
            with (
                torch.inference_mode()
            ):  # an output that was made in inference mode cannot be changed outside that mode
                narrow_expanded(last.pop()).fill_(POISON)
            self._inputs.restore(checked.call)
            self._inputs.poison(checked.call)
            call_ms, device = statistics.median(samples.ms), self._settings.device
            clocked = self._judge.clock(kernel.name, run, device, call_ms)
            if clocked is None:
                self._inputs.restore(checked.call)
                self._inputs.poison(checked.call)
            output = run() if clocked is None else clocked
            if wrong := malformed(output, self._call):
                return Finding("error", f"{wrong} after it was timed"), checked.accuracy
            judged = self._judge.judge(
                kernel.name, kernel.accuracy_class, output, checked.chosen, with_accuracy=False
            )
        except BaseException as error:
            return classify(error), checked.accuracy
        finally:
            self._inputs.restore(checked.call)
        if judged.finding.status == "ok":
            return checked.finding, checked.accuracy
        return _wrong_again(judged.finding.reason), judged.accuracy

    def _core_fault(self, timed: TimedKernel, finding: Finding) -> str:
        """Return why the time of a kernel's core must be discarded; empty if it is valid.

        The core of a wrong kernel is not judged. A core's output may have another dtype, because
        the drop-in call may convert it.
        """
        if timed.core is None or timed.core_samples is None:
            return timed.core_fault
        if timed.core_samples.error is not None:
            return classify(timed.core_samples.error).reason
        if finding.status != "ok":
            return ""
        checked, kernel = timed.checked, timed.checked.kernel
        try:
            self._inputs.poison(checked.call)
            core = timed.core
            output = core.product() if isinstance(core, ScaledCore) else core()
            if wrong := malformed(output, self._call, any_dtype=True):
                return wrong
            judged = self._judge.judge(
                kernel.name,
                kernel.accuracy_class,
                output,
                checked.chosen,
                of_core=True,
                with_accuracy=False,
            ).finding
        except BaseException as error:
            return classify(error).reason
        finally:
            self._inputs.restore(checked.call)
        return "" if judged.status == "ok" else f"it is wrong: {judged.reason}"


def output_of(kernel: Kernel, forms: Forms, inputs: Inputs) -> Tensor | None:
    """Return a kernel's output, or None if the kernel fails (its own row reports the failure)."""
    call, _, refused = forms.form(kernel, forms.call.device)
    if refused is not None:
        return None
    try:
        return drop_in(kernel.loaded().attention, call)().clone()
    except BaseException as error:
        classify(error)  # raises the user's interrupt again
        return None
    finally:
        inputs.restore(call)


def stderr_apart(options: WorkerOptions) -> contextlib.AbstractContextManager[object]:
    """Hide stderr, because compilers report there which variants they try.

    A worker's stderr stays visible, because the parent shows its last lines if the worker dies.
    """
    if options.in_worker:
        return contextlib.nullcontext()
    return contextlib.redirect_stderr(io.StringIO())


def _wrong_again(sentence: str) -> Finding:
    return Finding("inaccurate", f"right on its first call, wrong when called again: {sentence}")


def _save(output: Tensor, kernel: Kernel, directory: Path) -> None:
    directory.mkdir(parents=True, exist_ok=True)
    path = directory / f"{file_name(kernel.name)}.safetensors"
    try:
        save_file({"output": output.to("cpu").contiguous()}, path)
    except SafetensorError as error:
        path.unlink(missing_ok=True)  # a partial file would be read as an output
        raise OutputNotSaved(f"cannot write {path} ({error}): make room") from error


def file_name(kernel: str) -> str:
    """Return a file name for a kernel's output, with the path of a user's kernel quoted."""
    return quote(kernel, safe="[]=,")[-LONGEST_FILE_NAME:]


def _same_bits(one: Tensor, other: Tensor) -> bool:
    return bool(((one == other) | (one.isnan() & other.isnan())).all())
