"""Budgets of plans, and plans saved as files."""

import json
import math
from pathlib import Path
from typing import Any

import pytest

from replay.plan.key_lengths import KeyLengths
from replay.plan.plan import Budget, LayerChoice, Plan, PlanError, Worst, parse_budget

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
            ),
            LayerChoice("layers.1", "denoise", "old", True, False, far, 10.0, 10.0, 0.0, 3, 1),
            LayerChoice("layers.2", "denoise", "old", False, False, None, None, None, 0.0, 3, 0),
        ],
        {"newer": "new saves more"},
        "NVIDIA H200",
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
    assert data["format"] == "attention-replay-plan/2"
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
    data["format"] = "attention-replay-plan/1"
    for choice in data["choices"]:
        del choice["kv_lens"]
    path.write_text(json.dumps(data))
    earlier = Plan.load(path)
    assert earlier.kv_lens == []
    assert earlier.kernel_at("layers.0", "denoise", 1000) == "new"


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
        "a name is not a string": {**good, "baseline": None},
        "(a name is not a string)": {**good, "device": 200},
        "ranges of key lengths overlap: 4 to 77 keys and": {
            **good,
            "choices": [good["choices"][0], {**good["choices"][0], "kv_lens": [77, 80]}],
        },
        "damaged (": {**good, "choices": [{"module": "layers.0"}]},
    }
    for message, content in wrong.items():
        path.write_text(content if isinstance(content, str) else json.dumps(content))
        with pytest.raises(PlanError) as raised:
            Plan.load(path)
        assert message in str(raised.value)
        assert "--budget" in str(raised.value)
        assert "\n" not in str(raised.value)
    for missing in (tmp_path / "none.json", tmp_path):
        with pytest.raises(PlanError, match="cannot read the plan"):
            Plan.load(missing)
    with pytest.raises(PlanError, match="cannot write the plan"):
        plan.save(tmp_path / "none" / "plan.json")
    path.write_bytes(b"\x80\x02}q")
    with pytest.raises(PlanError, match="not valid JSON"):
        Plan.load(path)
