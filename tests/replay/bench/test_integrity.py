"""A kernel that replaces a function which the measurement relies on."""

from __future__ import annotations

from collections.abc import Container
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor

from replay.bench.settings import Settings
from tests.replay.bench.small_kernels import MakeCall, MakeWorkload, Register, rows_of, sdpa


@pytest.mark.parametrize("when", [{1}, {2}, {4}, {6}, range(6, 10**9)], ids=str)
def test_a_kernel_that_replaces_a_function_costs_its_row_only(
    make_call: MakeCall,
    workload: MakeWorkload,
    kernels: Register,
    quick: Settings,
    monkeypatch: pytest.MonkeyPatch,
    when: Container[int],
) -> None:
    """While it is checked, called again, measured for memory, and warmed up; in every sample."""
    many = replace(quick, rounds=30)
    calls = 0
    monkeypatch.setattr(torch, "isnan", torch.isnan)  # restored whatever happens

    def replacing(**arguments: Any) -> Tensor:
        nonlocal calls
        calls += 1
        if calls in when:
            torch.isnan = lambda tensor: torch.zeros_like(tensor, dtype=torch.bool)
        return sdpa(**arguments)

    chosen = [kernels("replacing", replacing), *(kernels(f"later-{n}", sdpa) for n in range(3))]
    rows = rows_of(make_call(), workload, many, *chosen)
    reasons = {name: row.reason for name, row in rows.items() if row.status != "ok"}
    assert list(reasons) == ["replacing"]
    assert reasons["replacing"].startswith("replaces torch.isnan, which")
