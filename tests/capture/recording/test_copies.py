"""A call is stored with its original values, even if the model overwrites its tensors later."""

from collections.abc import Callable
from pathlib import Path

import torch
import torch.nn.functional as F
from torch import Tensor

from tests.capture.recording.callers import assert_good, recorded


def test_tensors_updated_in_place_are_recorded_as_they_were(tmp_path: Path) -> None:
    """A StaticCache uses the same memory at every step; a model may also change the output."""
    cache = torch.zeros(1, 2, 16, 8)
    queries = torch.randn(4, 1, 2, 1, 8)

    def step(index: int) -> Callable[[], Tensor]:
        def run() -> Tensor:
            cache[:, :, index] = index + 1.0
            keys = cache[:, :, : index + 1]
            return F.scaled_dot_product_attention(queries[index], keys, keys).zero_()

        return run

    data = recorded(tmp_path, *map(step, range(4)))
    cache.zero_()
    assert_good(data)
    for index, call in enumerate(data):
        assert call.key[0, 0, :, 0].tolist() == [float(n + 1) for n in range(index + 1)]
        assert call.key.stride() == (256, 128, 8, 1)
