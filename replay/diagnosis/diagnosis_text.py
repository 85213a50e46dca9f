"""Diagnoses as text: one paragraph per kernel and cause."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from capture.text.counted import counted
from capture.text.printable import printable
from replay.diagnosis.diagnosis import NONFINITE_INPUT, Diagnosis

MOST_PLACES = 4
"""Maximum number of further places listed; the JSON output has all places."""


def paragraphs(found: Sequence[Diagnosis], examined: int) -> Iterator[str]:
    """Yield lines that name the wrong kernels, the worst place, the cause and a replacement.

    Args:
        examined: number of examined pairs of kernel and call.
    """
    if not found:
        yield f"healthy: no error in {counted(examined, 'run')} of a kernel on a call"
        return
    groups: dict[tuple[str, str], list[Diagnosis]] = {}
    for each in found:
        kernel = "any kernel" if each.cause == NONFINITE_INPUT else each.kernel
        members = groups.setdefault((kernel, each.cause), [])
        if each.kernel == kernel or each.call not in [member.call for member in members]:
            members.append(each)
    for (kernel, cause), members in groups.items():
        first = worst(members)
        yield printable(f"{kernel}: {cause} on {counted(len(members), 'call')}")
        yield printable(f"  {first.call}: {first.place}: {first.sentence}")
        if first.instead:
            advice = "what to do" if cause == NONFINITE_INPUT else "use instead"
            yield printable(f"  {advice}: {first.instead}")
        others = [each for each in members if each is not first]
        for each in others[:MOST_PLACES]:
            yield printable(f"  also {each.call}: {each.place}")
        if len(others) > MOST_PLACES:
            yield f"  and {counted(len(others) - MOST_PLACES, 'more call')} (--json lists all)"
        yield ""
    of_inputs = sum(each.cause == NONFINITE_INPUT for each in found)
    wrong = [each for each in found if each.is_wrong and each.cause != NONFINITE_INPUT]
    right = len(found) - len(wrong) - of_inputs
    if of_inputs:
        yield f"{of_inputs} of {examined} runs have inputs that are not finite"
    if wrong or right:
        kernels = counted(len({each.kernel for each in wrong}), "kernel")
        end = f"{len(wrong)} of {examined} runs of a kernel on a call are wrong"
        end += f", by {kernels}" if wrong else ""
        yield end + (
            f"; {right} split{'s' if right == 1 else ''} a compiled graph" if right else ""
        )


def worst(members: Sequence[Diagnosis]) -> Diagnosis:
    """Return the diagnosis with the largest error; NaN and infinity count as the largest."""

    def error(diagnosis: Diagnosis) -> float:
        found = diagnosis.evidence.get("error", 0.0)
        return float("inf") if found is None else float(found)

    return max(members, key=error)
