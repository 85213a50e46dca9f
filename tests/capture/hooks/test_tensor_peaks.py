"""Peaks of tensors, read later and in the order of the run."""

import math

import pytest
import torch
from torch import Tensor

from capture.hooks import tensor_peaks
from capture.hooks.tensor_peaks import PeakQueue


@pytest.mark.parametrize("most", [1, 3, 100])
@pytest.mark.parametrize("mode", [torch.no_grad, torch.inference_mode])
def test_peaks_come_in_order(mode: type, most: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tensor_peaks, "MOST_WAITING", most)
    monkeypatch.setattr(tensor_peaks, "LARGE", 4096)
    received: list[tuple[int, float]] = []
    with mode(), torch.autocast("cpu", dtype=torch.bfloat16):
        tensors: list[Tensor] = [
            torch.tensor([1.0, -3.0]),
            torch.ones(64, 64).mul(-2).T,
            torch.tensor([math.nan, math.inf], dtype=torch.float64),
            torch.tensor([-math.inf, 5.0]).half(),
            torch.full((2,), 7.001),
        ]
        queue = PeakQueue(lambda label, peak: received.append((label, peak)))
        for label, tensor in enumerate(tensors):
            queue.add(label, tensor)
        queue.finish()
    assert [label for label, _ in received] == [0, 1, 2, 3, 4]
    peaks = [peak for _, peak in received]
    assert peaks == pytest.approx([3, 2, math.nan, math.inf, 7.001], rel=1e-6, nan_ok=True)


def test_tensor_that_is_changed_while_it_is_held_is_left_out() -> None:
    received: list[str] = []
    queue = PeakQueue(lambda label, _: received.append(label))
    tensors = {name: torch.ones(2) for name in ("changed", "same")}
    for name, tensor in tensors.items():
        queue.add(name, tensor)
    tensors["changed"].fill_(math.nan)
    queue.finish()
    assert received == ["same"]
