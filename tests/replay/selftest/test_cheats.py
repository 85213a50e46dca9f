"""The planted cheats are found, and the honest kernel is not accused."""

import pytest
import torch
from torch.nn.functional import scaled_dot_product_attention as sdpa

from replay.selftest import cheats
from replay.selftest.cheats import CHEATS, outcome, planted_cheats

CPU = torch.device("cpu")


@pytest.mark.parametrize("name", CHEATS)
def test_a_cheat_is_found(name: str) -> None:
    assert outcome(name, CHEATS[name](), CPU).status in ("inaccurate", "error")


def test_missed_cheat_and_accused_honest_kernel_are_named(monkeypatch: pytest.MonkeyPatch) -> None:
    half = {"half": lambda: lambda *a, **o: sdpa(*a, **o) / 2}
    monkeypatch.setattr(cheats, "CHEATS", {"looks right": lambda: sdpa, **half})
    found = planted_cheats(CPU)
    assert found.passed is False
    assert found.finding == "1 of 2 found; not found: looks right"
    assert found.figures["missed"] == ["looks right"]
    monkeypatch.setattr(cheats, "CHEATS", half)
    monkeypatch.setattr(cheats, "sdpa", lambda *a, **o: sdpa(*a, **o) / 3)
    found = planted_cheats(CPU)
    assert found.passed is False
    assert found.finding == "1 of 1 found; an honest kernel is called wrong"
