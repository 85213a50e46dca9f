"""Our 8-bit prefill is right on a GPU, with Hopper's and with the portable kernel."""

import math
from collections.abc import Callable
from dataclasses import replace
from itertools import product
from typing import Any

import pytest
import torch

from attention_kernels.hopper.support import has_gluon_kernels
from attention_kernels.launch.launcher import Launch, PlanCache
from capture.call.attention_call import AttentionCall
from capture.call.attention_variant import AttentionVariant
from replay.kernels.registry import find
from replay.workloads.random_calls import Spec
from tests.attention_kernels.calls import band, lengths, offsets, verify
from tests.factories import normal
from tests.gpu.attention_kernels import cases
from tests.gpu.attention_kernels.cases import BEYOND, BOTTOM_RIGHT
from tests.replay.kernels.pairwise import pairwise

DEVICE = torch.device("cuda")
TENSOR = ("triton-fp8[accum=tensor]", "triton-sage-fp8[accum=tensor]")
DIMS = (64, 96, 128)
NAMES = ("triton-sage", "triton-fp8", "triton-sage-fp8", *TENSOR)


@pytest.fixture
def portable(monkeypatch: pytest.MonkeyPatch) -> None:
    """Run the portable kernel even on a Hopper GPU."""
    from attention_kernels.quantised import quantised_prefill

    monkeypatch.setattr(quantised_prefill, "has_gluon_kernels", lambda device: False)
    for plans in ("_calls", "_repetitions"):  # drop plans that were made for Hopper
        monkeypatch.setattr(quantised_prefill, plans, PlanCache())


def attention_of(name: str) -> Callable[..., torch.Tensor]:
    """Return a kernel, or skip the test where the kernel is unavailable."""
    kernel = find(name)
    if reason := kernel.unavailable(DEVICE):
        pytest.skip(reason)
    return kernel.attention


def check(name: str, call: AttentionCall) -> None:
    attention_of(name)
    verify(name, call)


def call_of(spec: Spec) -> AttentionCall:
    return spec.call(DEVICE, torch.Generator(DEVICE).manual_seed(0))


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize(
    "spec",
    [
        Spec(8, 64, 16, 1024, 1024, 64, 64, is_causal=True),
        Spec(1, 4, 4, 4250, 4250, 64, 64),
        Spec(2, 4, 2, 700, 127, 128, 128, is_causal=True),
        # 216 or 144 tiles: 132 programs share those of the second turn.
        Spec(3, 24, 8, 300, 5000, 128, 128),
        Spec(3, 24, 8, 300, 5000, 64, 64),
    ],
    ids=str,
)
def test_shapes(name: str, spec: Spec) -> None:
    check(name, call_of(spec))


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("kv_heads", [64, 32, 16], ids="{} key heads".format)
def test_a_hundred_calls_agree(name: str, kv_heads: int) -> None:
    """The bits are equal. A race between loading and computing warps would change some.

    With these head counts, one, two and four warp groups of a program share a key head's blocks.
    """
    agree(name, Spec(8, 64, kv_heads, 1024, 1024, 64, 64, is_causal=True))


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("head_dim", [64, 128])
def test_a_hundred_calls_with_shared_tiles_agree(name: str, head_dim: int) -> None:
    """The pieces of a tile are added in a fixed order, even if they arrive in another order."""
    agree(name, Spec(1, 8, 2, 300, 9000, head_dim, head_dim))


def agree(name: str, spec: Spec) -> None:
    attend = attention_of(name)
    arguments = call_of(spec).arguments()
    first = attend(**arguments)
    assert not first.isfinite().logical_not().nonzero().tolist()
    for _ in range(100):
        different = (attend(**arguments) != first).nonzero()
        assert not len(different), different[:20].tolist()


@pytest.mark.parametrize(
    ("name", "spec"),
    [
        ("triton-sage", Spec(1, 2, 1, 129, 300, 80, 80)),
        ("triton-fp8", Spec(1, 2, 2, 1, 1, 96, 96)),
        ("triton-sage-fp8", Spec(1, 2, 2, 7, 7, 40, 40, is_causal=True)),
        ("triton-sage-fp8", Spec(1, 2, 2, 300, 300, 256, 256)),
    ],
    ids=str,
)
def test_odd_head_dims(name: str, spec: Spec) -> None:
    check(name, call_of(spec))


