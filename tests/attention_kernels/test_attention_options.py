"""The prefill and decode kernels with options beyond SDPA pass the replay's judge."""

import functools
import math
from dataclasses import replace
from typing import Any

import pytest
import torch

from attention_kernels.portable.prefill import prefill
from capture.call.attention_variant import AttentionVariant, Window
from replay.accuracy.errors import compare
from replay.kernels.registry import find
from tests.attention_kernels import calls
from tests.attention_kernels.calls import DEVICE, LOADS, call_of, lengths, normal, offsets
from tests.replay.kernels.pairwise import each_pair
from tests.variant_calls import in_float8, paged_call

# An overflow is harmless: the tanh of a large score is still 1.
pytestmark = pytest.mark.filterwarnings("ignore:overflow encountered in exp2")


@pytest.mark.parametrize("softcap", [1.0, 50.0, 1e3, 1e6])
def test_soft_caps_far_above_the_scores_are_exact_in_float32(softcap: float) -> None:
    """Computing tanh x as 1 - 2 / (e^2x + 1) would round like 1, even for small x."""
    variant = AttentionVariant(softcap=softcap)
    verify("triton-fa2", call_of(20, 100, dtype=torch.float32, variant=variant))


verify = functools.partial(calls.verify, is_prepared=False)
WINDOWS: list[Window] = [
    (None, None),
    (0, 0),
    (5, None),
    (130, 0),
    (None, 20),
    (70, 300),
    (1000, 1000),
]


SIZES = [(200, 200), (70, 290), (290, 70), (1, 200)]


@each_pair("size", sizes=SIZES, window=WINDOWS, bottom_right=[False, True], size=LOADS)
def test_windows(sizes: tuple[int, int], window: Window, bottom_right: bool) -> None:
    is_causal = window[1] is None
    variant = AttentionVariant(bottom_right, window)
    verify("triton-fa2", call_of(*sizes, is_causal=is_causal, variant=variant))


@each_pair("size", softcap=[0.3, 30.0], scale=[None, -4.0], size=LOADS)
def test_soft_caps(softcap: float, scale: float | None) -> None:
    variant = AttentionVariant(softcap=softcap)
    verify("triton-fa2", call_of(100, 200, scale=scale, is_causal=True, variant=variant))


def test_a_soft_cap_stands_before_the_mask() -> None:
    bias = normal(2, 100, 200, dtype=torch.float16, seed=3) * 4
    for mask in (bias, bias > 0):
        variant = AttentionVariant(True, (50, 50), 2.0)
        verify("triton-fa2", call_of(100, 200, attn_mask=mask, variant=variant))


@each_pair(
    "size", dtype=[torch.float16, torch.bfloat16, torch.float32], head_dim=[64, 80], size=LOADS
)
def test_sinks(dtype: torch.dtype, head_dim: int) -> None:
    sinks = normal(4, seed=7)[::2]  # not adjacent in memory
    call = call_of(70, 140, head_dim, dtype=dtype, is_causal=True, sinks=sinks)
    verify("triton-fa2", call)
    verify("triton-fa2", replace(call, variant=AttentionVariant(True, (20, None), 5.0)))


@pytest.mark.parametrize(("name", "q_len"), [("triton-fa2", 70), ("triton-decode", 3)])
def test_a_large_sink_leaves_the_keys_their_digits(name: str, q_len: int) -> None:
    """A large sink makes the output small, but the weights of keys are not rounded to zero."""
    call = call_of(q_len, 140)
    call = call.with_tensors({"value": call.value * 1000})
    sinks = torch.full((2,), 12.0, device=DEVICE)
    output = find(name).attention(**replace(call, sinks=sinks).arguments())
    _, lse = prefill(call.query, call.key, call.value, return_lse=True)
    share = (lse - torch.logaddexp(lse, sinks[:, None])).exp()
    expected = find(name).attention(**call.arguments()) * share[..., None]
    assert compare(output, expected).relative_l1 < 2**-10


