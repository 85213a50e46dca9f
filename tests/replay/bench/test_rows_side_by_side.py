"""Rows of several samples are judged together, as heads of one call."""

import math
from dataclasses import replace

import pytest
import torch

from replay.accuracy.verdict import Expected
from replay.isolation.block_inputs import draw_rows
from replay.isolation.output_rows import OutputRows, side_by_side, some_rows
from replay.workloads.random_calls import Spec


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32])
@pytest.mark.parametrize("has_sinks", [False, True])
def test_joined_samples_keep_references_and_limits(dtype: torch.dtype, has_sinks: bool) -> None:
    """With shared limits, the limits of large rows would hide errors in small rows."""
    call = Spec(2, 8, 2, 70, 70, 32, 32, True, dtype).call("cpu", torch.Generator().manual_seed(0))
    if has_sinks:
        call = replace(call, sinks=torch.randn(8, generator=torch.Generator().manual_seed(1)))
    parts = [some_rows(call, rows) for groups in draw_rows(call, 9, 5).values() for rows in groups]
    together = Expected.of_heads(side_by_side(*parts))
    for part, found in zip(parts, together, strict=True):
        alone = Expected.of(part)
        assert torch.equal(found.reference, alone.reference)
        for limit in ("same_dtype_error", "rounding", "noise"):
            one, other = (getattr(each.tolerance, limit) for each in (found, alone))
            assert one == pytest.approx(other)


@pytest.mark.parametrize("dtype", [torch.float16, torch.float32])
def test_non_finite_elements_add_no_tolerance(dtype: torch.dtype) -> None:
    call = Spec(1, 4, 4, 9, 70, 32, 32, dtype=dtype).call("cpu", torch.Generator().manual_seed(0))
    call.value[0, 1, 3] = math.nan
    call.value[0, 2, :, 5] = math.inf
    query_of_each = [OutputRows([0], [head], [7]) for head in range(4)]
    parts = [some_rows(call, rows) for rows in query_of_each]
    together = Expected.of_heads(side_by_side(*parts))
    for part, found in zip(parts, together, strict=True):
        assert found.tolerance == Expected.of(part).tolerance
        assert math.isfinite(found.tolerance.rounding)
