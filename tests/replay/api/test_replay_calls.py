"""The functions `replay`, `plan` and `verify`, which run the commands from Python."""

from datetime import datetime
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import attention_replay as ar
from replay.api.chosen_device import ChoiceError
from replay.api.run_stamp import commit_here
from replay.cli.main import main
from replay.cli.requests import recorded_calls, request_of
from tests.in_this_process import exit_code

QUICK: dict[str, Any] = {"device": "cpu", "rounds": 3, "workers": False, "progress": False}


@pytest.mark.parametrize("kernels", ["torch-math,torch-flash", ["torch-math", "torch-flash"]])
def test_rows_are_those_of_the_command(recorded: Path, kernels: str | list[str]) -> None:
    rows = ar.replay(recorded, kernels=kernels, **QUICK)
    assert [(row.call.name, row.kernel) for row in rows] == [
        (f"model-00000{index}", kernel)
        for index in range(3)
        for kernel in ("torch-math", "torch-flash")
    ]
    assert all(row.status == "ok" and row.cache == "warm" for row in rows)
    ((begun, commit),) = {(row.measured_at, row.commit) for row in rows}
    assert commit == commit_here()
    assert datetime.strptime(begun, "%Y-%m-%dT%H:%M:%SZ")


def test_calls_may_be_a_dataset_or_a_list(recorded: Path) -> None:
    dataset = ar.load(recorded)
    chosen = ar.replay(dataset, calls=["model-000001"], kernels="torch-math", **QUICK)
    assert [row.call.name for row in chosen] == ["model-000001"]
    listed = ar.replay(dataset[1:], kernels="torch-math", **QUICK)
    assert [row.call.name for row in listed] == ["model-000000", "model-000001"]
    assert [row.call.module for row in listed] == ["layers.1", "layers.2"]


@pytest.mark.parametrize(
    ("given", "sentence"),
    [
        ({"dataset": 3}, "expected a directory, a Dataset or attention calls, got int"),
        ({"dataset": [3]}, "expected a directory, a Dataset or attention calls, got int"),
        ({"dataset": []}, "there is no call to replay"),
        ({"device": "abacus"}, "--device abacus"),
        ({"cache": "cold"}, "cold"),
        ({"gpus": [0]}, "--gpus requires worker processes"),
        ({"max_time": 60.0}, "--max-time requires worker processes"),
    ],
)
def test_wrong_arguments_are_refused(recorded: Path, given: dict[str, Any], sentence: str) -> None:
    with pytest.raises(ChoiceError, match=sentence):
        ar.replay(**{"dataset": recorded, "kernels": "torch-math", **QUICK, **given})


def test_command_and_function_ask_alike(recorded: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from replay.api import replay_calls
    from replay.cli.compare_kernels import parser

    asked = []
    monkeypatch.setattr(replay_calls, "measured", lambda request, *_: asked.append(request))
    ar.replay(str(recorded))
    arguments = parser().parse_args(["--dir", str(recorded)])
    assert request_of(arguments, recorded_calls(arguments)) == asked[0]


class Layer(nn.Module):
    """Module that makes one attention call."""

    def forward(self, tensor: Tensor) -> Tensor:
        return F.scaled_dot_product_attention(tensor, tensor, tensor)


def test_plan_of_given_rows_is_that_of_the_command(tmp_path: Path) -> None:
    directory = tmp_path / "recorded"
    layer = Layer()
    with ar.record(layer, out=directory, max=2):
        layer(torch.randn(1, 2, 16, 8))
    rows = ar.replay(directory, kernels="torch-math", for_model=True, **QUICK)
    plan = ar.plan(directory, rows, budget="rmse=1", total_error=1.0)
    assert plan.baseline == "torch-default"
    assert str(plan.budget) == "rmse ≤ 1"
    assert plan.total_error is not None
    file, written = tmp_path / "rows.jsonl", tmp_path / "plan.json"
    rows.write(file)
    given = f"--rows {file} --budget rmse=1 --total-error 1 --device cpu -q".split()
    assert exit_code(main, "plan", "--dir", str(directory), "--out", str(written), *given) == 0
    assert ar.Plan.load(written) == plan
