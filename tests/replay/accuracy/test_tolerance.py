"""What an exact kernel may err by, from the call's own data."""

from __future__ import annotations

import math

import pytest
import torch

from capture.call import AttentionCall
from replay.accuracy.reference import attention, same_dtype
from replay.accuracy.tolerance import RELIABLE_WIDTH, Tolerance, tolerance


def test_tolerance_by_hand() -> None:
    one = torch.ones(1, 1, 1, 1, dtype=torch.bfloat16)
    call = AttentionCall(one, one, one)
    reference = torch.full((1, 1, 1, 1), 1 + 2**-9, dtype=torch.float64)
    assert tolerance(call, one, reference) == Tolerance(2**-9, 2**-9)
    assert tolerance(call, one, reference).limit == 3 * 2**-9


def test_tolerance_ignores_what_overflowed() -> None:
    ones = torch.ones(1, 1, 2, 1, dtype=torch.float16)
    call = AttentionCall(ones, ones, ones)
    overflowed = torch.tensor([math.inf, 1.0], dtype=torch.float16)[None, None, :, None]
    reference = torch.tensor([2.0, 1.0 + 2**-12], dtype=torch.float64)[None, None, :, None]
    assert tolerance(call, overflowed, reference) == Tolerance(2**-12, 2**-12)


def test_rows_that_tell_are_longer_than_their_errors() -> None:
    """By hand: rows four, three and no times as long as the eager error, and one of zeros."""
    reference = torch.zeros(1, 1, 4, RELIABLE_WIDTH, dtype=torch.float64)
    eager = reference.clone()
    reference[0, 0, :3, 0] = torch.tensor([5.0, 3.0, 0.0])
    eager[0, 0, :3, 0] = torch.tensor([6.0, 4.0, 1.0])
    call = AttentionCall(*(torch.ones(1, 1, 4, RELIABLE_WIDTH, dtype=torch.bfloat16),) * 3)
    found = tolerance(call, eager.to(torch.bfloat16), reference).rows
    assert found is not None
    assert found.reliable.flatten().tolist() == [True, False, False, False]


@pytest.mark.parametrize(
    ("dtype", "width", "has_rows"),
    [
        (torch.bfloat16, RELIABLE_WIDTH, True),
        (torch.float16, RELIABLE_WIDTH, True),
        (torch.bfloat16, RELIABLE_WIDTH - 1, False),
        (torch.float32, RELIABLE_WIDTH, False),
    ],
)
def test_where_direction_is_judged(dtype: torch.dtype, width: int, has_rows: bool) -> None:
    call = AttentionCall(*(torch.randn(1, 2, 9, width).to(dtype) for _ in range(3)))
    assert (tolerance(call, same_dtype(call), attention(call)).rows is not None) == has_rows
