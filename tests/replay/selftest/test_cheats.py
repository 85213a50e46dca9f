"""The planted cheats are found, and the honest kernel is not accused."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention as sdpa

from replay.selftest import cheats
from replay.selftest.cheats import CHEATS, outcome, planted_cheats

CPU = torch.device("cpu")


@pytest.mark.parametrize("name", CHEATS)
def test_a_cheat_is_found(name: str) -> None:
    assert outcome(name, CHEATS[name](), CPU).status in ("inaccurate", "error")


def test_an_honest_kernel_is_ok() -> None:
    assert outcome("honest", sdpa, CPU).status == "ok"


@pytest.fixture
def only(monkeypatch: pytest.MonkeyPatch) -> Callable[[dict[str, Callable[..., Tensor]]], None]:
    def replace(attentions: dict[str, Callable[..., Tensor]]) -> None:
        made = {name: lambda each=each: each for name, each in attentions.items()}
        monkeypatch.setattr(cheats, "CHEATS", made)

    return replace


def test_missed_cheat_is_named(
    only: Callable[[dict[str, Callable[..., Tensor]]], None],
) -> None:
    only({"looks right": sdpa, "half": lambda *a, **o: sdpa(*a, **o) / 2})
    found = planted_cheats(CPU)
    assert found.passed is False
    assert found.finding == "1 of 2 found; not found: looks right"
    assert found.figures["missed"] == ["looks right"]


def test_a_check_that_accuses_everybody_fails(
    only: Callable[[dict[str, Callable[..., Tensor]]], None], monkeypatch: pytest.MonkeyPatch
) -> None:
    only({"half": lambda *a, **o: sdpa(*a, **o) / 2})
    monkeypatch.setattr(cheats, "sdpa", lambda *a, **o: sdpa(*a, **o) / 3)
    found = planted_cheats(CPU)
    assert found.passed is False
    assert found.finding == "1 of 1 found; an honest kernel is called wrong"
