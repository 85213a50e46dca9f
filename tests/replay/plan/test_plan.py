"""Budgets of plans, and plans saved as files."""

import json
import math
from pathlib import Path
from typing import Any

import pytest

from replay.plan.key_lengths import KeyLengths
from replay.plan.measured import Measured
from replay.plan.plan import Budget, LayerChoice, Plan, PlanError, TotalError, Worst, parse_budget
from replay.plan.step_ranges import StepRange, kernels_by_step
from replay.rows.row import Speedup

EXACT = Worst(cosine=1.0, relative_l1=0.0, rmse=0.0)


@pytest.fixture
def plan() -> Plan:
    far = Worst(cosine=0.1, relative_l1=math.inf, rmse=0.0)
    return Plan(
        "model",
        "trained",
        Budget("cosine", 0.99),
        "old",
        [
            LayerChoice(
                *("layers.0", "denoise", "new", True, True, EXACT, 5.0, 10.0, 15.0, 3, 1),
                kv_lens=KeyLengths(4, 77),
                steps=StepRange(6, 49),
            ),
            LayerChoice("layers.1", "denoise", "old", True, False, far, 10.0, 10.0, 0.0, 3, 1),
            LayerChoice("layers.2", "denoise", "old", False, False, None, None, None, 0.0, 3, 0),
        ],
        {"newer": "new saves more"},
        "NVIDIA H200",
        TotalError(0.5, 0.25, 1e-3),
        Measured(
            *("psnr", 35.0, 38.1, None, 2, True),
            Speedup(1.14, 1.13, 1.15, "fast", "interval-above-1"),
            {"torch": "2.13.0"},
        ),
    )


@pytest.mark.parametrize(
    ("text", "budget"),
    [
        ("cosine=0.998", Budget("cosine", 0.998)),
        (" relative_l1 = 5e-2 ", Budget("relative_l1", 0.05)),
        ("rmse=0", Budget("rmse", 0.0)),
    ],
)
def test_budgets(text: str, budget: Budget) -> None:
    assert parse_budget(text) == budget


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("cosin=0.9", "'cosin' in the budget: choose from cosine, relative_l1, rmse"),
        ("0.998", "unknown metric '0.998'"),
        ("cosine=high", "'high' is not a number: write the budget as cosine=0.998"),
        ("rmse", "rmse has no limit: write the budget as rmse=0.01"),
        ("cosine=1.2", "cosine must be between -1 and 1"),
        ("rmse=-1", "out of range"),
        ("rmse=nan", "out of range"),
        ("cosine=0.9,rmse=1", "one limit, not several as in cosine=0.9,rmse=1: give one of them"),
    ],
)
def test_wrong_budgets(text: str, message: str) -> None:
    with pytest.raises(PlanError) as raised:
        parse_budget(text)
    assert message in str(raised.value)
    assert "\n" not in str(raised.value)


def test_float_noise_is_not_outside_a_cosine_of_one() -> None:
    assert Budget("cosine", 1.0).holds(1 - 1e-15)
    assert not Budget("cosine", 1.0).holds(1 - 1e-6)


def test_a_plan_is_read_as_it_was_written(plan: Plan, tmp_path: Path) -> None:
    path = tmp_path / "plan.json"
    plan.save(path)
    data = json.loads(path.read_text(), parse_constant=lambda name: pytest.fail(f"{name} in JSON"))
    assert data["format"] == "attention-replay-plan/4"
    assert data["budget"] == {"cosine": 0.99}
    assert data["choices"][0]["kernel"] == "new"
    assert [entry.name for entry in tmp_path.iterdir()] == ["plan.json"]
    read = Plan.load(path)
    assert (read.choices[0], read.choices[2]) == (plan.choices[0], plan.choices[2])
    # JSON has no infinity; the value read back is still worse than any number.
    worst = read.choices[1].worst
    assert worst is not None
    assert not Budget("relative_l1", 1e300).holds(worst.relative_l1)
    assert read.saved_ms == plan.saved_ms == 15
    assert read.left_out == plan.left_out
    assert read.device == plan.device == "NVIDIA H200"
    assert read.total_error == plan.total_error
    assert read.measured == plan.measured
    text = "1.14× (1.13-1.15) at psnr 38.1 (mean ∞), on 2 runs kept for acceptance"
    assert str(read.measured) == text
    assert read.steps == plan.steps == StepRange(6, 49)
    at_steps = [read.kernel_at("layers.0", "denoise", 77, step) for step in (5, 6, 49, 50)]
    assert at_steps == ["old", "new", "new", "old"]
    del data["total_error"], data["measured"]
    for version, field in ((2, "steps"), (1, "kv_lens")):
        data["format"] = f"attention-replay-plan/{version}"
        for choice in data["choices"]:
            del choice[field]
        path.write_text(json.dumps(data))
        assert Plan.load(path).kernel_at("layers.0", "denoise", 1000, 5) == "new"
    assert (earlier := Plan.load(path)).kv_lens == []
    assert earlier.steps is None


