"""The check of a kernel's output before it is timed, and the blocks that confirm it."""

from __future__ import annotations

import contextlib
import gc
import io
import math
import traceback
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any
from urllib.parse import quote

import torch
from safetensors import SafetensorError
from safetensors.torch import save_file
from torch import Tensor

from attention_replay.errors import Error
from replay.bench.confirmation import MOST_BLOCKS, Blocks
from replay.bench.forms import Forms
from replay.bench.gradient_check import with_gradients
from replay.bench.resources import launched_programs, with_peak_bytes
from replay.bench.settings import Settings, WorkerOptions
from replay.bench.stages import CheckedKernel, ConfirmedKernel, TimedKernel
from replay.isolation.block import calls_of_block, run_block
from replay.isolation.block_inputs import BlockInputs
from replay.isolation.inputs import POISON, Inputs, drop_in
from replay.isolation.judge import OutputJudge
from replay.isolation.output_form import malformed, output_shape
from replay.isolation.process_state import ProcessState
from replay.kernels.failures import ContextLost, Finding, classify
from replay.kernels.registry import Kernel, ScaledCore
from replay.timing.gpu_state import gpu_is_lost
from replay.timing.rounds import Turns, alone
from replay.timing.timer import first_call

BYTES_TO_GO_ON = 2**26
"""Free memory that a worker needs to go on after a kernel ran out of memory."""

