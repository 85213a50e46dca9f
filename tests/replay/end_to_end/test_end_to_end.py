"""`replay verify` runs a small model in processes, with kernels of known cost or that crash."""

import json
import re
from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple

import pytest

from replay.end_to_end.reasons import in_ms
from replay.plan.plan import Budget, LayerChoice, Plan
from tests.in_this_process import RunCli, refusal

from .conftest import CALLS, SLOW_SECONDS, check


class Told(NamedTuple):
    """Results of one run of the command, and the file of its rows."""

    found: dict[str, dict[str, Any]]
    rows: Path


@pytest.fixture(scope="module")
def plan(workshop: Path) -> Path:
    """A plan with `wrong` in the first of three layers, and plain SDPA in the second.

    It says that the model has another kernel in the second layer.
    """
    choices = [
        LayerChoice(f"layers.{layer}", "denoise", kernel, True, True, None, None, None, 0.0, 4, 1)
        for layer, kernel in enumerate(("kernels.py:wrong", "torch-default"))
    ]
    choices[1] = replace(choices[1], baseline="torch-math")
    written = workshop / "plan.json"
    budget = Budget("cosine", 0.9)
    Plan("model.py:build", "", budget, "torch-default", choices).save(written)
    return written


@pytest.fixture(scope="module")
def told(workshop: Path, plan: Path, tmp_path_factory: pytest.TempPathFactory) -> Told:
    """One run for all tests, since its processes take seconds to start."""
    file = tmp_path_factory.mktemp("told") / "told.jsonl"
    rows = file.with_name("rows.jsonl")
    options = ("--rounds", "3", "--model-rounds", "7", "--plan", str(plan), "--json", str(rows))
    return Told(check(workshop, file, "slow,raises,wrong", *options), rows)


def test_a_known_delay_is_predicted_and_measured(told: Told) -> None:
    """The delay dominates the time of the model. A sleep may last longer than asked, but not less.

    The excess depends on the machine, so only one measured sleep is compared exactly: the
    prediction contains it once per call.
    """
    own, slow = told.found["the model's own"], told.found["slow"]
    assert own["status"] == slow["status"] == "ok"
    assert (slow["hits"], slow["own_calls"], slow["fallbacks"]) == (CALLS, 0, {})
    assert (own["hits"], own["own_calls"]) == (0, CALLS)  # the baseline uses the hook too
    predictions = {"run": slow["prediction"]["run"], **slow["prediction"]["phases"]}
    for span, calls in (("run", CALLS), ("denoise", CALLS // 4)):
        before, after = (predictions[span][f"{each}_seconds"]["value"] for each in ("old", "new"))
        least, most = calls * SLOW_SECONDS, 2 * calls * SLOW_SECONDS
        assert before == pytest.approx(own["measured"][span]["ms"]["p50"] / 1000)
        # Beside the delay, swapping and cold caches cost little.
        assert after == pytest.approx(before - predictions[span]["saved_seconds"], rel=0.05)
        assert least < -predictions[span]["saved_seconds"] + 0.01 * least < most
        assert least < slow["measured"][span]["ms"]["p50"] / 1000 < most + before
        assert least < slow["attention_seconds"][span] < most
        assert slow["measured"][span]["speedup"]["verdict"] == "slow"
    for seconds in (
        {span: each["saved_seconds"] for span, each in predictions.items()},
        slow["attention_seconds"],
    ):
        assert seconds["run"] == pytest.approx(4 * seconds["denoise"])
    # The delay changes no other result.
    assert slow["drift"] == pytest.approx(
        {"relative_l1": 0, "cosine": 1, "nan_count": 0, "baseline_nan_count": 0}
    )


def test_failing_kernel_loses_only_its_own_row(told: Told) -> None:
    assert list(told.found) == ["the model's own", "slow", "raises", "wrong", "plan.json"]
    raises, wrong = told.found["raises"], told.found["wrong"]
    assert raises["status"] == "error"
    assert re.fullmatch(r"ValueError: not today \(kernels.py, line \d+\)", raises["reason"])
    assert (wrong["status"], wrong["reason"]) == ("ok", "")
    assert wrong["measured"]["run"]["ms"]["n"] == 7
    assert 0 < wrong["drift"]["relative_l1"] < 0.01


@pytest.mark.slow
def test_kernel_that_crashes_or_hangs_loses_its_own_row(
    workshop: Path, told: Told, tmp_path: Path
) -> None:
    text = told.rows.read_text()
    for name in ("segfaults", "hangs"):
        text += told.rows.read_text().replace("kernels.py:wrong", f"kernels.py:{name}")
    (rows := tmp_path / "rows.jsonl").write_text(text)
    few = ("--rows", str(rows), "--model-rounds", "1", "--timeout", "6")
    found = check(workshop, tmp_path / "told.jsonl", "segfaults,hangs,wrong", *few)
    assert [found[name]["status"] for name in ("segfaults", "hangs", "wrong")] == [
        *("crash", "timeout", "ok")
    ]
    assert found["segfaults"]["reason"] == (
        "the worker was ended by SIGSEGV; the model was rebuilt for the remaining runs"
    )
    assert "6 s" in found["hangs"]["reason"]


def test_a_plan_is_run_with_the_kernels_it_names(told: Told) -> None:
    everywhere, planned = told.found["wrong"], told.found["plan.json"]
    assert (everywhere["hits"], everywhere["fallbacks"]) == (CALLS, {})
    assert (planned["hits"], planned["own_calls"]) == (8, 0)
    assert planned["fallbacks"] == {"not in the plan": 4}
    assert 0 < planned["drift"]["relative_l1"] < everywhere["drift"]["relative_l1"]
    calls = planned["prediction"]["run"]["calls"]
    assert (calls["swapped"], calls["own"]) == (4, CALLS - 4)


def test_explanation_has_the_measured_figures(told: Told, tmp_path: Path, run_cli: RunCli) -> None:
    slow = told.found["slow"]
    (file := tmp_path / "slow.jsonl").write_text(json.dumps(slow))
    predicted = slow["prediction"]["phases"]["denoise"]
    before, after = predicted["old_seconds"], predicted["new_seconds"]
    code, out, _ = run_cli("explain", str(file), "--phase", "denoise")
    text = " ".join(out.split())
    assert code == 0
    assert text.startswith("kernels.py:slow in model.py:build, one denoising step: Attention ")
    assert f" of {in_ms(before['value'])} (" in text
    assert f"That predicts {in_ms(after['value'])} (" in text
    assert f"measured: {slow['measured']['denoise']['speedup']['ratio']:.2f}×" in text


@pytest.mark.parametrize(
    ("line", "sentence"),
    [
        ('{"kernel": "fast"}', "was not written by `replay verify --checks` of this version"),
        ("[1]", "was not written by `replay verify --checks` of this version"),
        ("[" * 100_000, "was not written by `replay verify --checks`"),
        ("", "has no kernel to explain: choose some with --kernels"),
        (None, "name a file of `replay verify --checks`"),
    ],
)
def test_refuses_bad_file(tmp_path: Path, run_cli: RunCli, line: str | None, sentence: str) -> None:
    path = tmp_path / "told.jsonl"
    if line is not None:
        path.write_text(line)
    assert sentence in refusal(run_cli, "explain", str(path))
