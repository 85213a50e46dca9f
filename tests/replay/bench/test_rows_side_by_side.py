"""Rows of several samples, judged together as heads of one call."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from replay.accuracy.judge import Expected
from replay.bench.variation import Flip, side_by_side, some_rows
from replay.workloads.random_calls import Spec


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32])
@pytest.mark.parametrize("has_sinks", [False, True])
def test_each_keeps_what_is_expected_of_it_alone(dtype: torch.dtype, has_sinks: bool) -> None:
    """Its reference and its limits: those of large rows would hide what is wrong in small ones."""
    call = Spec(2, 8, 2, 70, 70, 32, 32, True, dtype).call("cpu", torch.Generator().manual_seed(0))
    if has_sinks:
        call = replace(call, sinks=torch.randn(8, generator=torch.Generator().manual_seed(1)))
    flip = Flip(call, 3, 1)
    parts = [some_rows(call, rows) for rows in flip.rows(5)]
    together = Expected.of_heads(side_by_side(*parts))
    for part, found in zip(parts, together, strict=True):
        alone = Expected.of(part)
        assert torch.equal(found.reference, alone.reference)
        assert found.tolerance == alone.tolerance
