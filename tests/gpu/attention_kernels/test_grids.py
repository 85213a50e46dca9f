"""Our kernels are right for more heads than a GPU launches on the second axis of a grid."""

import pytest

from replay.kernels.registry import find
from tests.attention_kernels.calls import DEVICE, many_heads, ours, verify


@pytest.mark.parametrize("name", ours())
@pytest.mark.parametrize(("batch", "heads"), [(65_536, 1), (8_192, 8)], ids=["65536x1", "8192x8"])
def test_many_heads(name: str, batch: int, heads: int) -> None:
    kernel = find(name)
    if reason := kernel.unavailable(DEVICE):
        pytest.skip(reason)
    supported = [call for call in many_heads(batch, heads) if kernel.refuses(call) is None]
    assert supported
    for call in supported:
        # The reference computes a batch element at a time.
        verify(name, call, batches=[0, batch // 2, batch - 1])
