"""8-bit prefill quantises each sequence of packed, padded and masked batches separately."""

import math
from collections.abc import Iterable
from dataclasses import replace
from typing import Any

import pytest
import torch
from hypothesis import Phase, example, given, settings
from hypothesis import strategies as st
from torch import Tensor

from attention_kernels.options import Lengths
from attention_kernels.quantised.quantise import GROUP, first_group, quantise_key_value
from attention_kernels.quantised.quantised_prefill import (
    attend_to_quantised,
    quantised_prefill,
    visited_blocks_of,
)
from capture.call.attention_call import AttentionCall
from capture.call.attention_variant import AttentionVariant
from replay.accuracy.verdict import Expected, judge
from replay.kernels.registry import find
from tests.attention_kernels import calls
from tests.attention_kernels.calls import DEVICE, band, lengths, normal, offsets, verify

pytestmark = pytest.mark.filterwarnings("ignore:invalid value encountered:RuntimeWarning")

FP8 = torch.float8_e4m3fn
NAMES = ("triton-sage", "triton-fp8", "triton-sage-fp8")


def shifted(call: AttentionCall) -> AttentionCall:
    """Return a call whose keys share an offset, so that a mean of other keys shows."""
    return call.with_tensors({"key": call.key + 1.0})


def call_of(*sizes: int, **fields: Any) -> AttentionCall:
    return shifted(calls.call_of(*sizes, **fields))


def in_turn(forms: Iterable[str]) -> list[tuple[str, str, bool]]:
    """Return each form twice: with one kernel as a drop-in, and with another as a prepared core."""
    return [
        (form, NAMES[(n + is_prepared) % 3], is_prepared)
        for n, form in enumerate(forms)
        for is_prepared in (False, True)
    ]


Q_LENGTHS, K_LENGTHS = (70, 1, 130), (130, 40, 150)
PACKED: dict[str, Any] = {"cu_seqlens_q": offsets(*Q_LENGTHS), "cu_seqlens_k": offsets(*K_LENGTHS)}