def test_text_of_many_ranges_is_short_and_unique() -> None:
    lengths, texts = KeyLengths(1, 1), set()
    for last in ("old", "new"):
        kernels = [*["old", "new"] * 500, last]
        ranges = ((StepRange(at, at), lengths, kernel) for at, kernel in enumerate(kernels))
        texts.add(str(kernels_by_step(ranges)))
    assert [len(text) < 200 for text in texts] == [True, True]


def test_wrong_files_are_one_sentence(plan: Plan, tmp_path: Path) -> None:
    path = tmp_path / "plan.json"
    plan.save(path)
    good = json.loads(path.read_text())
    wrong: dict[str, Any] = {
        "not valid JSON": "kernel: sage1",
        "is not a plan (not valid": "[" * 100_000,
        "not a plan (format None": [],
        "not a plan (format 'other/1'": {**good, "format": "other/1"},
        "damaged ('choices')": {name: good[name] for name in good if name != "choices"},
        "damaged (unknown metric 'speed'": {**good, "budget": {"speed": 1}},
        "damaged (baseline is None)": {**good, "baseline": None},
        "damaged (device is 200)": {**good, "device": 200},
        "gap of the total error is -1": {
            **good,
            "total_error": {"limit": 1.0, "error": 1.0, "gap": -1.0},
        },
        "damaged (": {**good, "choices": [{"module": "layers.0"}]},
        "damaged (measured is 'fast')": {**good, "measured": "fast"},
    }
    figures: dict[str, dict[str, Any]] = {
        "limit of the measured quality is nan": {"limit": math.nan},
        "worst of the measured quality is inf": {"worst": math.inf},
        "mean is 1000000000": {"mean": 10**400},
        "quality is measured on 0 runs": {"runs": 0},
        "kept is 'yes'": {"kept": "yes"},
        "has 1e+300, not at most 1e+06": {
            "speedup": {**good["measured"]["speedup"], "high": 1e300}
        },
        "metric is 7": {"metric": 7},
        "conditions is 2": {"conditions": {"torch": 2}},
        "conditions is a list": {"conditions": ["torch"]},
    }
    for message, change in figures.items():
        wrong[message] = {**good, "measured": {**good["measured"], **change}}
    first = good["choices"][0]
    changed: dict[str, list[dict[str, Any]]] = {
        "ranges of key lengths overlap: 4 to 77 keys and": [
            {"steps": None},
            {"steps": None, "kv_lens": [77, 80]},
        ],
        "two choices of a layer overlap at step 9)": [{"steps": [0, 9]}, {"steps": [9, 20]}],
        "two choices of a layer overlap at steps 6 to 49)": [{}, {"steps": None}],
        "steps 0 to 10000 is not a range within 0 to 9999": [{"steps": [0, 10_000]}],
        "steps -1 to 3 is not a range": [{"steps": [-1, 3]}],
        "steps 3 to 2 is not a range": [{"steps": [3, 2]}],
        "more than 1,000,000 kernels in ranges of steps": [
            {"steps": [at, 9_999 - at], "kv_lens": [at, at]} for at in range(1_100)
        ],
        "first is nan": [{"steps": [math.nan, 3]}],
        "last is 1e": [{"steps": {"first": 0, "last": 1e300}}],
        "kv_lens 4 to 4611686018427387904 is not a range": [{"kv_lens": [4, 2**62]}],
        "only the phase denoise has steps, not decode": [{"phase": "decode"}],
        "saved_ms of layers.0 is nan": [{"saved_ms": math.nan}],
        "fa3 of layers.0 is nan": [{"others": {"fa3": math.nan}}],
        "time_ms of layers.0 is inf": [{"time_ms": math.inf}],
        "negative number of calls": [{"calls": -1}],
        "module is 7": [{"module": 7}],
        "kernel is a list": [{"kernel": ["new"]}],
    }
    for message, choices in changed.items():
        wrong[message] = {**good, "choices": [{**first, **each} for each in choices]}
    for message, content in wrong.items():
        path.write_text(content if isinstance(content, str) else json.dumps(content))
        with pytest.raises(PlanError) as raised:
            Plan.load(path)
        assert message in str(raised.value)
        assert "--budget" in str(raised.value)
        assert "\n" not in str(raised.value)
    with pytest.raises(PlanError, match="cannot read the plan"):
        Plan.load(tmp_path)
    with pytest.raises(PlanError, match="cannot write the plan"):
        plan.save(tmp_path / "none" / "plan.json")
    path.write_bytes(b"\x80\x02}q")
    with pytest.raises(PlanError, match="not valid JSON"):
        Plan.load(path)