@pytest.mark.usefixtures("portable")
@pytest.mark.parametrize(
    ("name", "spec"),
    [
        ("triton-sage", Spec(8, 64, 16, 1024, 1024, 64, 64, is_causal=True)),
        ("triton-fp8", Spec(2, 4, 2, 700, 127, 128, 128, is_causal=True)),
        ("triton-sage-fp8", Spec(1, 4, 4, 4250, 4250, 64, 64)),
        ("triton-sage-fp8", Spec(1, 2, 1, 7, 300, 80, 80)),
        (TENSOR[0], Spec(1, 4, 4, 4250, 4250, 128, 128)),
    ],
    ids=str,
)
def test_portable(name: str, spec: Spec) -> None:
    check(name, call_of(spec))


@pytest.mark.parametrize("name", ["triton-sage", "triton-sage-fp8"])
def test_strides(name: str) -> None:
    call = call_of(Spec(2, 4, 4, 500, 500, 128, 128))
    fused = torch.cat([call.query, call.key, call.value], dim=1).transpose(1, 2).contiguous()
    query, key, value = fused.transpose(1, 2).chunk(3, dim=1)
    check(name, call.with_tensors({"query": query, "key": key, "value": value}))
    odd = torch.cat([value[..., :1], value], dim=-1)[..., 1:]
    check(name, call.with_tensors({"value": odd, "key": key.mT.contiguous().mT}))


def nan_stays_in_its_row_and_column(name: str) -> None:
    call = call_of(Spec(1, 2, 2, 4250, 4250, 64, 64))
    call.query[0, 0, 33, 5] = math.nan
    call.value[0, 1, 40, 7] = math.nan
    is_nan = attention_of(name)(**call.arguments()).isnan()
    assert bool(is_nan[0, 0, 33].all())
    assert bool(is_nan[0, 1, :, 7].all())
    assert int(is_nan.sum()) == 64 + 4250


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("is_causal", [False, True], ids=["full", "causal"])
def test_scores_that_rise(name: str, is_causal: bool) -> None:
    """The largest score so far rises from block to block."""
    call = call_of(Spec(1, 4, 2, 3000, 3000, 64, 64, is_causal=is_causal))
    call.query.abs_()
    call.key[..., :32] += torch.linspace(-1, 1, 3000, device=DEVICE)[:, None]
    check(name, call)


@pytest.mark.parametrize("name", NAMES)
def test_nan(name: str) -> None:
    nan_stays_in_its_row_and_column(name)


@pytest.mark.usefixtures("portable")
def test_nan_portable() -> None:
    nan_stays_in_its_row_and_column("triton-sage-fp8")


SINK = {"sinks": -math.inf, "all": 9.0}
"""Sink of one head, keyed by the name of the options; other sinks are random."""
LENGTHS = ((700, 1000), (1000, 300), (500, 3000), (200, 5000))
"""Numbers of queries and keys; the last pair has so few tiles that programs share them."""


def beyond(form: str, head_dim: int, q_len: int, kv_len: int) -> AttentionCall:
    """Return a call whose keys share an offset."""
    call = cases.call_with(BEYOND[form], (2, 8, 2, q_len, kv_len, head_dim, head_dim))
    if call.sinks is not None:
        call.sinks[3] = SINK[form]
    return call.with_tensors({"key": call.key + 1.0})


@pytest.mark.parametrize(("form", "head_dim", "name"), pairwise(product(BEYOND, DIMS, NAMES)))
def test_beyond_sdpa(form: str, head_dim: int, name: str) -> None:
    for sizes in LENGTHS:
        call = beyond(form, head_dim, *sizes)
        assert find(name).refuses(call) is None
        check(name, call)


