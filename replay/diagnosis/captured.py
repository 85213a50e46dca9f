"""Recorded output treated as a kernel: the result of the model's own attention."""

from __future__ import annotations

from typing import Any

from torch import Tensor

from capture.call.attention_call import AttentionCall
from replay.accuracy.verdict import Expected, judge
from replay.bench.settings import Settings
from replay.diagnosis.hypotheses.memory import zeroed
from replay.diagnosis.hypotheses.memory_layout import layout
from replay.diagnosis.hypotheses.nonfinite import nonfinite_hidden
from replay.diagnosis.hypotheses.readings import misread
from replay.diagnosis.subject import Evidence, Subject
from replay.kernels.registry import Kernel, catalogue, find
from replay.rows.errors_of_output import AccuracyClass

NAME = "captured"


def kernel_named(name: str) -> Kernel:
    """Return the kernel with that name, or one that returns the recorded output.

    Raises:
        KernelNameError: no kernel has this name.
    """
    return CAPTURED if name == NAME else find(name)


def _cannot_run(*_: Any, **__: Any) -> Tensor:
    raise NotImplementedError("a recorded output cannot be computed again")


CAPTURED = Kernel(NAME, _cannot_run, about="the recorded output")


def examine_captured(call: AttentionCall, settings: Settings) -> tuple[Evidence | None, str]:
    """Find the error of the recorded output, without running a kernel.

    Returns:
        The evidence if the output is wrong, and the reason if it cannot be judged.
    """
    if call.output is None:
        return None, "the recording has no outputs"
    accuracy_class = _class_of(call)
    expected = Expected.of(call)
    verdict = judge(call.output, expected, accuracy_class, settings.tolerances)
    if verdict.passed:
        return nonfinite_hidden(call, verdict.spoilt_rows), ""
    subject = Subject.of(
        call, call.output, lambda *_: None, accuracy_class, None, expected, verdict.sentence
    )
    evidence = misread(subject) or layout(subject) or zeroed(subject)
    if evidence is None:
        kernel = call.origin.backend or call.origin.entry_point
        evidence = Evidence(
            "unknown",
            f"the output of the model's own attention ({kernel}) is wrong: {verdict.sentence}; "
            "examine the kernel itself to learn why",
            {"judged": verdict.sentence, "error": subject.own.error},
        )
    return evidence.at(subject.place), ""


def _class_of(call: AttentionCall) -> AccuracyClass:
    """Choose the accuracy rule; an unknown backend outside SDPA may compute in 8 bits."""
    kernel = catalogue().get(call.origin.backend)
    if kernel is not None and kernel.accuracy_class != "sparse":
        return kernel.accuracy_class
    return "exact" if call.origin.entry_point == "sdpa" else "quantised"
