"""Conditions of a tuning: state of a model that its plain weights do not hold."""

from typing import Any

import pytest
import torch
from torch import nn
from torch.testing._internal.two_tensor import TwoTensor

from replay.tune.conditions import changes, conditions


class OfInputs(TwoTensor):  # type: ignore[misc]
    """Quantised weight with another scheme."""

    def __tensor_flatten__(self) -> tuple[list[str], str]:
        return ["a", "b"], "inputs are quantised too"


def model(kind: type = TwoTensor, value: float = 1.0, scale: float = 1.0, off: bool = False) -> Any:
    layer = nn.Linear(4, 4, bias=False)
    weight = kind(torch.ones(4, 4), torch.full((4, 4), value))
    layer.weight = nn.Parameter(weight, requires_grad=False)
    vars(layer).update(scaling={"style": scale}, active_adapters=["style"], disable_adapters=off)
    return layer


@pytest.mark.parametrize(
    ("changed", "text"),
    [
        ({}, ""),
        ({"value": 2.0}, "weights of model "),
        ({"kind": OfInputs}, "weights of model "),
        ({"scale": 0.5}, "adapters of model style × 1 → style × 0.5"),
        ({"off": True}, "adapters of model style × 1 → off"),
    ],
)
def test_quantised_weights_and_adapters_are_conditions(changed: dict[str, Any], text: str) -> None:
    census: dict[str, Any] = {"rows": [], "signatures": []}
    before, now = (
        conditions({"": each}, census, "psnr=35", "torch-math", [])
        for each in (model(), model(**changed))
    )
    found = changes(before, now)
    assert len(found) == bool(text)
    assert "".join(found).startswith(text)