@pytest.mark.parametrize("form", ["bottom right", "all"])
@pytest.mark.parametrize("head_dim", [64, 128])
def test_rows_that_see_nothing_are_zeros(head_dim: int, form: str) -> None:
    call = beyond(form, head_dim, 1000, 300)
    if call.sinks is not None:
        call.sinks[:4] = -math.inf
    for name in NAMES:
        output = find(name).attention(**call.arguments())
        assert not output[:, :, :700].any()
        assert output[:, :, 700:].isfinite().all()
        assert output[:, :, 700:].any(dim=-1).all()


def test_keys_outside_a_window_are_not_read() -> None:
    """A NaN in a block has no effect on tiles whose window begins after it, even after the last
    key."""
    call = replace(beyond("window", 128, 1000, 300), variant=AttentionVariant(False, (50, 0)))
    call.value[:, :, :128] = math.nan
    for name in NAMES:
        output = find(name).attention(**call.arguments())
        assert output[:, :, 256:].isfinite().all()


Q_LENGTHS, K_LENGTHS = (700, 1, 0, 1300, 99, 64), (1000, 300, 5, 1300, 0, 128)
PACKED: dict[str, dict[str, Any]] = {
    "plain": {},
    "causal": {"is_causal": True},
    **{form: BEYOND[form] for form in ("bottom right", "window")},
    "key lengths": {"seqused_k": lengths(900, 300, 5, 1, 0, 128)},
    "all": BEYOND["all"],
}


def packed(form: str, head_dim: int) -> AttentionCall:
    sizes = (1, 8, 2, sum(Q_LENGTHS), sum(K_LENGTHS), head_dim, head_dim)
    starts = {"cu_seqlens_q": offsets(*Q_LENGTHS), "cu_seqlens_k": offsets(*K_LENGTHS)}
    call = cases.call_with({**PACKED[form], **starts}, sizes)
    return call.with_tensors({"key": call.key + 1.0})


@pytest.mark.parametrize(
    ("form", "head_dim", "name"), pairwise(product(PACKED, (40, 64, 128), NAMES))
)
def test_packed(form: str, head_dim: int, name: str) -> None:
    check(name, packed(form, head_dim))


@pytest.mark.usefixtures("portable")
@pytest.mark.parametrize("form", ["bottom right", "key lengths", "all"])
def test_packed_portable(form: str) -> None:
    for name, head_dim in (("triton-sage", 128), ("triton-fp8", 64), ("triton-sage-fp8", 256)):
        check(name, packed(form, head_dim))


@pytest.mark.parametrize("name", NAMES)
def test_a_packed_sequence_gets_the_bits_that_it_gets_alone(name: str) -> None:
    attend = attention_of(name)
    call = packed("bottom right", 128)
    output = attend(**call.arguments())
    at_q, at_k = offsets(*Q_LENGTHS).tolist(), offsets(*K_LENGTHS).tolist()
    for n in (0, 3, 5):
        q_rows, k_rows = slice(*at_q[n : n + 2]), slice(*at_k[n : n + 2])
        tensors = call.query[:, :, q_rows], call.key[:, :, k_rows], call.value[:, :, k_rows]
        alone = AttentionCall(*tensors, is_causal=True, enable_gqa=True, variant=BOTTOM_RIGHT)
        assert torch.equal(output[:, :, q_rows], attend(**alone.arguments()))


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("head_dim", [64, 128])
def test_invalid_tokens_have_no_effect(head_dim: int, name: str) -> None:
    """Keys and values of another sequence or past a length have no effect, even if they are NaN."""
    attend = attention_of(name)
    call = packed("all", head_dim)
    expected = attend(**call.arguments())
    for tensor in (call.key, call.value):
        tensor[:, :, 1000:1300] = math.nan  # keys of the sequence with one query
    output = attend(**call.arguments())
    assert output[:, :, 700].isnan().all()
    assert torch.equal(output[:, :, :700], expected[:, :, :700])
    assert torch.equal(output[:, :, 701:], expected[:, :, 701:])
    used = lengths(77, 500, 0)
    padded = call_of(Spec(3, 8, 2, 300, 500, head_dim, head_dim))
    padded = replace(padded, seqused_k=used)
    check(name, padded)
    expected = attend(**padded.arguments())
    for tensor in (padded.key, padded.value):
        tensor[0, :, 77:] = tensor[2] = math.nan
    assert torch.equal(attend(**padded.arguments()), expected)