@pytest.mark.usefixtures("size")
def test_keys_outside_the_window_are_not_read() -> None:
    """A masked NaN would reach the output, since 0 · NaN is NaN."""
    call = call_of(500, 500, is_causal=True, variant=AttentionVariant(window=(100, None)))
    expected = find("triton-fa2").attention(**call.arguments())
    for tensor in (call.key, call.value):
        tensor[:, :, :200] = math.nan
    output = find("triton-fa2").attention(**call.arguments())
    last_of_their_block = 200 + 100 + 128
    assert torch.equal(output[:, :, last_of_their_block:], expected[:, :, last_of_their_block:])
    assert output[:, :, 250].isnan().all()


PACKED = {"cu_seqlens_q": offsets(70, 1, 130), "cu_seqlens_k": offsets(130, 40, 150)}


PACKED_VARIANTS = [
    AttentionVariant(),
    AttentionVariant(bottom_right=True),
    AttentionVariant(window=(30, None)),
    AttentionVariant(True, (30, 140), 3.0),
    AttentionVariant(True, max_seqlen_q=300),
]


@each_pair("size", variant=PACKED_VARIANTS, is_causal=[False, True], head_dim=[64, 80], size=LOADS)
def test_packed(variant: AttentionVariant, is_causal: bool, head_dim: int) -> None:
    call = call_of(201, 320, head_dim, is_causal=is_causal, variant=variant, **PACKED)
    verify("triton-varlen", call)


def test_packed_with_sinks_and_lengths_of_keys() -> None:
    used, sinks = lengths(100, 0, 77), normal(2, seed=7)
    for variant in (AttentionVariant(), AttentionVariant(bottom_right=True)):
        call = call_of(201, 320, is_causal=True, variant=variant, seqused_k=used, **PACKED)
        verify("triton-varlen", call)
        verify("triton-varlen", replace(call, sinks=sinks))


def test_keys_of_other_sequences_have_no_effect() -> None:
    call = call_of(201, 320, variant=AttentionVariant(True, (30, 20)), **PACKED)
    expected = find("triton-varlen").attention(**call.arguments())
    for tensor in (call.key, call.value):
        tensor[:, :, 130:170] = math.nan
    output = find("triton-varlen").attention(**call.arguments())
    assert torch.equal(output[:, :, :70], expected[:, :, :70])
    assert output[:, :, 70].isnan().all()
    assert torch.equal(output[:, :, 71:], expected[:, :, 71:])


@pytest.mark.parametrize(
    "variant", [AttentionVariant(), AttentionVariant(True), AttentionVariant(True, (40, None), 2.0)]
)
def test_lengths_of_keys(variant: AttentionVariant) -> None:
    used = lengths(70, 300, 5)
    call = call_of(20, 300, batch=3, is_causal=True, variant=variant, seqused_k=used)
    verify("triton-varlen", call)


def test_padding_leaves_the_diagonal_where_it_was() -> None:
    keys = torch.arange(200, device=DEVICE) >= torch.tensor([[0], [90]], device=DEVICE)
    call = call_of(200, 200, batch=2, is_causal=True, attn_mask=keys[:, None, None])
    for variant in (
        AttentionVariant(),
        AttentionVariant(bottom_right=True),
        AttentionVariant(True, (50, None)),
    ):
        verify("triton-varlen", replace(call, variant=variant))
    longer = replace(call, query=call.query[:, :, :50], variant=AttentionVariant(bottom_right=True))
    reason = "attn_mask beside lengths of sequences or a bottom-right diagonal"
    assert find("triton-varlen").refuses(longer) == reason
    with pytest.raises(NotImplementedError, match=reason):
        find("triton-varlen").attention(**longer.arguments())


DECODED: list[AttentionVariant] = [
    AttentionVariant(bottom_right=True),
    AttentionVariant(True, (100, None)),
    AttentionVariant(True, (700, 2)),
    AttentionVariant(False, (1, 300)),
    AttentionVariant(softcap=3.0),
    AttentionVariant(True, (5000, None), 0.5),
]


