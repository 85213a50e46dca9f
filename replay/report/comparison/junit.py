"""Comparisons as JUnit XML: a suite for each comparison, a case for each kernel and call.

`--fail-on` decides which cases fail.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from xml.etree import ElementTree

from capture.text.printable import printable
from replay.comparison.comparison import Comparison, Pair
from replay.comparison.conditions import Condition
from replay.comparison.undecided import undecided
from replay.report.comparison.sections import pair_text, title
from replay.rows.row import KernelId, Row


@dataclass
class _Case:
    kernel: KernelId
    name: str
    row: Row | None = None
    met: str = ""
    """Conditions that the case meets; it fails if there are any."""
    text: str = ""
    """Description of the change."""
    skipped: str = ""


def to_junit(compared: Sequence[Comparison], conditions: Sequence[Condition]) -> str:
    """Format comparisons as JUnit XML, in which a case's time is that of one call, in seconds.

    A case is skipped if it neither fails nor passes: the kernel cannot run or was wrong before too,
    only one of the runs has the row, or noise hides whether a condition is met.
    """
    root = ElementTree.Element("testsuites", name="replay compare")
    for comparison in compared:
        cases = _cases(comparison, conditions)
        suite = ElementTree.SubElement(
            root,
            "testsuite",
            name=title(comparison),
            tests=str(len(cases)),
            failures=str(sum(bool(case.met) for case in cases)),
            errors="0",
            skipped=str(sum(bool(case.skipped and not case.met) for case in cases)),
        )
        if comparison.after.measured_at:
            suite.set("timestamp", comparison.after.measured_at.removesuffix("Z"))
        for case in cases:
            _add(suite, case)
    ElementTree.indent(root)
    text = ElementTree.tostring(root, encoding="unicode")
    return f'<?xml version="1.0" encoding="utf-8"?>\n{text}\n'


def _add(suite: ElementTree.Element, case: _Case) -> None:
    time = case.row.time_ms if case.row else None
    element = ElementTree.SubElement(
        suite,
        "testcase",
        classname=printable(str(case.kernel)),
        name=printable(case.name),
        time=f"{time.p50 / 1e3:.9f}" if time else "0",
    )
    if case.met:
        ElementTree.SubElement(element, "failure", message=case.met).text = case.text
    elif case.skipped:
        ElementTree.SubElement(element, "skipped", message=case.skipped)


def _cases(comparison: Comparison, conditions: Sequence[Condition]) -> list[_Case]:
    reasons: dict[int, str] = {}
    for each in undecided(comparison, conditions):
        for pair in each.pairs:
            reasons.setdefault(id(pair), each.reason)
    cases = [_case(pair, conditions, reasons.get(id(pair), "")) for pair in comparison.pairs]
    for condition in conditions:
        for failure in condition.failures(comparison):
            if not failure.pairs and condition.name == "slow":
                text = printable(f"{failure}")
                cases.append(_Case(failure.kernel, failure.words, met=str(condition), text=text))
    missing_fails = any(condition.name == "missing" for condition in conditions)
    for row in comparison.missing:
        text, met = "the later run has no such row", "missing" if missing_fails else ""
        cases.append(_Case(row.id, row.call.name, None, met, text, f"missing: {text}"))
    cases += [
        _Case(row.id, row.call.name, row, skipped="new: the earlier run has no such row")
        for row in comparison.new
    ]
    return cases


def _case(pair: Pair, conditions: Sequence[Condition], reason: str) -> _Case:
    """Return the case of a pair; `reason` says why a condition is undecided, if one is."""
    after = pair.after
    text = pair_text(pair)
    met = ", ".join(str(condition) for condition in conditions if condition.holds(pair))
    skipped = ""
    if not pair.ran[1] or after.status == "inaccurate":
        skipped = printable(f"{after.status}: {after.reason}")
    elif reason:
        skipped = printable("; ".join(filter(None, (f"undecided: {reason}", text))))
    return _Case(after.id, after.call.name, after, met, text, skipped)
