"""Comparisons list the worst change first in every format, and names stay text."""

import json
import re
from collections.abc import Callable
from dataclasses import replace
from xml.etree import ElementTree

import pytest

from replay.comparison.comparison import Comparison, compare, to_json
from replay.comparison.conditions import read_conditions
from replay.comparison.row_matching import Run
from replay.comparison.speed_change import NO_SPREAD, Spread
from replay.report.comparison.annotations import workflow_commands
from replay.report.comparison.comment import BUDGET, to_markdown
from replay.report.comparison.junit import to_junit
from replay.report.comparison.plain_text import print_comparison
from replay.report.comparison.sections import LINES, sections
from replay.rows.row import KernelId, Row
from tests.factories import call_facts, row
from tests.printed import printed
from tests.replay.comparison.simulated import HERE, judged, noisy, run

HOSTILE = "<script>alert(1)</script>|[x](http://e.com) **@all** #1 `&` [red]\x1b[2J\n_a_ b__c"


def as_text(found: Comparison) -> str:
    return printed(print_comparison, sections(found))


def as_markdown(found: Comparison) -> str:
    return to_markdown([found])


FORMATS = pytest.mark.parametrize("write", [as_text, as_markdown])


def changed() -> Comparison:
    """Return a comparison of five kernels: slower, gone, new, crashing, and less accurate."""
    before = run("before.jsonl", {"good": 0.5, "bad": 0.5, "gone": 0.5}).rows
    after = run("after.jsonl", {"good": 0.5, "bad": 0.53, "new": 0.5}, drift=0.01).rows
    old = [*before, row("breaks", machine=HERE), judged(noisy(4, 16))]
    broken = row("breaks", status="crash", reason="signal 11", machine=HERE)
    new = [*after, broken, judged(noisy(4, 16, level=2e-3))]
    return compare(Run("before.jsonl", old), Run("after.jsonl", new), Spread(0.01, "self-test"))


def words(text: str) -> str:
    return " ".join(re.sub(r"<[^>]*>|&#\d+;", " ", text).split())


@FORMATS
def test_exactly_the_changes_are_reported(write: Callable[[Comparison], str]) -> None:
    text = words(write(changed()))
    assert "failing: breaks (1 of 1 call); less accurate: mine (1 of 1 call); slower: bad;" in text
    assert "before.jsonl" in text
    assert "speed-ups over torch-default are compared" in text
    assert "spread between runs: 1.0%" in text
    assert "ok → crash: signal 11" in text
    for each in ("error-grew", "missing", "gone", "new"):
        assert each in text
    assert write is as_markdown or "good" not in text


def test_a_kernel_that_is_slower_on_some_calls_is_named_with_them() -> None:
    kernels = {f"k{at}": 0.5 for at in range(2)}
    before, slow = run("before", kernels).rows, run("after", {**kernels, "k1": 0.6}).rows
    mixed = [*slow[: 5 * 3], *before[5 * 3 :]]
    found = sections(compare(Run("before", before), Run("after", mixed), NO_SPREAD))
    assert found.answer == "slower: k1 (5 of 12 calls)"
    assert found.is_worse


def test_the_worst_comes_first() -> None:
    (_, rows, _) = sections(changed()).tables
    kernels = [line[0] for line in rows.lines]
    assert kernels == ["breaks", "mine", *["bad"] * 12]
    slow = [float(line[2].partition("×")[0]) for line in rows.lines[2:]]
    assert slow == sorted(slow)


def test_text_is_80_columns_wide_and_short() -> None:
    before = run("before", {"bad": 0.5}, calls=LINES + 5)
    after = run("after", {"bad": 0.6}, calls=LINES + 5)
    text = as_text(compare(before, after, NO_SPREAD))
    assert max(map(len, text.splitlines())) <= 80
    assert "and 5 more: --json" in text
    assert "spread between runs: not given" in " ".join(text.split())


def hostile() -> Comparison:
    facts = call_facts(HOSTILE, module=HOSTILE)
    machine = replace(HERE, torch=HOSTILE)
    before = [row(HOSTILE, facts, machine=HERE), row(f"{HOSTILE} gone", facts)]
    after = [row(HOSTILE, facts, status="crash", reason=HOSTILE, machine=machine)]
    return compare(Run(HOSTILE, before), Run(f"{HOSTILE}2", after), Spread(0.1, HOSTILE))


def test_hostile_names_are_text_on_a_terminal() -> None:
    text = as_text(hostile())
    assert "\x1b" not in text
    assert "[red]" in text


