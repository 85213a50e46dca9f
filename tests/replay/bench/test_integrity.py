"""A kernel that replaces a function which the measurement relies on."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from replay.bench.settings import Settings
from tests.replay.bench.small_kernels import MakeCall, MakeWorkload, Register, rows_of, sdpa


@pytest.mark.parametrize("call_number", [1, 2, 4, 6])
def test_a_kernel_that_replaces_a_function_costs_its_row_only(
    make_call: MakeCall,
    workload: MakeWorkload,
    kernels: Register,
    quick: Settings,
    monkeypatch: pytest.MonkeyPatch,
    call_number: int,
) -> None:
    """While it is checked, called again, measured for memory, and warmed up."""
    calls = 0
    monkeypatch.setattr(torch, "isnan", torch.isnan)  # restored whatever happens

    def replacing(**arguments: Any) -> Tensor:
        nonlocal calls
        calls += 1
        if calls == call_number:
            torch.isnan = lambda tensor: torch.zeros_like(tensor, dtype=torch.bool)
        return sdpa(**arguments)

    chosen = [kernels("replacing", replacing), *(kernels(f"later-{n}", sdpa) for n in range(3))]
    rows = rows_of(make_call(), workload, quick, *chosen)
    reasons = {name: row.reason for name, row in rows.items() if row.status != "ok"}
    assert list(reasons) == ["replacing"]
    assert reasons["replacing"].startswith("replaces torch.isnan, which")