@pytest.mark.parametrize("head_dim", [64, 128])
def test_packed_calls_have_the_same_bits_each_time(head_dim: int) -> None:
    call = packed("all", head_dim)
    for name in NAMES:
        first = find(name).attention(**call.arguments())
        for _ in range(20):
            assert torch.equal(find(name).attention(**call.arguments()), first)


MASKS = {
    "band": lambda: band(700, 1000, 100),
    "odd": lambda: band(300, 333, 100),
    "by head": lambda: torch.stack([band(700, 1000, 50 * head) for head in range(8)]),
    "by batch": lambda: torch.stack([band(700, 1000, 5), ~band(700, 1000, 400)])[:, None],
    "some": lambda: normal(300, 500, seed=3, device=DEVICE) > 0,
    "everything is seen": lambda: torch.ones(300, 512, dtype=torch.bool, device=DEVICE),
    "nothing is seen": lambda: torch.zeros(300, 512, dtype=torch.bool, device=DEVICE),
    "keys alone": lambda: torch.arange(500, device=DEVICE)[None, :] % 190 < 60,
}


def masked(mask: torch.Tensor, head_dim: int, **fields: Any) -> AttentionCall:
    batch = mask.shape[0] if mask.ndim == 4 else 1
    q_len = 300 if mask.shape[-2] == 1 else mask.shape[-2]
    call = call_of(Spec(batch, 8, 2, q_len, mask.shape[-1], head_dim, head_dim))
    return replace(call, attn_mask=mask, **fields)


@pytest.mark.parametrize(("mask", "head_dim", "name"), pairwise(product(MASKS, DIMS, NAMES)))
def test_masks(mask: str, head_dim: int, name: str) -> None:
    call = masked(MASKS[mask](), head_dim)
    check(name, call)
    capped = AttentionVariant(softcap=5.0)
    check(name, replace(call, variant=capped, sinks=normal(8, seed=7, device=DEVICE)))


@pytest.mark.usefixtures("portable")
def test_masks_portable() -> None:
    for name, head_dim in (("triton-sage", 128), ("triton-fp8", 64), ("triton-sage-fp8", 256)):
        check(name, masked(MASKS["by head"](), head_dim))


@pytest.mark.parametrize("name", NAMES)
def test_blocks_that_a_mask_hides_are_not_visited(name: str) -> None:
    attend = attention_of(name)
    for head_dim in (64, 128):
        call = masked(band(256, 2000, 60), head_dim)
        expected = attend(**call.arguments())
        call.value[:, :, 512:] = math.nan
        assert torch.equal(attend(**call.arguments()), expected)


@pytest.mark.parametrize("head_dim", [64, 128])
def test_rows_that_a_mask_leaves_nothing_see_nothing(head_dim: int) -> None:
    counts = torch.arange(512, device=DEVICE) >= 256
    call = masked(counts[:, None] & counts, head_dim)
    call.value[:, :, :256] = math.nan
    for name in NAMES:
        output = find(name).attention(**call.arguments())
        assert not output[:, :, :256].any()
        assert output.isfinite().all()


@pytest.mark.parametrize("form", [*BEYOND, "packed", "masked"])
def test_hopper_has_a_kernel_for_them(form: str, monkeypatch: pytest.MonkeyPatch) -> None:
    if not has_gluon_kernels(DEVICE):
        pytest.skip("needs a Hopper GPU and Triton's Gluon")
    launched = []

    def note(launch: Launch, *tensors: Any) -> None:
        launched.append(launch._kernel.__name__)
        launch._launch(tensors)

    monkeypatch.setattr(Launch, "__call__", note)
    if form in BEYOND:
        call = beyond(form, 64, 300, 310)
    else:
        call = packed("plain", 64) if form == "packed" else masked(MASKS["band"](), 64)
    find("triton-fp8").attention(**call.arguments())
    assert "quantised_hopper_kernel" in launched