@each_pair(
    name=["triton-paged-decode", "triton-varlen"],
    variant=[
        AttentionVariant(),
        AttentionVariant(True, (40, None), 2.0),
        AttentionVariant(True, (60, 4)),
    ],
    longest=[None, 11, 70],
    scaled=[(), ("key", "value"), ("query", "key", "value")],
)
def test_recorded_pages_are_read_as_they_lie(
    name: str, variant: AttentionVariant, longest: int | None, scaled: tuple[str, ...]
) -> None:
    """A sequence has three queries, or two packed sequences have one and `longest` queries."""
    packed: dict[str, Any] = {"q_len": 3}
    if longest is not None:
        packed = {"q_len": 1 + longest, "cu_seqlens_q": offsets(1, longest)}
    sizes = {**packed, "q_heads": 6, "kv_heads": 2, "dtype": torch.float16, "device": DEVICE}
    is_causal = variant.window[1] is None
    call = paged_call([200, 70], 16, **sizes, is_causal=is_causal, variant=variant)
    call = in_float8(call, *scaled).to(DEVICE)
    if longest == 70 and name == "triton-paged-decode":
        assert "at most 16 queries" in str(find(name).refuses(call))
        return
    verify(name, call)
    key, value = call.key.clone(), call.value.clone()
    nobodys = [page for page in range(key.shape[0]) if page not in call.page_table]
    for tensor in (key, value):
        tensor[nobodys] = math.nan
    verify(name, call.with_tensors({"key": key, "value": value}))


@each_pair(q_len=[1, 5], is_causal=[False, True], variant=DECODED)
def test_decode(q_len: int, is_causal: bool, variant: AttentionVariant) -> None:
    """The keys are split into several parts, and programs have several rows."""
    call = call_of(q_len, 1500, q_heads=3, is_causal=is_causal, variant=variant)
    verify("triton-decode", call)
    verify("triton-paged-decode", call)
    sinks = normal(6, seed=7) * 3
    used = lengths(300, 3)
    twice = call_of(q_len, 301, batch=2, q_heads=6, kv_heads=2, seqused_k=used, sinks=sinks)
    twice = replace(twice, is_causal=is_causal, variant=variant)
    verify("triton-decode", twice)
    verify("triton-paged-decode[page_size=13]", twice)


def test_decode_with_sinks_and_a_mask() -> None:
    mask = normal(1, 1, 3, 1500, seed=3) > 0
    mask[:, :, 1] = False
    call = call_of(3, 1500, sinks=normal(4, seed=7)[::2], attn_mask=mask)
    verify("triton-decode", call)
    verify("triton-decode", replace(call, variant=AttentionVariant(True, (200, None), 2.0)))


def test_pages_hold_no_padding_beside_a_diagonal() -> None:
    keys = torch.arange(100, device=DEVICE) >= torch.tensor([[0], [90]], device=DEVICE)
    call = call_of(3, 100, batch=2, attn_mask=keys[:, None, None])
    verify("triton-paged-decode", call)
    reason = "attn_mask beside a causal mask, a window or lengths of keys"
    for changed in (
        replace(call, is_causal=True),
        replace(call, variant=AttentionVariant(True, (5, None))),
    ):
        assert find("triton-paged-decode").refuses(changed) == reason
        with pytest.raises(NotImplementedError, match=reason):
            find("triton-paged-decode").attention(**changed.arguments())


def test_decode_reads_no_keys_before_the_window() -> None:
    call = call_of(1, 1500, is_causal=True, variant=AttentionVariant(True, (300, None)))
    expected = find("triton-decode").attention(**call.arguments())
    for tensor in (call.key, call.value):
        tensor[:, :, : 1500 - 301] = math.nan
    assert torch.equal(find("triton-decode").attention(**call.arguments()), expected)
