"""The first training step with a kernel differs from the baseline's by rounding only, if right."""

import math
import re

import pytest
import torch
from torch import Tensor

from replay.end_to_end.drift import FIRST_GRADIENT
from replay.end_to_end.first_step import wrong_first_step
from tests.factories import call_facts, normal, row

ROWS = [row("mine", call_facts(dtype="bfloat16"))]
WEIGHT = normal(256)


def outputs(loss: float = 2.0, **gradients: Tensor) -> dict[str, Tensor]:
    found = {"weight": WEIGHT, "key.bias": 1e-3 * WEIGHT, **gradients}
    return {
        "loss": torch.tensor([loss, 1.0]),
        **{f"{FIRST_GRADIENT}{name}": each for name, each in found.items()},
    }


@pytest.mark.parametrize(
    ("found", "sentence"),
    [
        (outputs(2.05), ""),
        (outputs(2.2), "the loss of the first step is 2.2, 2 with its own attention"),
        (outputs(math.nan), "the loss of the first step is nan, 2 with its own attention"),
        (outputs(weight=1.4 * WEIGHT), ""),
        (outputs(weight=-WEIGHT), "the gradient of weight differs .* by 200 %"),
        (outputs(weight=WEIGHT * math.nan), "the gradient of weight differs .* by nan %"),
        # A gradient below the rounding of all gradients is noise.
        (outputs(**{"key.bias": -1e-3 * WEIGHT}), ""),
        (
            outputs(**{"weight": 2 * WEIGHT, "key.bias": WEIGHT}),
            "the gradient of key.bias differs .* %; so do 1 other gradient",
        ),
    ],
)
def test_only_what_rounding_does_not_explain_is_wrong(
    found: dict[str, Tensor], sentence: str
) -> None:
    given = wrong_first_step(outputs(), found, ROWS)
    assert bool(given) == bool(sentence)
    assert re.search(sentence, given), given
