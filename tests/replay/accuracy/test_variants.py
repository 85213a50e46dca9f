"""Calls beyond SDPA: the reference is compared with one dense formula."""

import math
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from capture.call.attention_call import AttentionCall
from capture.call.attention_variant import AttentionVariant
from replay.accuracy.quantised import QuantisedNoise
from replay.accuracy.reference import attention
from replay.accuracy.verdict import Expected
from replay.isolation.block_inputs import draw_rows
from replay.isolation.output_rows import some_rows
from replay.timing.flops import valid_pairs
from tests.factories import normal, random_call
from tests.variant_calls import in_float8, paged_call, sequences, visible


def dense(call: AttentionCall) -> Tensor:
    """Compute attention in float64 by the dense formula."""
    if call.page_table is not None:
        along = 0 if call.cu_seqlens_q is None else 2
        return torch.cat([dense(each) for each in sequences(call)], along)
    group = call.shape.q_heads // call.shape.kv_heads
    true = {name: getattr(call, name).double() for name in ("query", "key", "value")}
    for name in true.keys() if call.key_scale is not None else ():
        of_heads = getattr(call, f"{name}_scale").repeat_interleave(group if name == "query" else 1)
        true[name] = true[name] * of_heads.double()[:, None, None]
    key, value = (true[name].repeat_interleave(group, 1) for name in ("key", "value"))
    scale = call.query.shape[-1] ** -0.5 if call.scale is None else call.scale
    scores = true["query"] @ key.mT * scale
    if (cap := call.variant.softcap) is not None:
        scores = cap * torch.tanh(scores / cap)
    if call.attn_mask is not None:
        mask = call.attn_mask
        scores = scores.masked_fill(~mask, -math.inf) if mask.dtype == torch.bool else scores + mask
    scores = scores.masked_fill(~visible(call)[:, None], -math.inf)
    if call.sinks is not None:
        sinks = call.sinks.double()[None, :, None, None].expand(*scores.shape[:3], 1)
        scores = torch.cat([scores, sinks], -1)
    weights = scores.softmax(-1).nan_to_num(0.0)
    return weights[..., : call.shape.kv_len] @ value


def seen_pairs(call: AttentionCall) -> int:
    """Count the pairs of a query and a key that it sees, in all heads."""
    seen = visible(call)[:, None].expand(-1, call.shape.q_heads, -1, -1)
    if call.attn_mask is not None:
        seen = seen & (call.attn_mask != (0 if call.attn_mask.dtype == torch.bool else -math.inf))
    return int(seen.sum())


@st.composite
def calls(draw: Any) -> AttentionCall:
    """Draw calls with every combination of features."""
    kv_heads, group = draw(st.integers(1, 2)), draw(st.integers(1, 2))
    packed = draw(st.booleans())
    side = st.one_of(st.none(), st.integers(0, 6))
    fields: dict[str, Any] = {}
    if packed:
        lengths = draw(
            st.lists(st.tuples(st.integers(1, 6), st.integers(1, 6)), min_size=1, max_size=3)
        )
        batch, q_len, kv_len = 1, sum(q for q, _ in lengths), sum(k for _, k in lengths)
        for name, each in zip(
            ("cu_seqlens_q", "cu_seqlens_k"), zip(*lengths, strict=True), strict=True
        ):
            fields[name] = torch.tensor([0, *each]).cumsum(0, dtype=torch.int32)
        most = [k for _, k in lengths]
    else:
        batch, q_len, kv_len = (draw(st.integers(1, n)) for n in (2, 9, 9))
        most = [kv_len] * batch
    if draw(st.booleans()):
        fields["seqused_k"] = torch.tensor([draw(st.integers(0, n)) for n in most]).int()
    if draw(st.booleans()):
        fields["sinks"] = normal(kv_heads * group, seed=3)
    in_pages = draw(st.booleans())
    if not in_pages and draw(st.booleans()):
        shapes = (q_len, kv_len), (batch, 1, 1, kv_len), (batch, kv_heads * group, q_len, kv_len)
        bias = normal(*draw(st.sampled_from(shapes)), seed=4)
        masks = bias > -1, bias.masked_fill(bias < -1, -math.inf)
        fields["attn_mask"] = draw(st.sampled_from(masks))
    variant = AttentionVariant(
        bottom_right=draw(st.booleans()),
        window=draw(st.tuples(side, side)),
        softcap=draw(st.sampled_from([None, 0.7])),
    )
    fields |= {
        "q_heads": kv_heads * group,
        "kv_heads": kv_heads,
        "q_len": q_len,
        "head_dim": 8,
        "v_head_dim": draw(st.sampled_from([8, 1, 12])),
        "scale": draw(st.sampled_from([None, 0.3, 0.0, -1.5])),
        "is_causal": draw(st.booleans()),
        "variant": variant,
    }
    if in_pages:
        fields.pop("cu_seqlens_k", None)
        lengths = fields.pop("seqused_k", torch.tensor(most)).tolist()
        call = paged_call(lengths, draw(st.integers(1, 5)), **fields)
    else:
        call = random_call(batch=batch, kv_len=kv_len, **fields)
    return in_float8(call, *draw(st.sampled_from([(), ("query", "key", "value")])))


