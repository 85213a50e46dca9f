"""The verdict on the gradients of a call's inputs, as `replay.accuracy.verdict` of its output."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property

import torch
from torch import Tensor

from attention_replay.errors import check_type
from capture.call.attention_call import AttentionCall
from capture.call.gradients import GRADIENTS
from capture.call.nonfinite import nonfinite_tensors
from replay.accuracy.gradient_causes import cause_of
from replay.accuracy.gradient_reference import gradients
from replay.accuracy.kernel_gradients import (
    GradientError,
    KernelFunction,
    earlier_call,
    kernel_gradients,
)
from replay.accuracy.reference import reference_dtype
from replay.accuracy.thresholds import Thresholds
from replay.accuracy.tolerance import tolerance_of_gradient
from replay.accuracy.verdict import Expected, OutputVerdict, judge
from replay.rows.errors_of_output import AccuracyClass


@dataclass(frozen=True)
class GradientVerdict:
    """Verdict on the gradients of a call, each judged by itself."""

    verdicts: dict[str, OutputVerdict]
    """Verdict on the gradient of each tensor, such as `query`."""
    cause: str = ""
    """Sentence about the bug that explains the wrong gradients; empty if there is none."""
    unsteady: tuple[str, ...] = ()
    """Names of the gradients that differ between runs of a kernel, also if they are right."""

    @property
    def passed(self) -> bool:
        return all(verdict.passed for verdict in self.verdicts.values())

    @cached_property
    def wrong(self) -> tuple[str, ...]:
        """Names of the gradients that are wrong, such as `grad_key`."""
        return tuple(GRADIENTS[name] for name, each in self.verdicts.items() if not each.passed)

    @property
    def sentence(self) -> str:
        """Reasons why gradients are wrong; empty if all are right."""
        wrong = ((name, each) for name, each in self.verdicts.items() if not each.passed)
        sentences = [f"{GRADIENTS[name]} is wrong: {each.sentence}" for name, each in wrong]
        return "; ".join([*sentences, *([f"cause: {self.cause}"] if self.cause else [])])

    def __str__(self) -> str:
        """Format as one line for each gradient, such as `grad_key wrong: 310 × its tolerance: …`,
        and a line for the cause."""
        lines = [
            f"{GRADIENTS[name]} {'right' if each.passed else 'wrong'}: {each.sentence}"
            for name, each in self.verdicts.items()
        ]
        if self.unsteady:
            lines.append(f"not deterministic: {', '.join(self.unsteady)} differs between runs")
        return "\n".join([*lines, *([f"cause: {self.cause}"] if self.cause else [])])


def why_not_judged(call: AttentionCall) -> str:
    """Return why the options of a call have no right gradients; empty if they have some."""
    if call.dropout_p > 0:
        return f"gradients with dropout {call.dropout_p} cannot be judged: use 0"
    if call.page_table is not None:
        return "gradients of a call with a page table cannot be computed"
    if not call.shape.kv_len:
        return "a call without keys has no gradients that could be judged"
    is_8_bit = any(each.dtype.itemsize == 1 for each in (call.query, call.key, call.value))
    return "gradients of 8-bit inputs cannot be computed" if is_8_bit else ""


def expected_gradients(call: AttentionCall, grad_output: Tensor) -> dict[str, Expected]:
    """Compute the right gradients of a call, and the tolerance around each.

    Args:
        grad_output: (B, Hq, Sq, Dv), on the call's device.

    Raises:
        ValueError: the call has dropout, pages or 8-bit inputs, or an input or `grad_output` is not
            finite.
    """
    if reason := why_not_judged(call):
        raise GradientError(reason)
    odd = nonfinite_tensors({**call.without_gradients().tensors(), "grad_output": grad_output})
    if odd:
        raise GradientError(f"gradients of a call with {odd} cannot be judged")
    right = gradients(call, grad_output, reference_dtype(call.device, call.dtype))
    forms = (False, True) if call.dtype.itemsize == 2 else (False,)
    eager = [gradients(call, grad_output, call.dtype, scale_scores=form) for form in forms]
    found = {}
    for name, gradient in right.items():
        same_dtype = [each[name].values for each in eager]
        allowed = tolerance_of_gradient(call, same_dtype, gradient.values, gradient.noise)
        found[name] = Expected(gradient.values, allowed)
    return found


def judge_gradients(
    call: AttentionCall,
    found: Mapping[str, Tensor] | str | KernelFunction | None = None,
    thresholds: Thresholds = Thresholds(),  # noqa: B008 - it is immutable
) -> GradientVerdict:
    """Judge gradients of a call by the rule for exact kernels.

    As for outputs, max|X - reference| must not exceed twice the same-dtype error plus rounding, and
    each row's error must not exceed (4 + 2e) · noise, where e is the same-dtype error of the worst
    row of its head in units of its noise (`replay.accuracy.verdict.judge`). Same-dtype is eager
    attention's backward, in which P, dP, dS and each head's dK and dV are rounded. A row is one key
    of `key` and `value`, one query of `query`, and one query's scores of `attn_mask`.

    The noise of a row is a sum of independent errors (`replay.accuracy.tolerance.rounding_noise`).
    With u, half the machine epsilon, kernels round P and dS and subtract a δ from a rounded output:

        |error of Pᵢⱼ| ≤ u·Pᵢⱼ      |error of dSᵢⱼ| ≤ u·Pᵢⱼ(|dPᵢⱼ| + |δᵢ|) + Pᵢⱼ·|error of δᵢ|

    The error of δᵢ = dOᵢ·Oᵢ is u·√(Σ(dOᵢ·Oᵢ)² + Σⱼ(Pᵢⱼ·dPᵢⱼ)²), common to the keys of a query. In
    32 bits, where the sums themselves have this precision, ‖dOᵢ‖‖Vⱼ‖ takes the place of |dPᵢⱼ|.

    Args:
        call: call with the gradient that reached its output, `grad_output`.
        found: gradients by the name of their tensor: `query`, `key`, `value`, `attn_mask`, `sinks`.
            By default, the recorded ones of the model's own attention (`record(backward=True)`).
            Or a kernel, as its name or a function with SDPA's arguments, which runs in this process
            on a call with other keys and then several times on this call.

    Returns:
        A verdict with `passed`, `wrong`, the `cause` if a known bug explains the wrong gradients
        (`replay.accuracy.gradient_causes`) and, as text, a line for each gradient.

    Raises:
        GradientError: `grad_output` is missing, there is nothing to judge, a shape is wrong, the
            call cannot be judged (see `expected_gradients`), or the kernel returns no gradients.

    Example:
        >>> for call in ar.load("captured_inputs"):
        ...     print(ar.judge_gradients(call))
        ...     print(ar.judge_gradients(call, "mine.py:attention"))
    """
    check_type("call", call, (AttentionCall,), "a call of ar.load(…)")
    if found is not None and not callable(found):
        check_type("found", found, (str, Mapping), "a kernel, or gradients by name")
    if call.grad_output is None:
        raise GradientError(
            "the call has no grad_output: record a run that calls backward(), with backward=True"
        )
    expected = expected_gradients(call, call.grad_output)
    if isinstance(found, str) or callable(found):
        return _of_runs(call, kernel_gradients(found, call), expected, thresholds)
    if found is None:
        recorded = {name: getattr(call, GRADIENTS[name]) for name in GRADIENTS if name != "output"}
        found = {name: each for name, each in recorded.items() if each is not None}
    return verdict_of(call, found, expected, thresholds)


def _of_runs(
    call: AttentionCall,
    runs: Sequence[Mapping[str, Tensor]],
    expected: Mapping[str, Expected],
    thresholds: Thresholds,
) -> GradientVerdict:
    """Judge the gradients of several runs; return the verdict on the worst one."""
    first, *others = runs
    unsteady = {name for name in first for other in others if not _same(first[name], other[name])}
    earlier = earlier_call(call)
    verdicts = [
        verdict_of(call, run, expected, thresholds, earlier=earlier)
        for run in (runs if unsteady else runs[:1])
    ]
    worst = max(verdicts, key=lambda verdict: len(verdict.wrong))
    names = tuple(GRADIENTS[name] for name in first if name in unsteady)
    cause = worst.cause
    if not cause and set(names) & set(worst.wrong):
        cause = f"runs on the same inputs differ in {', '.join(names)}"
    return replace(worst, cause=cause, unsteady=names)


def _same(one: Tensor, other: Tensor) -> bool:
    """Return True if two gradients are equal, with NaN equal to NaN."""
    return torch.equal(one.nan_to_num(), other.nan_to_num())


def verdict_of(
    call: AttentionCall,
    found: Mapping[str, Tensor],
    expected: Mapping[str, Expected],
    thresholds: Thresholds,
    accuracy_class: AccuracyClass = "exact",
    earlier: AttentionCall | None = None,
) -> GradientVerdict:
    """Judge gradients by the name of their tensor, and find the cause of the wrong ones.

    Args:
        earlier: call with other keys that the kernel ran before, if there was one.
    """
    if not found or (unknown := sorted(found.keys() - expected.keys())):
        raise GradientError(
            f"no gradients to judge: name some of {', '.join(expected)}"
            if not found
            else f"the call has no gradient of {', '.join(unknown)}: name {', '.join(expected)}"
        )
    given, verdicts = {}, {}
    for name in (name for name in expected if name in found):
        values = found[name][:, None, None] if name == "sinks" else found[name]
        given[name] = values[(None,) * (4 - values.ndim)]
        verdict = judge(given[name], expected[name], accuracy_class, thresholds)
        if name in ("key", "value"):  # their rows are keys
            verdict = replace(verdict, sentence=verdict.sentence.replace(", query ", ", key "))
        verdicts[name] = verdict
    wrong = [name for name, verdict in verdicts.items() if not verdict.passed]
    right = {name: each.reference for name, each in expected.items()}
    return GradientVerdict(verdicts, cause_of(call, given, right, wrong, earlier))
