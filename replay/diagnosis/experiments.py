"""Experiments with a kernel, in the order in which they can be interpreted."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from replay.accuracy.verdict import Expected
from replay.diagnosis.hypotheses.memory import flickers
from replay.diagnosis.subject import Evidence, Flickers, Subject
from replay.kernels.failures import classify

Hypothesis = Callable[[Subject], Evidence | None]


def first_evidence(
    subject: Subject,
    expected: Expected | None,
    as_recorded: Sequence[Hypothesis],
    in_dense_memory: Sequence[Hypothesis],
) -> tuple[Evidence | None, dict[str, str]]:
    """Test hypotheses until one is confirmed.

    Args:
        expected: right output of the subject's call; None if the kernel raises.
        as_recorded: hypotheses about the call as it was recorded.
        in_dense_memory: hypotheses about the same values in dense memory, tested afterwards.

    Returns:
        The evidence, or None if no hypothesis is confirmed; and the reasons why hypotheses could
        not be tested, by name.
    """
    untested: dict[str, str] = {}

    def tested(hypotheses: Sequence[Hypothesis]) -> Evidence | None:
        for hypothesis in hypotheses:
            try:
                evidence = hypothesis(subject)
            except (RuntimeError, MemoryError) as error:  # a larger call may not fit into memory
                untested[hypothesis.__name__] = classify(error).reason
                continue
            if evidence is not None:
                return evidence
        return None

    try:
        evidence = tested(as_recorded)
        if evidence is None:
            # Derived tensors are dense, so an experiment would otherwise change strides too.
            if subject.loose:
                subject = subject.with_call(subject.in_dense_memory(), expected)
            evidence = tested(in_dense_memory)
    except Flickers as error:
        evidence = flickers(subject, error.score)
    return evidence, untested