LONGEST_FILE_NAME = 200
"""Maximum number of characters of a kernel's file name; file systems allow 255 bytes."""


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
            alive: called before each run of the kernel, to show progress.

        Raises:
            ContextLost: the kernel made the GPU or this process unusable.
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
            if wrong := malformed(output, self._call):
                return replace(checked, finding=Finding("error", wrong))
            if checked.changed_inputs:  # later calls must not reach the other kernels' inputs
                checked = replace(checked, call=call.to(call.device))
            checked = self._judged(checked, output)
            checked = self._called_again(checked, output, alive)
            if self._settings.backward and checked.finding.status in ("ok", "not-timed"):
                checked = with_gradients(
                    checked, self._call, self._inputs, self._judge, self._settings.device, alive
                )
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

    def confirm(
        self,
        all_timed: Sequence[TimedKernel],
        baseline: str,
        report: Callable[[str], None] = lambda name: None,
        turns: Turns = alone,
    ) -> list[ConfirmedKernel]:
        """Confirm kernels' times and outputs in blocks of calls, and judge each core once.

        A timed call may be wrong although the first call was right. For example, a kernel may
        replay a CUDA graph from its third call on, and the graph may lack a launch.

        Args:
            baseline: kernel that runs a block in every round, so that other blocks can be paired.
            report: called with a kernel's name before each of its blocks.
        """
        findings = {timed.checked.kernel.name: _after_samples(timed) for timed in all_timed}
        blocks = {name: Blocks() for name in findings}
        ran = [timed for timed in all_timed if timed.samples is not None]

        def is_open(timed: TimedKernel) -> bool:
            """Return whether a kernel needs another block."""
            kernel = timed.checked.kernel
            found = blocks[kernel.name]
            return findings[kernel.name].status == "ok" and (
                not found.ms or (self._is_claim(kernel) and not found.settle(timed.p50))
            )

        def is_done() -> bool:
            return not any(map(is_open, ran))

        for turn in turns(MOST_BLOCKS, is_done) if not is_done() else ():
            for timed in ran:
                name = timed.checked.kernel.name
                is_again = turn.number and name == baseline and findings[name].status == "ok"
                if is_again or is_open(timed):
                    report(name)
                    findings[name] = self._run_block(timed, blocks[name])
        return [
            self._confirmed(timed, findings[name], blocks[name])
            for timed in all_timed
            if (name := timed.checked.kernel.name)
        ]

    def _is_claim(self, kernel: Kernel) -> bool:
        """Return whether a kernel may have falsified its samples."""
        return bool(kernel.process) and self._options.in_worker

    def _confirmed(self, timed: TimedKernel, finding: Finding, blocks: Blocks) -> ConfirmedKernel:
        core_fault = timed.core_fault
        if timed.samples is None or timed.samples.error is None:
            core_fault = self._core_fault(timed, finding)
        kernel = timed.checked.kernel.name
        self._process_state.restore(kernel)
        flags = self._process_state.flags(kernel)
        return ConfirmedKernel(timed, finding, timed.checked.accuracy, core_fault, flags, blocks)

    def _run_block(self, timed: TimedKernel, blocks: Blocks) -> Finding:
        """Run a block of calls; return the kernel's status and reason afterwards."""
        checked, call, kernel = timed.checked, timed.checked.call, timed.checked.kernel
        assert timed.samples is not None
        output_bytes = math.prod(output_shape(call)) * call.dtype.itemsize
        calls = calls_of_block(max(timed.p50, timed.samples.host_ms or 0.0), output_bytes)
        self._inputs.restore(call)
        inputs = BlockInputs(call, self._call)

        def apply(number: int, last: Tensor | None) -> None:
            self._inputs.rewrite(call, checked.changed_inputs)
            inputs.apply(number, last)

        def choose(number: int) -> Tensor:
            """Repeat a call, and return the keys that the kernel chose."""
            assert kernel.chosen is not None
            last = outputs[number - 1] if number else None
            inputs.restore()
            apply(number, last)
            checked.run()  # a kernel may keep its choice for `chosen`
            apply(number, last)  # the kernel may have changed its inputs
            keys = kernel.chosen(call)
            inputs.restore()
            return keys

        try:
            inputs.draw(0, calls)  # warm-up, because the first use of an operation loads code
            apply(1, torch.zeros(output_shape(call), dtype=call.dtype, device=call.device))
            inputs.restore()
            checked.run()
            seed, outputs = self._judge.begin_block(kernel.name, calls)
            inputs.draw(seed, calls)
            wrong = run_block(checked.run, call, apply, outputs)
            seen = self._judge.end_block(
                kernel.accuracy_class, wrong, inputs.restore, choose if kernel.chosen else None
            )
        except BaseException as error:
            return self._failure(error)
        finally:
            inputs.restore()
            self._inputs.restore(call)
            self._process_state.restore(kernel.name)
        if seen.wrong:
            reason = f"right when it was checked, wrong on other inputs: {seen.wrong}"
            return Finding("error" if wrong else "inaccurate", reason)
        blocks.add(seen)
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
        """Call the kernel twice more, to find outputs that differ, share memory or are incomplete.

        These calls also measure the memory that a call needs.
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
            # Compare addresses, because a CUDA graph that has been replayed refuses access to its
            # earlier output.
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
                reason = (
                    f"right on its first call, wrong when called again: {judged.finding.reason}"
                )
                return replace(judged, finding=Finding("inaccurate", reason))
        return checked

    def _failure(self, error: BaseException) -> Finding:
        finding = classify(error)
        if gpu_is_lost(self._settings.device):
            raise ContextLost(finding.reason) from error
        traceback.clear_frames(error.__traceback__)  # the frames hold the kernel's tensors
        starved = finding.status == "out-of-memory" and self._options.in_worker
        if starved and not self._is_enough_left():
            raise ContextLost(
                f"{finding.reason}; it did not free its memory", finding.status
            ) from error
        return finding

    def _is_enough_left(self) -> bool:
        """Return whether a kernel that ran out of memory freed enough for the other kernels."""
        gc.collect()
        try:
            self._inputs.poison(self._call)
            torch.empty(BYTES_TO_GO_ON, dtype=torch.uint8)
        except (RuntimeError, MemoryError):
            return False
        return True

    def _core_fault(self, timed: TimedKernel, finding: Finding) -> str:
        """Return why the time of a kernel's core must be discarded; empty if it is valid.

        The core of a wrong kernel is not judged. The core's output may have another dtype, which
        the drop-in call converts.
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


def _after_samples(timed: TimedKernel) -> Finding:
    """Return a kernel's status and reason after it was timed."""
    for samples in (timed.samples, timed.backward_samples, timed.both_samples):
        if samples is not None and samples.error is not None:
            return classify(samples.error)
    return timed.checked.finding


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
    """Hide stderr, because compilers report every variant that they try.

    A worker keeps its stderr, because the parent shows the last lines if the worker ends.
    """
    if options.in_worker:
        return contextlib.nullcontext()
    return contextlib.redirect_stderr(io.StringIO())


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
