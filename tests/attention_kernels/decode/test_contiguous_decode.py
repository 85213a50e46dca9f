"""Decoding works with contiguous keys, for any shape, stride, mask and split of the keys."""

import math
from typing import Any

import pytest
import torch
from hypothesis import example, given, settings
from hypothesis import strategies as st
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention

from attention_kernels.decode import kv_cache, split_kv
from attention_kernels.decode.contiguous_decode import contiguous_decode
from attention_kernels.decode.kv_cache import Access, Cache
from attention_kernels.decode.paging import page
from attention_kernels.decode.split_kv_assignment import KeyAssignment
from attention_kernels.decode.split_kv_plan import Tiling, merging, plan
from attention_kernels.launch import descriptors
from attention_kernels.options import AttentionOptions
from capture.call.attention_call import AttentionCall
from tests.attention_kernels.calls import DEVICE, assert_near, half, lengths, verify, watched_rooms
from tests.attention_kernels.eager import attend
from tests.replay.kernels.pairwise import each_pair


def inputs(
    batch: int = 1,
    q_heads: int = 4,
    kv_heads: int = 2,
    q_len: int = 1,
    kv_len: int = 100,
    head_dim: int = 64,
    v_head_dim: int | None = None,
    dtype: torch.dtype = torch.float16,
) -> tuple[Tensor, Tensor, Tensor]:
    return (
        half(batch, q_heads, q_len, head_dim, dtype=dtype),
        half(batch, kv_heads, kv_len, head_dim, dtype=dtype, seed=1),
        half(batch, kv_heads, kv_len, v_head_dim or head_dim, dtype=dtype, seed=2),
    )


