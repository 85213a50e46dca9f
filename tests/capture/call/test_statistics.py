"""Figures of a call's attention are compared with known cases and a plain computation."""

import math
from dataclasses import replace

import pytest
import torch

from capture.call.attention_call import AttentionCall
from capture.call.attention_variant import AttentionVariant
from capture.call.statistics import call_statistics, mean
from tests.factories import normal, random_call
from tests.variant_calls import in_float8, paged_call

CALL = random_call(q_heads=4, kv_heads=2, q_len=40, kv_len=200, head_dim=16, v_head_dim=16)


def dense(call: AttentionCall) -> tuple[float, float, float]:
    """Return entropy, largest weight and top mass, computed from all weights."""
    groups = call.query.shape[1] // call.key.shape[1]
    scores = call.query @ call.key.repeat_interleave(groups, 1).mT * call.softmax_scale
    seen = torch.ones_like(scores, dtype=torch.bool)
    if call.attn_mask is not None:
        seen &= call.attn_mask
    if call.is_causal:
        seen &= torch.ones(scores.shape[-2:], dtype=torch.bool).tril()
    weights = scores.masked_fill(~seen, -math.inf).softmax(-1)
    enough = seen.sum(-1) >= 16
    weights, count = weights[enough], seen.sum(-1)[enough]
    entropy = -(weights * weights.clamp(min=1e-38).log()).sum(-1) / count.float().log()
    top = [
        row.sort(descending=True).values[: math.ceil(n / 100)].sum()
        for row, n in zip(weights, count, strict=True)
    ]
    return float(entropy.mean()), float(weights.amax(-1).mean()), float(torch.stack(top).mean())


@pytest.mark.parametrize(
    "call",
    [
        CALL,
        replace(CALL, scale=0.9),
        replace(CALL, is_causal=True),
        replace(CALL, attn_mask=normal(1, 4, 40, 200) > 0),
        replace(CALL, attn_mask=normal(200) > 0),
    ],
)
def test_figures_are_those_of_all_weights(call: AttentionCall) -> None:
    found = call_statistics(call)
    assert (found.entropy, found.largest, found.top_mass) == pytest.approx(dense(call), rel=1e-4)


def test_window_float_mask_and_bool_mask_of_the_same_keys_are_equal() -> None:
    position = torch.arange(200)
    inside = (position - torch.arange(200)[:, None]).abs() <= 20
    square = random_call(q_heads=2, q_len=200, kv_len=200)
    windowed = replace(square, variant=AttentionVariant(window=(20, 20)))
    masked = replace(square, attn_mask=inside)
    added = replace(square, attn_mask=torch.zeros(200, 200).masked_fill(~inside, -math.inf))
    assert call_statistics(windowed) == call_statistics(masked) == call_statistics(added)
    assert call_statistics(windowed) != call_statistics(square)


def test_pages_and_scales_change_nothing() -> None:
    call = in_float8(paged_call([40, 70], 16), "query", "key", "value")
    assert call_statistics(call) == call_statistics(call.without_pages().without_scales())


def test_uniform_attention() -> None:
    call = replace(CALL, query=torch.zeros_like(CALL.query))
    found = call_statistics(call)
    assert found.entropy == pytest.approx(1)
    assert found.largest == pytest.approx(1 / 200)
    assert found.top_mass == pytest.approx(2 / 200)


def test_one_key_with_all_weight_has_no_entropy() -> None:
    key = torch.zeros_like(CALL.key)
    key[:, :, 7] = 1000.0
    found = call_statistics(replace(CALL, key=key, query=torch.ones_like(CALL.query)))
    assert (found.entropy, found.largest, found.top_mass) == (0.0, 1.0, 1.0)


def test_soft_cap_flattens_and_a_sink_takes_its_share() -> None:
    sharp = replace(CALL, scale=5.0)
    capped = replace(sharp, variant=AttentionVariant(softcap=1.0))
    assert call_statistics(capped).entropy > call_statistics(sharp).entropy + 0.1
    level = torch.full((4,), math.log(200.0))
    found = call_statistics(replace(CALL, query=torch.zeros_like(CALL.query), sinks=level))
    assert found.largest == pytest.approx(1 / 400)


@pytest.mark.parametrize(("factor", "outliers"), [(3.0, 0), (6.0, 2)])
def test_outlier_channels_are_counted_in_the_head_with_most(factor: float, outliers: int) -> None:
    key = CALL.key.clone()
    key[:, 1, :, [3, 11]] *= factor
    key[:, 0, :, 5] *= factor
    assert call_statistics(replace(CALL, key=key)).outlier_channels == outliers


def test_key_offset_is_the_part_that_smoothing_removes() -> None:
    key = torch.ones(1, 1, 100, 4)
    key[:, :, ::2] = 3.0  # mean 2, deviation 1
    call = AttentionCall(torch.ones(1, 1, 1, 4), key, key)
    assert call_statistics(call).key_offset == pytest.approx(2)
    assert call_statistics(replace(call, key=torch.ones_like(key))).key_offset == math.inf


def test_queries_that_see_few_keys_do_not_count() -> None:
    found = call_statistics(random_call(q_len=3, kv_len=15))
    assert math.isnan(found.entropy)
    assert found.key_offset > 0
    together = mean([found, call_statistics(CALL)])
    assert together.entropy == call_statistics(CALL).entropy


def test_half_precision() -> None:
    half = replace(CALL, **{name: each.half() for name, each in CALL.tensors().items()})
    found, usual = call_statistics(half), call_statistics(CALL)
    assert found.entropy == pytest.approx(usual.entropy, abs=0.01)


@pytest.mark.filterwarnings("error")
@pytest.mark.parametrize("q_len", [0, 5])
@pytest.mark.parametrize("kv_len", [0, 1])
def test_fewer_than_two_keys_have_no_statistics(q_len: int, kv_len: int) -> None:
    found = call_statistics(random_call(q_len=q_len, kv_len=kv_len))
    assert all(math.isnan(each) for each in vars(found).values())
    for together in ([found, call_statistics(CALL)], [call_statistics(CALL), found]):
        assert mean(together) == call_statistics(CALL)
    assert math.isnan(mean([found]).outlier_channels)


def test_keys_that_no_query_sees_are_inspected() -> None:
    hidden = replace(CALL, attn_mask=torch.zeros(40, 200, dtype=torch.bool))
    for call in (hidden, random_call(q_len=0, kv_len=200)):
        found = call_statistics(call)
        assert found.key_offset == call_statistics(replace(call, attn_mask=None)).key_offset > 0
        assert math.isnan(found.largest)


def test_keys_of_zeros_have_no_mean_to_remove() -> None:
    assert math.isnan(call_statistics(replace(CALL, key=CALL.key * 0)).key_offset)
