"""Comparison of two runs, by `replay compare` and by the public function."""

import html
import json
import re
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

import attention_replay as ar
from replay.rows.row import SpeedupOver
from replay.rows.row_files import save_jsonl
from tests.in_this_process import RunCli, refusal
from tests.replay.comparison.simulated import run

RUNS = ("before.jsonl", "slow.jsonl")


@pytest.fixture(autouse=True)
def _home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.delenv("GITHUB_ACTIONS", raising=False)
    save_jsonl(run("before", {"a": 0.5}).rows, Path("before.jsonl"))
    save_jsonl(run("equal", {"a": 0.5}).rows, Path("equal.jsonl"))
    save_jsonl(run("slow", {"a": 0.525}).rows, Path("slow.jsonl"))
    save_jsonl(run("other", {"b": 0.5}, calls=1).rows[1:], Path("other.jsonl"))
    Path("deep.jsonl").write_text("[" * 100_000 + "\n")


def test_fail_on_exits_with_1_for_a_slower_kernel(run_cli: RunCli) -> None:
    code, out, err = run_cli("compare", "before.jsonl", "equal.jsonl", "--fail-on", "slow:3%")
    assert (code, err) == (0, "")
    assert "nothing changed" in out
    code, out, err = run_cli("compare", "before.jsonl", "slow.jsonl", "--fail-on", "slow:3%,error")
    assert code == 1
    assert err == "replay compare: failed: slow:3%: a on 12 of 12 calls\n"
    assert "slower: a" in out
    others = ("--fail-on", "slow:10%,inaccurate,less-accurate,error,missing")
    for asked in ((), others):
        assert run_cli("compare", "before.jsonl", "slow.jsonl", *asked)[0] == 0


def test_fail_on_exits_with_3_if_noise_hides_the_answer(run_cli: RunCli) -> None:
    for name in ("noisy", "again"):
        save_jsonl(run(name, {"a": 0.5}, kernel_noise=0.5).rows, Path(f"{name}.jsonl"))
    code, _, err = run_cli("compare", "noisy.jsonl", "again.jsonl", "--fail-on", "slow:3%")
    assert code == 3
    assert err.startswith("replay compare: undecided: slow:3%: a (12 of 12 calls, measured ")
    assert "a quieter machine would decide (slowdowns below " in err
    assert run_cli("compare", "noisy.jsonl", "again.jsonl")[0] == 0


@pytest.mark.parametrize(
    ("doubt", "reason"),
    [
        ("interrupted", "too few undisturbed samples; run again on a quieter machine"),
        ("too-few-rounds", "fewer than 6 rounds; use more"),
        ("unconfirmed", "unconfirmed: its blocks"),
    ],
)
def test_rows_that_may_hide_a_slowdown_are_named_everywhere(
    run_cli: RunCli, monkeypatch: pytest.MonkeyPatch, doubt: Any, reason: str
) -> None:
    base, mine, other = run("quiet", {"m.py:a": 0.5, "b": 0.5}, calls=1).rows
    measured = SpeedupOver(0.02, None, None, "inconclusive", doubt, base.kernel)
    hidden, words = replace(mine, speedup=measured), ", measured 0.01×"
    if doubt == "unconfirmed":
        hidden, words = replace(mine, speedup=None, flags=(reason, reason)), ""
    save_jsonl([base, mine, other], Path("quiet.jsonl"))
    save_jsonl([base, hidden, replace(other, status="inaccurate")], Path("wrong.jsonl"))
    save_jsonl([base, hidden, other], Path("busy.jsonl"))
    monkeypatch.setenv("GITHUB_ACTIONS", "true")
    files = ("--markdown", "x.md", "--junit", "x.xml", "--fail-on", "inaccurate,slow")
    code, _, err = run_cli("compare", "quiet.jsonl", "wrong.jsonl", *files)
    sentence = f"m.py:a (1 of 1 call{words}): {reason}"
    _, warning, final = err.splitlines()
    assert warning == f"::warning title=slow is undecided%3A m.py%3Aa,file=m.py::{sentence}"
    assert (code, final) == (
        1,
        f"replay compare: failed: inaccurate: b on call-0; undecided: slow: {sentence} "
        "(the smallest slowdown that would show is unknown)",
    )
    comment = re.sub(r"<.?code>", "", html.unescape(Path("x.md").read_text()))
    assert f"🔴 wrong: b (1 of 1 call); undecided: {sentence}\n" in comment
    assert "| m.py:a | ? |" in comment
    assert "The smallest slowdown that would show is unknown" in comment
    assert f'<skipped message="undecided: {reason}' in Path("x.xml").read_text()
    assert run_cli("compare", "quiet.jsonl", "busy.jsonl", *files)[0] == 3
    assert "🟡 undecided: " in Path("x.md").read_text()