@each_pair(
    worth_describing=[0, 2**60], kv_len=[1, 7, 127, 2250], dtype=[torch.float16, torch.bfloat16]
)
def test_lengths(
    kv_len: int, dtype: torch.dtype, worth_describing: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(kv_cache, "WORTH_DESCRIBING", worth_describing)
    call = AttentionCall(*inputs(2, kv_len=kv_len, dtype=dtype), enable_gqa=True)
    verify("triton-decode", call, is_prepared=False)


@pytest.mark.parametrize(("head_dim", "v_head_dim"), [(40, 72), (80, 80), (96, 40), (256, 256)])
def test_head_dims(head_dim: int, v_head_dim: int) -> None:
    tensors = inputs(q_len=3, head_dim=head_dim, v_head_dim=v_head_dim)
    assert_near(contiguous_decode(*tensors), attend(*tensors).output)


def test_cache_access(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(descriptors, "has_tma", lambda device: True)
    _, key, value = inputs()
    assert Cache(key, value).access(is_cut=False) == "direct", "too small"
    monkeypatch.setattr(kv_cache, "WORTH_DESCRIBING", 0)
    assert Cache(key, value).access(is_cut=False) == "described"
    assert Cache(key, value).access(is_cut=True) == "direct", "reads past the last query's key"
    assert Cache(key[..., :40], value).access(False) == "direct", "no whole block"
    assert Cache(key.mT.contiguous().mT, value).access(False) == "direct", "no adjacent elements"
    assert Cache(key, value, lengths=lengths(50)).access(False) == "direct", "reads past the length"
    indices = torch.zeros(1, 2, 3, dtype=torch.int32, device=DEVICE)
    assert Cache(key, value, indices=indices).access(False) == "indirect"


@pytest.mark.parametrize("splits", [1, 2, 5, 40])
def test_splits_change_nothing_but_rounding(splits: int) -> None:
    """If 7 blocks of keys are split into 40 parts, most parts are empty."""
    query, key, value = inputs(2, q_len=2, kv_len=100)
    tiles = Tiling(16, 4, 1, splits)
    output = split_kv.attend_to_cache(query, Cache(key, value), tiles=tiles)
    assert_near(output, attend(query, key, value).output)


LENGTHS = [0, 1, 32, 33, 64, 150, 160, 3]
MANY = 1e9
"""Value of `worth` for which merging counts as free."""


@pytest.mark.parametrize(
    ("assignment", "parts"),
    [
        (KeyAssignment(shares=1, resident=1, least=1, worth=MANY), [1] * 8),
        (KeyAssignment(shares=12, resident=1, least=1, worth=MANY), [1, 1, 1, 1, 1, 2, 2, 1]),
        (KeyAssignment(shares=50, resident=50, least=3, worth=MANY), [1, 1, 1, 2, 2, 5, 5, 1]),
        (KeyAssignment(shares=50, resident=1, least=3, worth=MANY), [1, 1, 1, 1, 2, 4, 4, 1]),
        (KeyAssignment(shares=50, resident=50, least=1, worth=0.6), [1, 1, 1, 1, 1, 2, 2, 1]),
    ],
    ids=["no part more", "few", "all resident", "no less", "no more than worth"],
)
@pytest.mark.parametrize("in_pages", [False, True])
def test_keys_assigned_by_length(
    in_pages: bool, assignment: KeyAssignment, parts: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Keys have two heads and blocks of 16. Only the expected parts are written, and none if a head
    has one part. Counters are zeros again. Memory after a sequence is not read."""
    query, key, value = inputs(len(LENGTHS), kv_len=160)
    for n, length in enumerate(LENGTHS):
        key[n, :, length:] = value[n, :, length:] = math.nan
    cache = Cache(*page(key, value, 16)[:3]) if in_pages else Cache(key, value)
    rooms = watched_rooms(monkeypatch)
    output = split_kv.attend_to_cache(
        query, cache._replace(lengths=lengths(*LENGTHS)), tiles=Tiling(16, 4, 1, 1, assignment)
    )
    for n, length in enumerate(LENGTHS):
        own = slice(n, n + 1)
        seen = attend(query[own], key[own, :, :length], value[own, :, :length])
        assert_near(output[own], seen.output)
    ((room, arrivals),) = rooms
    assert not arrivals.any()
    programs = assignment.programs(2 * len(LENGTHS))
    is_written = ~room[programs * 2 * 64 :].view(programs, 2, 2).isnan().any(dim=(1, 2))
    expected = [count > 1 for count in parts for _ in range(2 * count)]
    assert is_written.tolist() == expected + [False] * (programs - len(expected))


@pytest.mark.parametrize("is_causal", [False, True])
@pytest.mark.parametrize("window", [(None, None), (40, None), (20, 0)])
def test_assignment_by_visible_keys(window: tuple[int | None, int | None], is_causal: bool) -> None:
    """A diagonal and a window show different keys of each sequence. A program has several rows."""
    query, key, value = inputs(5, 2, 1, q_len=3, kv_len=100)
    cache = Cache(key, value, lengths=lengths(100, 0, 67, 5, 48))
    sinks = half(2, seed=4)
    whole, assigned = (
        split_kv.attend_to_cache(
            query,
            cache,
            is_causal=is_causal,
            sinks=sinks,
            options=AttentionOptions(bottom_right=True, window=window),
            tiles=Tiling(16, 4, 1, 1, assignment),
        )
        for assignment in (None, KeyAssignment(shares=12, resident=12, least=1, worth=MANY))
    )
    torch.testing.assert_close(assigned, whole, rtol=0, atol=2e-3)


@given(st.data(), st.integers(1, 17), st.integers(1, 20))
@settings(max_examples=6, deadline=None)
def test_any_lengths_are_assigned_completely(data: st.DataObject, batch: int, shares: int) -> None:
    """Batches have any size, even one that is not a power of two, and there are few programs."""
    query, key, value = inputs(batch, 1, 1, kv_len=40, head_dim=16)
    drawn = data.draw(st.lists(st.integers(0, 40), min_size=batch, max_size=batch))
    cache = Cache(key, value, lengths=lengths(*drawn))
    assignment = KeyAssignment(shares, resident=shares, least=1, worth=MANY)
    output = split_kv.attend_to_cache(query, cache, tiles=Tiling(16, 4, 1, 1, assignment))
    expected = split_kv.attend_to_cache(query, cache, tiles=Tiling(16, 4, 1, 1))
    torch.testing.assert_close(output, expected, rtol=0, atol=2e-3)


@pytest.mark.parametrize("rows", [1, 3])
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_a_mask_of_the_lowest_number_is_not_minus_infinity(dtype: torch.dtype, rows: int) -> None:
    """A row masked by the lowest number becomes the mean of all values, as in SDPA."""
    query, key, value = inputs(2, q_len=3, dtype=dtype)
    mask = torch.zeros(2, 1, rows, 100, dtype=dtype, device=DEVICE)
    mask[0, 0, -1] = torch.finfo(dtype).min
    mask[1, 0, 0, 10:] = torch.finfo(dtype).min
    assert_near(contiguous_decode(query, key, value, mask), attend(query, key, value, mask).output)


@pytest.mark.parametrize("bad", [math.nan, math.inf])
@pytest.mark.parametrize("which", [0, 1, 2])
def test_nonfinite_numbers_spread_as_in_sdpa(bad: float, which: int) -> None:
    tensors = inputs(2)
    tensors[which][1, 1, 0, 3] = bad
    mask = torch.ones(1, 1, 1, 100, dtype=torch.bool, device=DEVICE)
    mask[..., 0] = False
    for attn_mask in (None, mask):
        expected = scaled_dot_product_attention(
            *(each.double() for each in tensors), attn_mask=attn_mask, enable_gqa=True
        )
        output = contiguous_decode(*tensors, attn_mask)
        assert torch.equal(output.isnan(), expected.isnan())
        assert torch.equal(output.isinf(), expected.isinf())


def test_nothing_outside_is_read_or_written() -> None:
    """Inputs are views of tensors that are otherwise filled with NaN."""
    windows = []
    for each in inputs(2, q_len=3, kv_len=37, head_dim=40):
        around = each.new_full([size + 2 for size in each.shape], math.nan)
        window = around[tuple(slice(1, -1) for _ in each.shape)]
        windows.append(window.copy_(each))
    output = split_kv.attend_to_cache(
        windows[0], Cache(windows[1], windows[2]), tiles=Tiling(16, 4, 1, 2)
    )
    assert_near(output, attend(*windows).output)


@st.composite
def strided(draw: st.DrawFn, *shape: int, seed: int) -> Tensor:
    """Draw a tensor whose axes lie in memory in any order, with gaps."""
    order = draw(st.permutations(range(4)))
    gaps = [draw(st.sampled_from([0, 0, 1, 3])) for _ in order]
    stored = half(*(shape[axis] + gap for axis, gap in zip(order, gaps, strict=True)), seed=seed)
    stored = stored[tuple(slice(shape[axis]) for axis in order)]
    return stored.permute([order.index(axis) for axis in range(4)])


@st.composite
def calls(draw: st.DrawFn) -> tuple[Any, ...]:
    batch, kv_heads, group = (draw(st.integers(1, 2)) for _ in range(3))
    q_len, kv_len = draw(st.integers(1, 5)), draw(st.integers(1, 80))
    head_dim, v_head_dim = draw(st.integers(1, 40)), draw(st.integers(1, 40))
    query = draw(strided(batch, kv_heads * group, q_len, head_dim, seed=1))
    key = draw(strided(batch, kv_heads, kv_len, head_dim, seed=2))
    value = draw(strided(batch, kv_heads, kv_len, v_head_dim, seed=3))
    full = (batch, kv_heads * group, q_len, kv_len)
    sizes = [draw(st.sampled_from([1, size])) for size in full]
    sizes = sizes[draw(st.integers(0, 2)) :]
    kind = draw(st.sampled_from(["none", "bool", "float"]))
    mask = None if kind == "none" else half(*sizes, dtype=torch.float32, seed=4)
    mask = mask > -0.5 if kind == "bool" and mask is not None else mask
    scale = draw(st.sampled_from([None, 0.3, 0.0, -0.2]))
    return query, key, value, mask, draw(st.booleans()), scale


@given(calls())
@settings(max_examples=15, deadline=None)
def test_any_call(call: tuple[Any, ...]) -> None:
    *inputs, scale = call
    assert_near(contiguous_decode(*inputs, scale=scale), attend(*call).output)


any_plan = given(
    st.integers(1, 2000),
    st.integers(1, 600),
    st.integers(0, 200_000),
    st.integers(1, 256),
    st.sampled_from(["described", "direct", "indirect", "quantised"]),
)


@any_plan
def test_plans(heads: int, rows: int, positions: int, dim: int, access: Access) -> None:
    """Every row is in a block, no split is without keys, and repeated plans are equal."""
    found = plan(heads, rows, positions, dim, dim, access, 132)
    assert found.row_blocks * found.block_m >= rows
    assert found.block_d >= dim
    assert 1 <= found.tiling.splits <= max(1, -(-positions // 128))
    assert found == plan.__wrapped__(heads, rows, positions, dim, dim, access, 132)


@any_plan
@example(1, 32, 200_000, 256, "quantised")
@pytest.mark.parametrize("sequences", [1, 2])
def test_plans_to_merge(
    sequences: int, heads: int, rows: int, positions: int, dim: int, access: Access
) -> None:
    """Every row is merged, and no program waits for one that may not have begun. If a single
    program merges, it reads no more bytes of parts than it has read of keys and values."""
    cut = plan(heads, rows, positions, dim, dim, access, 132, sequences=sequences)
    found = merging(cut, cut.tiling, heads, rows, 132)
    assert found.block_rows * found.row_chunks >= min(rows, cut.block_m)
    assert found.block_splits >= 1
    if found.together:
        assignment = cut.tiling.assignment
        programs = heads * cut.tiling.splits if assignment is None else assignment.programs(heads)
        assert programs * cut.row_blocks <= 132
    elif cut.tiling.assignment is None and cut.tiling.splits > 2:
        loaded = positions * (cut.block_d + cut.block_dv) * (1 if access == "quantised" else 2)
        parts = cut.tiling.splits * found.block_rows * found.row_chunks * cut.block_dv * 4
        assert parts <= loaded / cut.tiling.splits
    assert not merging(cut, cut.tiling, heads, rows, heads * cut.row_blocks - 1).together
