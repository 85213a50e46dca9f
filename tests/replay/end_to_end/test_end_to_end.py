"""The whole command on a small model, with real processes: known costs, and kernels that kill."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from replay.cli.main import main
from replay.end_to_end.reasons import in_ms
from replay.plan.plan import Budget, Choice, Plan

from .conftest import CALLS, SLOW_SECONDS

Checks = Callable[..., dict[str, dict[str, Any]]]


def test_a_known_delay_is_predicted_and_measured(checks: Checks) -> None:
    """So much longer than the model that its cost is known within a few percent."""
    found = checks("slow", "--rounds", "5", "--model-rounds", "7")
    own, slow = found["the model's own"], found["slow"]
    assert own["status"] == slow["status"] == "ok"
    assert (slow["hits"], slow["own_calls"], slow["fallbacks"]) == (CALLS, 0, {})
    assert (own["hits"], own["own_calls"]) == (0, CALLS)  # behind the same hook
    for span, calls in (("run", CALLS), ("denoise", CALLS // 4)):
        predicted = slow["prediction"]["run" if span == "run" else "phases"]
        predicted = predicted if span == "run" else predicted[span]
        before = own["measured"][span]["ms"]["p50"] / 1000
        expected = before + calls * SLOW_SECONDS
        assert predicted["new_seconds"]["value"] == pytest.approx(expected, rel=0.05)
        assert slow["measured"][span]["ms"]["p50"] / 1000 == pytest.approx(expected, rel=0.05)
        assert slow["attention_seconds"][span] == pytest.approx(calls * SLOW_SECONDS, rel=0.05)
        assert slow["measured"][span]["speedup"]["verdict"] == "slow"
    # The delay changes nothing else.
    assert slow["drift"] == pytest.approx(
        {"relative_l1": 0, "cosine": 1, "nan_count": 0, "baseline_nan_count": 0}
    )


def test_what_a_kernel_does_to_the_model_costs_its_own_row(checks: Checks) -> None:
    names = "segfaults,raises,fails,hangs,wrong"
    found = checks(names, "--rounds", "3", "--model-rounds", "3", "--timeout", "6")
    assert list(found) == ["the model's own", *names.replace("fails,", "").split(","), "fails"]
    status = {name: (each["status"], each["reason"]) for name, each in found.items()}
    assert status["segfaults"] == (
        "crash",
        "the worker was ended by SIGSEGV; the model was rebuilt for the remaining runs",
    )
    assert status["raises"] == ("error", "ValueError: not today")
    assert status["hangs"][0] == "timeout"
    assert "6 s" in status["hangs"][1]
    assert status["fails"] == (
        "error",
        "not run in the model because it failed in the replay: ValueError: nowhere",
    )
    wrong = found["wrong"]
    assert status["wrong"] == ("ok", "")
    assert wrong["measured"]["run"]["ms"]["n"] == 3
    assert 0 < wrong["drift"]["relative_l1"] < 0.01


def test_a_plan_is_run_with_the_kernels_it_names(checks: Checks, workshop: Path) -> None:
    path = "layers.0"
    choice = Choice(path, "denoise", "kernels.py:wrong", True, True, None, None, None, 0.0, 4, 1)
    budget = Budget("cosine", 0.9)
    plan = workshop / "plan.json"
    Plan("model.py:build", "", budget, "torch-default", [choice]).save(plan)
    found = checks("", "--rounds", "3", "--model-rounds", "3", "--use-plan", str(plan))
    assert list(found) == ["the model's own", "wrong", "plan.json"]
    everywhere, planned = found["wrong"], found["plan.json"]
    assert (everywhere["hits"], everywhere["fallbacks"]) == (CALLS, {})
    assert (planned["hits"], planned["fallbacks"]) == (4, {"not in the plan": CALLS - 4})
    assert 0 < planned["drift"]["relative_l1"] < everywhere["drift"]["relative_l1"]
    calls = planned["prediction"]["run"]["calls"]
    assert (calls["swapped"], calls["own"]) == (4, CALLS - 4)


def test_a_model_that_fails_by_itself_is_one_sentence(
    workshop: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(workshop)
    (workshop / "broken").touch()
    try:
        arguments = ["--dir", "recorded", "--e2e", "--trust-code", "--rounds", "3"]
        with pytest.raises(SystemExit) as stopped:
            main([*arguments, "--kernels", "torch-math"])
    finally:
        (workshop / "broken").unlink()
    assert stopped.value.code == 2
    last = capsys.readouterr().err.splitlines()[-1]
    assert last == (
        "replay: the model fails with its own attention: ValueError: the model is broken"
    )


def test_the_paragraph_that_explains_a_kernel(
    checks: Checks, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    told = checks("slow", "--rounds", "5", "--model-rounds", "3")["slow"]
    predicted = told["prediction"]["phases"]["denoise"]
    before, after = predicted["old_seconds"], predicted["new_seconds"]
    capsys.readouterr()
    with pytest.raises(SystemExit) as stopped:
        main(["explain", str(tmp_path / "told.jsonl"), "--span", "denoise"])
    text = " ".join(capsys.readouterr().out.split())
    assert stopped.value.code == 0
    assert text.startswith("kernels.py:slow in model.py:build, a denoising step: Attention takes ")
    assert f" of {in_ms(before['value'])} (" in text
    assert f"That predicts {in_ms(after['value'])} (" in text
    assert f"measured: {in_ms(told['measured']['denoise']['ms']['p50'] / 1000)} (" in text


@pytest.mark.parametrize(
    ("line", "sentence"),
    [
        ('{"kernel": "fast"}', "was not written by `replay --e2e-json` of this version"),
        ("[1]", "was not written by `replay --e2e-json` of this version"),
        ("[" * 100_000, "was not written by `replay --e2e-json` of this version"),
        ("", "has no kernel to explain: choose some with --kernels"),
        (None, "cannot read"),
    ],
)
def test_files_that_explain_nothing(
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    line: str | None,
    sentence: str,
) -> None:
    path = tmp_path / "told.jsonl"
    if line is not None:
        path.write_text(line)
    with pytest.raises(SystemExit) as stopped:
        main(["explain", str(path)])
    assert stopped.value.code == 2
    assert sentence in capsys.readouterr().err
