"""Examination of one kernel on one call: its correctness and, if it is wrong, the cause."""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any, NamedTuple

from torch import Tensor

from capture.call.attention_call import AttentionCall
from replay.accuracy.verdict import Expected, judge
from replay.bench.forms import Forms
from replay.bench.output_check import Checker
from replay.bench.settings import Settings, WorkerOptions
from replay.bench.stages import CheckedKernel
from replay.diagnosis.captured import CAPTURED, examine_captured
from replay.diagnosis.derived import HeadRows
from replay.diagnosis.experiments import Hypothesis, first_evidence
from replay.diagnosis.hypotheses.head_dims import head_dim
from replay.diagnosis.hypotheses.lengths import odd_length
from replay.diagnosis.hypotheses.limits import too_large
from replay.diagnosis.hypotheses.magnitudes import outlier_channel, overflow
from replay.diagnosis.hypotheses.memory import flickering, unwritten, zeroed
from replay.diagnosis.hypotheses.memory_layout import layout
from replay.diagnosis.hypotheses.nonfinite import nonfinite_hidden, nonfinite_input
from replay.diagnosis.hypotheses.order import late_sink
from replay.diagnosis.hypotheses.others import kv_heads, of_other_sequences
from replay.diagnosis.hypotheses.readings import misread
from replay.diagnosis.hypotheses.stale import Probe, stale
from replay.diagnosis.hypotheses.strides import strides
from replay.diagnosis.kernel_runner import runner
from replay.diagnosis.raising import cause_of_exception
from replay.diagnosis.subject import Evidence, KernelRunner, Subject, heads_of, row_shares
from replay.isolation.in_process import InProcessJudge
from replay.isolation.inputs import Inputs
from replay.isolation.judge import Judged
from replay.isolation.process_state import ProcessState
from replay.kernels.registry import Kernel
from replay.rows.errors_of_output import AccuracyClass

AS_RECORDED: tuple[Hypothesis, ...] = (unwritten, flickering, strides)
"""Hypotheses about the call as it was recorded; these causes make other experiments meaningless."""

HYPOTHESES: tuple[Hypothesis, ...] = (
    misread,
    layout,
    odd_length,
    late_sink,
    overflow,
    outlier_channel,
    kv_heads,
    head_dim,
    too_large,
    of_other_sequences,
    zeroed,
)
"""Hypotheses about the same values in dense memory, in the order of their tests.

The first need no run of the kernel. After these, narrow experiments precede wide ones.
"""

HARMLESS = ("unsupported", "unavailable")


class Examined(NamedTuple):
    """Result of an examination; empty if the kernel is right."""

    evidence: Evidence | None = None
    refused: str = ""
    """Reason why the kernel refuses the call."""
    untried: str = ""
    """Reason why the kernel could not be examined."""


def examine(
    kernel: Kernel, call: AttentionCall, settings: Settings, process_state: ProcessState
) -> Examined:
    """Judge a kernel on a call; if the kernel is wrong, find out why.

    Raises:
        ContextLost: the kernel made the GPU, or this process, unusable.
    """
    if found := nonfinite_input(call):
        return Examined(found)
    if kernel is CAPTURED:
        return Examined(*examine_captured(call, settings))
    forms = Forms.of(call)
    inputs = Inputs(*forms.all)
    judge = _Keeping(call, thresholds=settings.tolerances)
    checker = Checker(forms, inputs, process_state, judge, settings, WorkerOptions())
    checked = checker.check(kernel)
    status, reason = checked.finding
    if status in HARMLESS:
        return Examined(refused=reason)
    if status not in ("ok", "inaccurate", "not-timed"):
        found = None
        if status == "error" and forms.form(kernel, settings.device).refused is None:
            found = cause_of_exception(checked, settings, process_state)
        return Examined(found or failure(status, reason))
    kernel = checked.kernel
    run_on = runner(kernel, settings, process_state)
    # Changed inputs would spoil every later experiment, so this error is reported first.
    if checked.changed_inputs:
        names = checked.changed_inputs
        then = "" if status == "ok" else "; its output is wrong too"
        sentence = f"the call changed the values of {' and '.join(names)}{then}"
        numbers = {"changed": list(names), "judged": reason}
        place = _first_changed(checked.call, run_on)
        return Examined(Evidence("input-changed", sentence, numbers, place))
    probe = Probe(checked.call, run_on, kernel.accuracy_class, kernel.chosen)
    # A kernel with a cache may be correct on every single call, so correct kernels are probed too.
    if found := stale(probe):
        return Examined(found)
    if status != "inaccurate":
        spoilt_rows = 0 if checked.accuracy is None else checked.accuracy.spoilt_rows
        return Examined(nonfinite_hidden(checked.call, spoilt_rows))
    expected = Expected.of(checked.call, checked.chosen)
    subject = Subject.of(
        checked.call,
        judge.output,
        run_on,
        kernel.accuracy_class,
        kernel.chosen,
        expected,
        reason,
    )
    return Examined(_cause(subject, expected, checked))