def test_several_runs_are_compared_with_the_first(run_cli: RunCli) -> None:
    _, out, _ = run_cli("compare", "before.jsonl", "equal.jsonl", "slow.jsonl")
    assert out.index("before.jsonl → equal.jsonl") < out.index("before.jsonl → slow.jsonl")
    code, _, err = run_cli(
        "compare", "before.jsonl", "equal.jsonl", "slow.jsonl", "--fail-on", "slow"
    )
    assert (code, err) == (1, "replay compare: failed: slow: a on 12 of 12 calls\n")


def test_every_format_is_written(run_cli: RunCli) -> None:
    files = {"--markdown": "x.md", "--json": "x.json", "--junit": "x.xml", "--fail-on": "error"}
    given = [part for pair in files.items() for part in pair]
    assert run_cli("compare", "before.jsonl", "slow.jsonl", *given)[0] == 0
    assert Path("x.md").read_text().startswith("### before.jsonl → slow.jsonl")
    assert "<testsuites " in Path("x.xml").read_text()
    assert json.loads(Path("x.json").read_text())[0]["after"] == "slow.jsonl"
    _, out, err = run_cli("compare", "before.jsonl", "slow.jsonl", "--json", "-")
    assert json.loads(out)[0]["before"] == "before.jsonl"
    assert "slower: a" in err


@pytest.mark.parametrize(
    ("arguments", "sentence"),
    [
        (("before.jsonl", "nope.jsonl"), "there is no file nope.jsonl: write one"),
        (("before.jsonl", "."), "cannot read .: Is a directory; name a file of `replay --json`"),
        (("before.jsonl", "empty.jsonl"), "empty.jsonl holds no rows"),
        (("before.jsonl", "old.jsonl"), "old.jsonl holds rows in format 1, but this version"),
        (("before.jsonl", "picture.jsonl"), "picture.jsonl was not written by `replay --json`"),
        (("before.jsonl", "other.jsonl"), "have no kernel on the same call in common"),
        (("before.jsonl", "./before.jsonl"), "is the same file twice: name two runs"),
        (("before.jsonl", "deep.jsonl"), "deep.jsonl, line 1: not a row of `replay --json`"),
        (("before.jsonl", "slow.jsonl", "--spread", "x"), "expected a share such as 1.5%"),
        (("before.jsonl", "slow.jsonl", "--spread", "other.jsonl"), "no kernel on the same call"),
        (("before.jsonl", "slow.jsonl", "--fail-on", "fast"), "no such condition, choose from"),
        (("before.jsonl", "slow.jsonl", "--json", "slow.jsonl"), "--json would overwrite slow"),
        (
            ("before.jsonl", "slow.jsonl", "--spread", "equal.jsonl", "--json", "equal.jsonl"),
            "--json would overwrite equal.jsonl: name another file",
        ),
        (("before.jsonl", "slow.jsonl", "--json", "-", "--markdown", "-"), "both name stdout"),
        (("before.jsonl", "slow.jsonl", "--junit", "x.xml"), "--junit requires --fail-on"),
        (("before.jsonl", "slow.jsonl", "--doctor", "."), "give --markdown FILE"),
    ],
)
def test_wrong_usage_is_refused(run_cli: RunCli, arguments: tuple[str, ...], sentence: str) -> None:
    Path("empty.jsonl").touch()
    Path("old.jsonl").write_text('{"kernel": "a", "call": {}}\n')
    Path("picture.jsonl").write_bytes(b"\x89PNG\xff")
    assert sentence in refusal(run_cli, "compare", *arguments)


def test_public_function_compares_rows_and_files() -> None:
    rows = {name: ar.Rows.read(name) for name in RUNS}
    compared = ar.compare(rows["before.jsonl"], "slow.jsonl", spread=0.01)
    assert "slower: a" in str(compared)
    assert compared.spread.share == 0.01
    assert compared._repr_markdown_().startswith("### before → slow.jsonl")
