"""Timed calls are observed, for example for outputs that change after their call."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from replay.bench.sampled_outputs import OutputFingerprint, SampledOutputs, TimedPart
from replay.bench.stages import CheckedKernel
from replay.isolation.inputs import Inputs
from replay.isolation.process_state import ProcessState
from replay.kernels.failures import Finding
from replay.kernels.registry import Kernel
from tests.factories import random_call

CALL = random_call(q_heads=3, kv_heads=3, q_len=40, kv_len=40, head_dim=8)


def observer() -> tuple[SampledOutputs, TimedPart]:
    kernel = Kernel("late", torch.nn.functional.scaled_dot_product_attention)
    checked = CheckedKernel(kernel, CALL, Finding("ok"))
    return SampledOutputs([checked], Inputs(CALL), ProcessState(), seed=3), TimedPart("late")


def timed(seen: SampledOutputs, part: TimedPart, output: Tensor, late: slice) -> None:
    """Time a call whose output is partly written only after the call returned."""
    seen.before(part)
    seen.fingerprint(part, output)
    output[:, late] += 1.0
    seen.keep(part, output)
    seen.after(part)


@pytest.mark.parametrize("late", [slice(0, 1), slice(2, 3), slice(None)], ids=str)
def test_output_that_changes_after_its_call_is_found(late: slice) -> None:
    seen, part = observer()
    for _ in range(3):
        timed(seen, part, torch.zeros(1, 3, 40, 8), slice(0, 0))
    assert seen.fault("late") == ""
    timed(seen, part, torch.zeros(1, 3, 40, 8), late)
    assert "changes after the call" in seen.fault("late")
    assert len(seen.drawn_samples("late")) == 4


@pytest.mark.parametrize("shape", [(1, 1, 1, 1), (3, 5, 1, 64), (1, 2, 9000, 3), (70, 70, 1, 2)])
@pytest.mark.parametrize("drawn", [0, 2**64 - 1, 123456789])
def test_fingerprint_reads_every_head(shape: tuple[int, ...], drawn: int) -> None:
    output = torch.full(shape, torch.nan, dtype=torch.bfloat16)
    glimpse = OutputFingerprint(output, drawn)
    assert not glimpse.differs_from(output.clone())
    for head in {0, shape[1] - 1}:
        changed = output.clone()
        changed[-1, head] = 0.0
        assert glimpse.differs_from(changed)