def test_hostile_names_are_text_in_markdown() -> None:
    slower = compare(run("a", {HOSTILE: 0.5}), run("b", {HOSTILE: 0.6}), NO_SPREAD)
    text, chart, end = as_markdown(slower).replace("```mermaid", "```").split("```")
    assert set(re.findall(r"[^\w\s]", chart.partition("x-axis")[2])) <= set('.:/-[]",×>')
    text += end + as_markdown(hostile())
    assert not re.search(r"<(?!/?(code|details|summary)>)", text)
    without_code = re.sub(r"<code>[^<]*</code>", "", text)
    assert not re.search(r"[@#`\[\]](?!##? )", without_code.replace("### ", ""))
    assert "http" not in without_code
    inside = "".join(re.findall(r"<code>([^<]*)</code>", text))
    assert not re.search(r"[^\w/&#;-]|_", inside)
    for table in re.findall(r"(?:^\|.*\n)+", text, re.MULTILINE):
        assert len({line.count("|") for line in table.splitlines()}) == 1


def test_usual_names_are_plain_in_markdown() -> None:
    before = run("my_runs/before.jsonl", {"k.py:my_attention[keep=0.05]": 0.5})
    after = run("my_runs/after.jsonl", {"k.py:my_attention[keep=0.05]": 0.6})
    text = as_markdown(compare(before, after, NO_SPREAD))
    assert "### my_runs/before.jsonl → my_runs/after.jsonl on GPU 1\n" in text
    assert "| call-0 (step 0 layers.0) |" in text
    assert "<code>k&#46;py&#58;my&#95;attention&#91;keep&#61;0&#46;05&#93;</code>" in text


def test_markdown_fits_into_a_comment_whatever_there_is() -> None:
    def rows(kernel: str) -> list[Row]:
        many = (call_facts(f"{at} {'<&|' * 100}", f"layers.{at}") for at in range(500))
        return [row(kernel, facts, status="ok") for facts in many]

    old = rows("a" * 300)
    new = [replace(each, status="crash", reason="|" * 1000) for each in old]
    found = compare(Run("b" * 999, old), Run("c" * 999, new), NO_SPREAD)
    for compared in ([found], [found] * 3):
        text = to_markdown(compared)
        assert len(text.encode()) <= BUDGET
        assert text.count("<code>") == text.count("</code>")
    assert re.search(r"and \d+ more", as_markdown(found))


def test_comment_has_commits_and_a_matrix_of_changes() -> None:
    stamps = ("a1b2c3d", "2026-11-27T08:15:00Z"), ("e4f5a6b+", "2026-11-28T08:16:00Z")
    runs = [
        Run(run.name, [replace(each, commit=commit, measured_at=at) for each in run.rows])
        for run, (commit, at) in zip((changed().before, changed().after), stamps, strict=True)
    ]
    text = to_markdown([compare(*runs, NO_SPREAD)], [{KernelId("mine"): "no mask"}])
    title, _, verdict, _, doctor, _, machine, _, *matrix = text.splitlines()
    assert title == "### a1b2c3d (2026-11-27) → e4f5a6b+ (2026-11-28) on GPU 1"
    assert verdict.startswith("🔴 failing: breaks")
    assert doctor == "🩺 mine: no mask"
    assert machine.endswith("measured 2026-11-27 08:15 and 2026-11-28 08:16 UTC")
    assert {"| breaks | 💥 crash |", "| bad | 🔴 0.94× |", "| good | = |"} <= {*matrix}
    assert "Slowdowns below " in text
    assert 'x-axis ["bad"]' in text


def test_junit_has_a_case_for_each_kernel_and_call() -> None:
    tree = ElementTree.fromstring(to_junit([changed()], read_conditions("slow:3%,error,missing")))
    kinds = {
        (case.get("classname"), case.get("name")): next((part.tag for part in case), "passed")
        for case in tree.iter("testcase")
    }
    assert kinds["breaks", "call"] == kinds["gone", "call-0"] == kinds["bad", "call-0"] == "failure"
    assert kinds["new", "call-0"] == "skipped"
    assert kinds["good", "call-0"] == kinds["mine", "call"] == "passed"
    (suite,) = tree
    assert suite.get("tests") == str(len(kinds))
    assert ElementTree.fromstring(to_junit([hostile()], read_conditions("error")))


def test_failed_conditions_are_workflow_commands() -> None:
    rows = [row("a.py:f[x=1,y=2]", machine=HERE), row("b", machine=HERE)]
    crashed = [replace(each, status="crash", reason="50%\nlost") for each in rows]
    found = compare(Run("before", rows), Run("after", crashed), NO_SPREAD)
    assert [*workflow_commands([found], read_conditions("slow,error"))] == [
        "::error title=error%3A a.py%3Af[x=1%2Cy=2],file=a.py::a.py:f[x=1,y=2] on call: "
        "ok → crash: 50%25 lost",
        "::error title=error%3A b::b on call: ok → crash: 50%25 lost",
    ]


def test_json_has_every_row() -> None:
    found = json.loads(json.dumps(to_json(changed()), allow_nan=False))
    assert len(found["rows"]) == 12 * 3 + 2
    assert len(found["missing"]) == len(found["new"]) == 12
    bad = next(each for each in found["rows"] if each["kernel"] == "bad")
    assert bad["speed"]["verdict"] == "slow"
    assert bad["speed"]["reason"] == "interval-below-1"
    assert bad["status"] == ["ok", "ok"]