def _cause(subject: Subject, expected: Expected, checked: CheckedKernel) -> Evidence:
    """Return the evidence for the first cause that an experiment confirms."""
    evidence, untested = first_evidence(subject, expected, AS_RECORDED, HYPOTHESES)
    if evidence is None:
        evidence = _unknown(subject, expected, checked)
    if untested:
        evidence = replace(evidence, numbers={**evidence.numbers, "untested": untested})
    return evidence.at(subject.place)


def failure(status: str, reason: str, where: str = "") -> Evidence:
    """Return the evidence for a kernel that returned nothing.

    Args:
        where: mode that the kernel ran in, in words; empty for eager mode.
    """
    what = "it failed" if status == "error" else f"{status} while it ran"
    return Evidence("unknown", f"{what}{where and ' '}{where}: {reason}", {"status": status})


class _Keeping(InProcessJudge):
    """Judge that keeps the last output, which belongs to the call that was found wrong."""

    output: Tensor

    def judge(
        self,
        kernel: str,
        accuracy_class: AccuracyClass,
        output: Tensor,
        *others: Any,
        **options: Any,
    ) -> Judged:
        self.output = output.clone()
        return super().judge(kernel, accuracy_class, output, *others, **options)


def _first_changed(call: AttentionCall, run_on: KernelRunner) -> HeadRows | None:
    """Find the first head whose inputs the kernel changes in another run, and the changed rows."""
    given = call.to(call.device)
    run_on(given)
    for name in ("query", "key", "value"):
        before, after = getattr(call, name), getattr(given, name)
        rows = ((before != after) & ~(before.isnan() & after.isnan())).any(dim=3)
        if bool(rows.any()) and call.page_table is None:
            batch, head, _ = (int(each) for each in rows.nonzero()[0])
            group = 1 if name == "query" else call.shape.q_heads // call.shape.kv_heads
            return HeadRows(batch, head * group, rows[batch, head].nonzero().flatten())
    return None


def _unknown(subject: Subject, expected: Expected, checked: CheckedKernel) -> Evidence:
    """Return the known facts about an error of unknown cause."""
    wrong = row_shares(subject.output, expected, subject.accuracy_class) > 1
    rows = wrong[subject.place.batch, subject.place.head].nonzero().flatten().tolist()
    numbers: dict[str, Any] = {
        "judged": subject.sentence,
        "wrong_rows": int(wrong.sum()),
        "rows": wrong.numel(),
        "wrong_heads": int(wrong.any(dim=2).sum()),
        "heads": wrong.shape[0] * wrong.shape[1],
        "queries": [rows[0], rows[-1]] if rows else None,
        "error": subject.own.error if subject.own.error < math.inf else None,
    }
    where = "no single row is far off, but all rows together are too inexact"
    if numbers["wrong_rows"]:
        where = (
            f"{numbers['wrong_rows']:,} of {numbers['rows']:,} rows are wrong, in {heads_of(wrong)}"
        )
    if rows:
        which = f"query {rows[0]}" if len(rows) == 1 else f"queries {rows[0]} to {rows[-1]}"
        where += f" ({which} of the worst)"
    sentence = f"{where}; no known cause explains it: {subject.sentence}"
    # The most common cause without a hypothesis is an 8-bit kernel not registered as quantised.
    is_maybe_quantised = subject.accuracy_class == "exact" and expected.quantised is not None
    if is_maybe_quantised and judge(subject.output, expected, "quantised").passed:
        sentence = (
            f"{where}, though not beyond the error of an 8-bit kernel: {subject.sentence}; if it "
            'computes in 8 bits, register it with accuracy_class="quantised"'
        )
        numbers["passes_as_quantised"] = True
    if checked.not_deterministic:
        sentence = f"{sentence}; {checked.not_deterministic}"
        numbers["flags"] = [checked.not_deterministic]
    return Evidence("unknown", sentence, numbers)
