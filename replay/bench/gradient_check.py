"""The check of a kernel's backward pass before it is timed."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import torch
from torch import Tensor

from capture.call.attention_call import AttentionCall
from capture.call.gradients import DIFFERENTIATED, GRADIENTS
from replay.accuracy.kernel_gradients import differentiated
from replay.bench.resources import with_peak_bytes
from replay.bench.stages import CheckedKernel
from replay.bench.training_step import TrainingStep
from replay.isolation.inputs import Inputs, aliases
from replay.isolation.judge import OutputJudge
from replay.isolation.output_form import malformed
from replay.kernels.failures import Finding, classify


def with_gradients(
    checked: CheckedKernel,
    recorded: AttentionCall,
    inputs: Inputs,
    judge: OutputJudge,
    device: torch.device,
    alive: Callable[[], None],
) -> CheckedKernel:
    """Run a kernel's forward and backward, and judge its gradients and the output beside them.

    Further runs measure the memory, and find gradients that differ from run to run.

    Args:
        checked: kernel whose output without gradients is right.
        recorded: the call as recorded, with its `grad_output`.
        inputs: inputs of the call, as they were before any kernel ran.
        alive: called before the kernel runs.

    Returns:
        The kernel with the errors of its gradients. A kernel without a backward has no figures: its
        row answers for a training step.
    """
    kernel = checked.kernel

    def run() -> tuple[Tensor, dict[str, Tensor]]:
        arguments, upper = aliases(checked.call), checked.call.grad_output
        return differentiated(kernel.attention, arguments, DIFFERENTIATED, upper)

    inputs.poison(recorded)
    alive()
    try:
        output, gradients = run()
    except NotImplementedError as error:
        return CheckedKernel(kernel, checked.call, classify(error))
    if changed := inputs.restore(checked.call):
        # Later runs must not reach the other kernels' inputs.
        own, names = checked.call.to(device), (*checked.changed_inputs, *changed)
        checked = replace(checked, call=own, changed_inputs=tuple(dict.fromkeys(names)))
    if wrong := malformed(output, recorded):
        return replace(checked, finding=Finding("error", f"when gradients are needed, {wrong}"))
    beside = judge.judge(kernel.name, kernel.accuracy_class, output, None, with_accuracy=False)
    if beside.finding.status != "ok":
        reason = f"right without gradients, wrong when they are needed: {beside.finding.reason}"
        return replace(checked, finding=Finding("inaccurate", reason))
    judged = judge.judge_gradients(kernel.name, kernel.accuracy_class, gradients)
    if judged.finding.status == "unsupported":
        return CheckedKernel(kernel, checked.call, judged.finding)
    alive()
    step = TrainingStep(kernel.attention, checked.call)
    _, peak_bytes = with_peak_bytes(step.backward, device)
    inputs.restore(checked.call)
    _, again = run()
    inputs.restore(checked.call)
    flag = _difference(gradients, again)
    return replace(
        checked,
        finding=checked.finding if judged.finding.status == "ok" else judged.finding,
        gradients=judged.errors,
        both_peak_bytes=peak_bytes,
        flags=(*checked.flags, flag) if flag else checked.flags,
    )


def _difference(first: dict[str, Tensor], again: dict[str, Tensor]) -> str:
    """Return a sentence about gradients that differ between two runs; empty if none do."""
    largest = {
        GRADIENTS[name]: float((first[name] - again[name]).abs().nan_to_num().max())
        for name in first.keys() & again.keys()
        if first[name].numel()
    }
    unlike = sorted(name for name, difference in largest.items() if difference)
    if not unlike:
        return ""
    by = max(largest.values())
    return f"{' and '.join(unlike)} not deterministic: backward passes differ by up to {by:.1e}"
