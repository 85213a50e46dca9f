"""The kernel skips fully masked blocks, and its output is correct."""

import functools
import math
from collections.abc import Callable

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from attention_kernels.portable.masked_prefill import masked_prefill, visited_blocks_of
from attention_kernels.tiles.visited_blocks import find_visited_blocks
from replay.accuracy.verdict import Expected, judge
from replay.kernels.registry import find
from tests.attention_kernels import calls
from tests.attention_kernels.calls import DEVICE, band, masked_call, normal


def additive(mask: Tensor) -> Tensor:
    return torch.where(mask, 0.0, -math.inf)


def finite(mask: Tensor) -> Tensor:
    """Return the mask with -finfo.max in place of -inf, so that fully masked rows see all keys."""
    return torch.where(mask, 0.0, torch.finfo(torch.bfloat16).min).bfloat16()


MASKS = {
    **calls.MASKS,
    "band, additive": lambda: additive(band(150, 300, 40)).half(),
    "keys alone": lambda: torch.arange(300, device=DEVICE).expand(70, -1) % 190 < 60,
    "finite": lambda: finite(band(150, 300, 40)),
    "finite, rows of nothing else": lambda: finite(band(300, 150, 20)),
    "bias": lambda: normal(70, 200, dtype=torch.float16),
    "bias of a part": lambda: additive(band(70, 200, 30)).half() + normal(70, 200).half(),
}
verify = functools.partial(calls.verify, "triton-masked", is_prepared=False)


@pytest.mark.parametrize("name", MASKS)
def test_masks(name: str) -> None:
    mask = MASKS[name]()
    dtype = mask.dtype if mask.is_floating_point() else torch.float16
    verify(masked_call(mask, dtype=dtype))


@pytest.mark.parametrize(
    ("dtype", "head_dim"),
    [(torch.float32, 40), (torch.bfloat16, 96), (torch.float32, 96), (torch.float16, 256)],
)
def test_types_and_head_dims(dtype: torch.dtype, head_dim: int) -> None:
    verify(masked_call(band(70, 140, 30), head_dim, dtype=dtype, kv_heads=2))


@pytest.mark.parametrize("form", [torch.clone, additive, finite])
def test_hidden_blocks_are_not_read(form: Callable[[Tensor], Tensor]) -> None:
    call = masked_call(form(band(64, 640, 60)), dtype=torch.bfloat16)
    expected = find("triton-masked").attention(**call.arguments())
    call.key[:, :, 128:] = call.value[:, :, 128:] = math.nan
    output = find("triton-masked").attention(**call.arguments())
    torch.testing.assert_close(output, expected, rtol=0, atol=0)


def test_a_nan_in_a_mask_reaches_its_row_alone() -> None:
    mask = additive(band(150, 300, 40)).half()
    mask[70, 75] = math.nan
    call = masked_call(mask)
    output = find("triton-masked").attention(**call.arguments())
    assert output[:, :, 70].isnan().all()
    mask[70, 75] = 0.0
    expected = find("triton-masked").attention(**call.arguments())
    others = [row for row in range(150) if row != 70]
    torch.testing.assert_close(output[:, :, others], expected[:, :, others], rtol=0, atol=0)


def test_visited_blocks_are_shared_by_calls_with_the_same_mask() -> None:
    mask = band(150, 300, 40)
    first, second = masked_call(mask), masked_call(mask, seed=5)
    visited = visited_blocks_of(first.query, first.value, mask)
    output = masked_prefill(second.query, second.key, second.value, mask, visited=visited)
    assert judge(output, Expected.of(second), "exact").passed


def test_visited_blocks_of_other_tiles_are_refused() -> None:
    """Blocks may come from a mask with other strides, and on some GPUs, tiles depend on strides."""
    mask = band(128, 256, 40)
    call = masked_call(mask, 128)
    visited = visited_blocks_of(call.query, call.value, mask)
    rows, keys = 128 // visited.counts.shape[2], 256 // visited.blocks.shape[-1]
    for rows_of_other, keys_of_other in ((rows, keys // 2), (rows // 2, keys)):
        other = find_visited_blocks(mask[None, None], rows_of_other, keys_of_other)
        with pytest.raises(ValueError, match="other strides"):
            masked_prefill(call.query, call.key, call.value, mask, visited=other)


@given(data=st.data())
@settings(max_examples=15, deadline=None)
def test_every_visible_block_is_visited(data: st.DataObject) -> None:
    """A block is visited without the mask if the mask changes nothing, as checked with PyTorch."""
    batches, heads = (data.draw(st.integers(1, 2)) for _ in range(2))
    q_len, k_len = (data.draw(st.integers(1, 90)) for _ in range(2))
    rows, keys = (data.draw(st.sampled_from([16, 32])) for _ in range(2))
    generator = torch.Generator().manual_seed(data.draw(st.integers(0, 99)))
    coarse = torch.rand((batches, heads, -(-q_len // 16), -(-k_len // 16)), generator=generator)
    mask = (coarse < 0.5).repeat_interleave(16, 2).repeat_interleave(16, 3)[:, :, :q_len, :k_len]
    mask[..., 0, 0] = data.draw(st.booleans())
    is_shared = data.draw(st.booleans())
    if is_shared:
        mask = mask[:, :1].expand(-1, heads, -1, -1)
    given_mask = additive(mask).to(DEVICE) if data.draw(st.booleans()) else mask.to(DEVICE)
    found = find_visited_blocks(given_mask, rows, keys)
    stride_b, stride_h = found.strides()
    flat_blocks, flat_counts = found.blocks.flatten(0, 2), found.counts.flatten(0, 2)
    for batch in range(batches):
        for head in range(heads):
            for tile in range(-(-q_len // rows)):
                part = mask[batch, head, tile * rows : (tile + 1) * rows]
                place = batch * stride_b + head * stride_h + tile
                starts = range(0, k_len, keys)
                seen = [each for each in starts if part[:, each : each + keys].any()]
                whole = [
                    each
                    for each in seen
                    if each + keys <= k_len and part[:, each : each + keys].all()
                ]
                cut = [each for each in seen if each not in whole]
                for kind, wanted in enumerate((whole, cut)):
                    count = int(flat_counts[place, kind])
                    assert flat_blocks[place, kind, :count].tolist() == wanted