@settings(max_examples=80, deadline=None)
@given(calls(), st.sampled_from([1, 7, 2**24]))
def test_reference_is_the_formula(call: AttentionCall, block_elements: int) -> None:
    expected = dense(call)
    assert torch.allclose(attention(call, block_elements=block_elements), expected)
    parts = [call] if call.page_table is None else sequences(call)
    assert valid_pairs(call) == sum(map(seen_pairs, parts))


@settings(max_examples=30, deadline=None)
@given(calls(), st.integers(0, 1000))
def test_rows_of_a_block_are_judged_as_calls_of_their_own(call: AttentionCall, number: int) -> None:
    whole = dense(call)
    for rows in draw_rows(call, 1, number)[0]:
        assert torch.allclose(attention(some_rows(call, rows))[0, 0], rows.of(whole))


@settings(max_examples=15, deadline=None)
@given(calls())
def test_8_bit_noise_is_small_beside_the_output(call: AttentionCall) -> None:
    expected = Expected.of(call)
    lengths = torch.linalg.vector_norm(expected.reference, dim=-1)
    noise = QuantisedNoise.of(call, expected.reference, torch.hypot(lengths, expected.spread))
    if lengths.sum() > 0:
        assert noise.whole[0].max() < 0.15


@pytest.mark.parametrize("sinks", [None, torch.zeros(2), torch.full((2,), -math.inf)])
def test_nothing_reaches_the_output_of_a_sequence_without_keys(sinks: Tensor | None) -> None:
    used = torch.tensor([0, 8], dtype=torch.int32)
    call = random_call(batch=2, q_len=4, kv_len=8, seqused_k=used, sinks=sinks)
    call.key[0] = call.value[0] = math.nan
    output = attention(call)
    assert (output[0] == 0).all()
    assert output[1].isfinite().all()


def test_values_after_the_keys_are_not_in_8_bit_noise() -> None:
    used = torch.tensor([40, 64], dtype=torch.int32)
    call = random_call(batch=2, q_len=4, kv_len=64, seqused_k=used)
    call.key[0, :, 40:] = call.value[0, :, 40:] = 0.0
    expected = Expected.of(call).quantised
    call.key[0, :, 40:] = call.value[0, :, 40:] = math.nan
    found = Expected.of(call).quantised
    assert torch.equal(found.rows, expected.rows)
    assert torch.equal(found.whole, expected.whole)


@pytest.mark.parametrize("packed", [False, True])
def test_values_after_the_keys_of_a_page_never_reach_an_output(packed: bool) -> None:
    """Nor do unused pages and table entries after a sequence's last page reach an output."""
    starts = {"cu_seqlens_q": torch.tensor([0, 1, 3])} if packed else {}
    call = paged_call([6, 3], 4, **starts)
    expected = attention(call)
    key, value = (torch.full_like(each, math.nan) for each in (call.key, call.value))
    for sequence, length in enumerate((6, 3)):
        for t in range(length):
            page = call.page_table[sequence, t // 4]
            key[page, :, t % 4] = call.key[page, :, t % 4]
            value[page, :, t % 4] = call.value[page, :, t % 4]
    call.page_table[1, 1:] = 2147480000
    found = attention(call.with_tensors({"key": key, "value": value}))
    assert torch.equal(found, expected)


def test_features_of_a_call_are_listed() -> None:
    variant = AttentionVariant(bottom_right=True)
    assert random_call(is_causal=True, variant=variant).features == ("bottom-right",)
    assert random_call(variant=variant).features == ()
    assert random_call(q_len=13, is_causal=True, variant=variant).features == ()