@settings(max_examples=10, deadline=None, phases=[Phase.explicit, Phase.generate])
@given(
    each=st.lists(st.integers(0, 270), min_size=1, max_size=3),
    key_dtype=st.sampled_from([torch.int8, FP8]),
    smooth_k=st.booleans(),
)
@example(each=[5, 0, 130, 0], key_dtype=torch.int8, smooth_k=True)
def test_sequences_are_separate(each: list[int], key_dtype: torch.dtype, smooth_k: bool) -> None:
    """Each sequence has its own groups with equal bits; one without keys has a group of zeros."""
    tokens = sum(each) + 1
    key, value = (normal(1, 2, tokens, 40, dtype=torch.float16, seed=seed) for seed in (1, 2))
    begins = offsets(*each)
    packed = Lengths("packed", len(each), 0, k_starts=begins)
    together = quantise_key_value(key, value, key_dtype, True, smooth_k, True, packed)
    for n, length in enumerate(each):
        first = first_group.fn(int(begins[n]), n, GROUP)
        own = slice(int(begins[n]), int(begins[n]) + length)
        groups = slice(first, first + max(1, -(-length // GROUP)))
        rows = slice(groups.start * GROUP, groups.stop * GROUP)
        found = (
            together.key[:, :, rows],
            together.key_scale[:, :, groups],
            together.value[..., rows],
            together.value_scale[:, :, groups],
        )
        if length == 0:
            assert not any(part.float().any() for part in (found[0], found[2]))
            assert all(part.isfinite().all() for part in (found[1], found[3]))
            assert together.key_mean is None or not together.key_mean[n].any()
            continue
        alone = quantise_key_value(
            key[:, :, own], value[:, :, own], key_dtype, True, smooth_k, True
        )
        wanted = (alone.key, alone.key_scale, alone.value, alone.value_scale)
        for part, same in zip(found, wanted, strict=True):
            assert torch.equal(part.float(), same.float())
        if alone.key_mean is not None:
            assert torch.equal(together.key_mean[n], alone.key_mean[0])


VARIANTS: dict[str, dict[str, Any]] = {
    "plain": {},
    "causal": {"is_causal": True},
    "bottom right": {"is_causal": True, "variant": AttentionVariant(bottom_right=True)},
    "window": {"variant": AttentionVariant(window=(30, 20))},
    "longest stated": {"is_causal": True, "variant": AttentionVariant(True, max_seqlen_q=300)},
    "all": {
        "is_causal": True,
        "variant": AttentionVariant(True, (30, None), 5.0),
        "sinks": normal(2),
    },
    "key lengths": {"seqused_k": lengths(100, 0, 77)},
    "key lengths, sinks": {"seqused_k": lengths(1, 40, 129), "is_causal": True, "sinks": normal(2)},
}


@pytest.mark.parametrize(("form", "name", "is_prepared"), in_turn(VARIANTS))
def test_packed(form: str, name: str, is_prepared: bool) -> None:
    head_dim = 80 if is_prepared else 64
    call = call_of(201, 320, head_dim, **PACKED, **VARIANTS[form])
    verify(name, call, is_prepared=is_prepared)


@pytest.mark.parametrize("name", NAMES)
def test_packed_with_head_dim_256(name: str) -> None:
    verify(name, call_of(201, 320, 256, **PACKED, **VARIANTS["all"]), is_prepared=False)


@pytest.mark.parametrize("name", NAMES)
def test_keys_of_other_sequences_have_no_effect(name: str) -> None:
    call = call_of(201, 320, **PACKED, variant=AttentionVariant(softcap=5.0))
    expected = find(name).attention(**call.arguments())
    for tensor in (call.key, call.value):
        tensor[:, :, 130:170] = math.nan
    output = find(name).attention(**call.arguments())
    assert output[:, :, 70].isnan().all()
    assert torch.equal(output[:, :, :70], expected[:, :, :70])
    assert torch.equal(output[:, :, 71:], expected[:, :, 71:])


def test_sequences_without_queries_or_keys() -> None:
    at: dict[str, Any] = {
        "cu_seqlens_q": offsets(0, 3, 4, 5),
        "cu_seqlens_k": offsets(5, 0, 130, 0),
    }
    for _, name, is_prepared in in_turn(["", ""])[:3]:
        verify(name, call_of(12, 135, **at), is_prepared=is_prepared)
    call = call_of(12, 135)
    nobody = Lengths("packed", 0, 0, offsets(), offsets())
    output = quantised_prefill(call.query, call.key, call.value, lengths=nobody)
    assert output.shape == (1, 2, 12, 64)


@pytest.mark.parametrize(
    ("name", "form"), zip(NAMES, ["plain", "bottom right", "all"], strict=True)
)
def test_lengths_of_keys(name: str, form: str) -> None:
    used = lengths(70, 300, 0)
    call = call_of(20, 300, batch=3, seqused_k=used, **VARIANTS[form])
    verify(name, call, is_prepared=True)
    expected = find(name).attention(**call.arguments())
    for tensor in (call.key, call.value):
        tensor[0, :, 70:] = tensor[2] = math.nan
    assert torch.equal(find(name).attention(**call.arguments()), expected)


@pytest.mark.parametrize(("fp8_value", "is_causal"), [(False, True), (True, False)])
def test_padding_before_the_keys(fp8_value: bool, is_causal: bool) -> None:
    """As in `padded_prefill`, the padding does not move the diagonal."""
    starts, counts = lengths(0, 90, 199), lengths(130, 110, 1)
    call = call_of(140, 200, batch=3, is_causal=is_causal)
    places = torch.arange(200, device=DEVICE)
    counts_here = (places >= starts[:, None]) & (places < (starts + counts)[:, None])
    masked = replace(call, attn_mask=counts_here[:, None, None])
    expected = Expected.of(masked)
    for tensor in (call.key, call.value):
        tensor.masked_fill_(~counts_here[:, None, :, None], math.nan)
    output = quantised_prefill(
        call.query,
        call.key,
        call.value,
        is_causal,
        score_dtype=FP8 if fp8_value else torch.int8,
        fp8_value=fp8_value,
        lengths=Lengths("padded", 3, 140, None, starts, counts),
    )
    verdict = judge(output, expected, "quantised")
    assert verdict.passed, verdict.sentence


MASKS = {
    **calls.MASKS,
    "keys alone": lambda: torch.arange(300, device=DEVICE)[None] % 190 < 60,
    "some": lambda: normal(150, 300, seed=3) > 0,
}


def masked_call(mask: Tensor, head_dim: int = 64, **fields: Any) -> AttentionCall:
    return shifted(calls.masked_call(mask, head_dim, **fields))


@pytest.mark.parametrize(("mask", "name", "is_prepared"), in_turn(MASKS))
def test_masks(mask: str, name: str, is_prepared: bool) -> None:
    verify(name, masked_call(MASKS[mask](), kv_heads=2), is_prepared=is_prepared)


@pytest.mark.parametrize(("name", "head_dim"), zip(NAMES, [80, 256, 80], strict=True))
def test_masks_with_soft_cap_and_sinks(name: str, head_dim: int) -> None:
    call = masked_call(
        band(150, 300, 40), head_dim, variant=AttentionVariant(softcap=3.0), sinks=normal(2)
    )
    verify(name, call, is_prepared=head_dim == 80)


@pytest.mark.parametrize("fp8_value", [False, True])
def test_blocks_that_a_mask_hides_are_not_visited(fp8_value: bool) -> None:
    call = masked_call(band(64, 640, 60))
    quantised = quantise_key_value(call.key, call.value, FP8, fp8_value)
    expected = attend_to_quantised(call.query, quantised, attn_mask=call.attn_mask)
    quantised.key_scale[:, :, 1:] = math.nan
    if quantised.value_scale is not None:
        quantised.value_scale[:, :, 1:] = math.nan
    else:
        quantised.value[:, :, 128:] = math.nan
    visited = visited_blocks_of(call.query, quantised, call.attn_mask)
    output = attend_to_quantised(call.query, quantised, attn_mask=call.attn_mask, visited=visited)
    assert torch.equal(output, expected)


def test_unsupported_masks_are_refused() -> None:
    call = masked_call(band(70, 130, 40))
    arguments = (call.query, call.key, call.value)
    with pytest.raises(ValueError, match="beside a diagonal"):
        quantised_prefill(*arguments, True, attn_mask=call.attn_mask)
    with pytest.raises(ValueError, match="needs bool"):
        quantised_prefill(*arguments, attn_mask=normal(70, 130))
