"""On a Hopper GPU, `triton-fa3` agrees with float64 attention for every shape, stride and type.

Head dimensions up to 64 share a tile, and so do those from 65 to 128. A program is compiled for
each tile, type, causality, schedule, and with or without logarithms. These tests need 16.
"""

from collections.abc import Callable
from dataclasses import replace

import pytest
import torch

from capture.call.attention_call import AttentionCall
from capture.call.attention_variant import AttentionVariant
from replay.accuracy.verdict import Expected
from replay.kernels.registry import find
from tests.attention_kernels.calls import assert_right, lengths, offsets
from tests.attention_kernels.eager import attend
from tests.factories import normal, sized_call
from tests.gpu.attention_kernels.cases import BEYOND, BOTTOM_RIGHT, call_with

DEVICE = torch.device("cuda")
KERNEL = find("triton-fa3")

pytestmark = pytest.mark.skipif(
    torch.cuda.is_available() and KERNEL.unavailable(DEVICE) is not None,
    reason="needs a Hopper GPU and Triton's Gluon",
)

Sizes = tuple[int, int, int, int, int]
"""(B, Hq, Hkv, Sq, Sk)."""

SHAPES: tuple[Sizes, ...] = (
    (2, 4, 2, 1000, 1000),
    (1, 2, 2, 129, 300),
    (1, 2, 1, 700, 127),
    (1, 1, 1, 1, 1),
    (2, 3, 3, 256, 256),
    (1, 3, 1, 7, 4250),
    (40, 6, 2, 200, 100),  # more tiles than programs, so each program has several tiles
    (1, 32, 8, 600, 600),  # if causal, no program has a tile in every turn
    (2, 8, 2, 1000, 1000),
    (1, 8, 1, 129, 300),
    (40, 12, 3, 200, 130),
    (3, 24, 8, 300, 5000),  # 216 or 144 tiles: 132 programs share those of the second turn
)
FEW = ((2, 4, 2, 1000, 1000), (1, 3, 1, 70, 4250))


def call_of(
    sizes: Sizes, head_dim: int, is_causal: bool, dtype: torch.dtype = torch.bfloat16
) -> AttentionCall:
    all_sizes = (*sizes, head_dim, head_dim)
    return sized_call(all_sizes, dtype=dtype, device=DEVICE, is_causal=is_causal)


def poison(shape: torch.Size, dtype: torch.dtype) -> None:
    """Fill memory with NaN that the next output of this shape will reuse."""
    torch.full(shape, float("nan"), device=DEVICE, dtype=dtype)


def check(call: AttentionCall) -> None:
    expected = Expected.of(call).reference
    before = [each.clone() for each in (call.query, call.key, call.value)]
    poison(torch.Size((*call.query.shape[:3], call.value.shape[3])), call.dtype)
    assert_right(KERNEL.attention(**call.arguments()), expected, call)
    for each, old in zip((call.query, call.key, call.value), before, strict=True):
        assert torch.equal(each, old), "an input was changed"


@pytest.mark.parametrize("sizes", SHAPES, ids=str)
@pytest.mark.parametrize("is_causal", [False, True], ids=["full", "causal"])
@pytest.mark.parametrize("head_dim", [128, 96, 72, 64, 40])
def test_shapes(head_dim: int, is_causal: bool, sizes: Sizes) -> None:
    call = call_of(sizes, head_dim, is_causal)
    assert KERNEL.unsupported(call) is None
    check(call)


@pytest.mark.parametrize("sizes", FEW, ids=str)
@pytest.mark.parametrize(("head_dim", "is_causal"), [(128, True), (64, False)])
def test_float16(head_dim: int, is_causal: bool, sizes: Sizes) -> None:
    check(call_of(sizes, head_dim, is_causal, torch.float16))


@pytest.mark.parametrize("is_causal", [False, True], ids=["full", "causal"])
@pytest.mark.parametrize("head_dim", [128, 72, 64])
def test_views_of_one_projection(head_dim: int, is_causal: bool) -> None:
    """Query, key and value are views of one tensor, in which a token's heads are adjacent."""
    packed = torch.randn(2, 333, 3, 4, head_dim, device=DEVICE, dtype=torch.bfloat16)
    query, key, value = (packed[:, :, part].transpose(1, 2) for part in range(3))
    check(AttentionCall(query, key, value, is_causal=is_causal))
    # Elements of a head that are not adjacent, and rows at odd addresses, are copied first.
    check(AttentionCall(query, key.mT.contiguous().mT, value, is_causal=is_causal))
    odd = torch.randn(2, 4, 333, head_dim + 1, device=DEVICE, dtype=torch.bfloat16)[..., 1:]
    check(AttentionCall(odd, key, odd, is_causal=is_causal))
    check(AttentionCall(query, key[:1].expand(2, -1, -1, -1), value, is_causal=is_causal))


@pytest.mark.parametrize("sizes", FEW, ids=str)
@pytest.mark.parametrize(("head_dim", "is_causal"), [(128, False), (64, True)])
def test_logarithms(head_dim: int, is_causal: bool, sizes: Sizes) -> None:
    from attention_kernels.hopper.hopper_prefill import hopper_prefill

    call = call_of(sizes, head_dim, is_causal)
    poison(torch.Size(sizes[:2] + sizes[3:4]), torch.float32)
    output, lse = hopper_prefill(
        call.query, call.key, call.value, is_causal=is_causal, scale=0.3, return_lse=True
    )
    expected = attend(call.query, call.key, call.value, is_causal=is_causal, scale=0.3)
    torch.testing.assert_close(lse.double(), expected.lse, rtol=1e-4, atol=1e-4)
    torch.testing.assert_close(output.double(), expected.output, rtol=2e-2, atol=2e-2)


def test_a_scale_of_zero_is_a_mean() -> None:
    for is_causal in (False, True):
        check(replace(call_of((1, 2, 2, 70, 300), 64, is_causal), scale=0.0))


def test_nan_stays_in_its_row_and_column() -> None:
    call = call_of((1, 2, 2, 300, 300), 64, is_causal=False)
    call.query[0, 0, 33, 5] = float("nan")
    call.value[0, 1, 40, 7] = float("nan")
    is_nan = KERNEL.attention(**call.arguments()).isnan()
    assert bool(is_nan[0, 0, 33].all())
    assert bool(is_nan[0, 1, :, 7].all())
    assert int(is_nan.sum()) == 64 + 300


def test_the_same_bits_each_time() -> None:
    """A race between loads, products and stores would change bits, and so would adding a tile's
    pieces in their order of arrival."""
    batch = (4, 16, 4, 777, 777)
    few: Sizes = (1, 8, 1, 300, 9000)
    for sizes, head_dim, is_causal in (
        (batch, 64, True),
        (batch, 64, False),
        (batch, 128, True),
        (few, 64, False),
        (few, 128, False),
    ):
        call = call_of(sizes, head_dim, is_causal)
        first = KERNEL.attention(**call.arguments())
        for _ in range(20):
            assert torch.equal(KERNEL.attention(**call.arguments()), first)


FORMS = (
    "bottom right",
    "window",
    "window, top left",
    "window to the right",
    "soft cap",
    "sinks",
    "all",
)
LONG_AND_SHORT = (
    (2, 8, 2, 700, 1000),
    (1, 8, 2, 1000, 300),
    (2, 8, 2, 1000, 3000),
    (1, 8, 2, 200, 5000),  # so few tiles that programs share them
    (3, 24, 8, 300, 5000),
)


def stairs(head_dim: int, step: float, dtype: torch.dtype) -> AttentionCall:
    """Return a call in which the scores of one third of the queries rise by `step` every 128 keys,
    and the scores of another third fall."""
    call = call_of((1, 2, 1, 300, 3000), head_dim, is_causal=False, dtype=dtype)
    call.query[..., 0] = torch.arange(300, device=DEVICE) % 3 - 1
    call.key[..., 0] = torch.arange(3000, device=DEVICE) // 128 * step * head_dim**0.5
    return call


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("step", [3.0, 9.0, 30.0, 150.0])
@pytest.mark.parametrize("head_dim", [64, 128, 96, 256])
def test_scores_that_rise_and_fall(head_dim: int, step: float, dtype: torch.dtype) -> None:
    """Weights relative to an earlier maximum score would overflow."""
    call = stairs(head_dim, step, dtype)
    check(call)
    check(replace(call, query=call.query[:, :, :100], is_causal=True, variant=BOTTOM_RIGHT))


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("head_dims", [(64, 64), (128, 128), (96, 96), (192, 128), (256, 256)])
def test_beyond_sdpa(head_dims: tuple[int, int], form: str) -> None:
    for sizes in LONG_AND_SHORT:
        call = call_with(BEYOND[form], (*sizes, *head_dims))
        assert KERNEL.unsupported(call) is None
        check(call)


@pytest.mark.parametrize(
    "head_dims", [(64, 128), (128, 64), (80, 80), (104, 40), (256, 128), (128, 256), (160, 160)]
)
def test_head_dims(head_dims: tuple[int, int]) -> None:
    for sizes in FEW:
        check(sized_call((*sizes, *head_dims), dtype=torch.float16, device=DEVICE))


MASKS: dict[str, Callable[[Sizes], torch.Tensor]] = {
    "bool": lambda sizes: normal(*sizes[3:], seed=3, device=DEVICE) > 0,
    "bool, by head": lambda sizes: (
        normal(sizes[0], sizes[1], *sizes[3:], seed=3, device=DEVICE) > 0
    ),
    "bool, by key": lambda sizes: normal(sizes[0], 1, 1, sizes[4], seed=3, device=DEVICE) > 0,
    "rows that see nothing": lambda sizes: (
        torch.arange(sizes[3], device=DEVICE)[:, None] % 5 > torch.zeros(sizes[4], device=DEVICE)
    ),
    "bfloat16": lambda sizes: normal(*sizes[3:], seed=3, device=DEVICE).bfloat16(),
    "float32, by head": lambda sizes: normal(1, sizes[1], *sizes[3:], seed=3, device=DEVICE),
    "finfo.min": lambda sizes: torch.where(
        normal(*sizes[3:], seed=3, device=DEVICE) > 0, 0.0, torch.finfo(torch.bfloat16).min
    ).bfloat16(),
}


@pytest.mark.parametrize("mask", MASKS)
@pytest.mark.parametrize("head_dim", [64, 128, 96, 192, 256])
def test_masks(head_dim: int, mask: str) -> None:
    for sizes in (
        *LONG_AND_SHORT[:2],
        (2, 3, 1, 500, 333),
        (1, 4, 2, 300, 4250),
        (2, 8, 2, 600, 1800),
    ):
        call = call_of(sizes, head_dim, is_causal=False)
        call = replace(call, attn_mask=MASKS[mask](sizes))
        check(call)
        check(replace(call, variant=AttentionVariant(True, (200, 90), 5.0)))


def test_a_row_of_the_lowest_numbers_is_an_ordinary_row() -> None:
    call = call_of((1, 2, 2, 70, 300), 64, is_causal=False)
    lowest = torch.full((70, 300), torch.finfo(call.dtype).min, device=DEVICE, dtype=call.dtype)
    output = KERNEL.attention(**replace(call, attn_mask=lowest).arguments())
    expected = call.value.float().mean(2, keepdim=True).expand_as(output)
    torch.testing.assert_close(output.float(), expected, rtol=0, atol=2e-3)
    nothing = torch.full_like(lowest, float("-inf"))
    assert not KERNEL.attention(**replace(call, attn_mask=nothing).arguments()).any()


PACKED_LENGTHS = ((700, 1, 0, 1300, 99), (700, 1, 50, 1300, 199))


@pytest.mark.parametrize("form", ["plain", *FORMS])
@pytest.mark.parametrize("head_dims", [(64, 64), (128, 128), (72, 72), (256, 256)])
def test_packed(head_dims: tuple[int, int], form: str) -> None:
    """`triton-varlen` runs this kernel on Hopper; other sequences' rows have no effect."""
    kernel = find("triton-varlen")
    q_lengths, k_lengths = PACKED_LENGTHS
    sizes = (1, 8, 2, sum(q_lengths), sum(k_lengths))
    call = call_with(BEYOND.get(form, {}), (*sizes, *head_dims))
    call = replace(call, cu_seqlens_q=offsets(*q_lengths), cu_seqlens_k=offsets(*k_lengths))
    for seqused_k in (None, lengths(650, 1, 50, 0, 130)):
        asked = replace(call, seqused_k=seqused_k)
        expected = Expected.of(asked).reference
        poison(torch.Size((1, 8, sizes[3], head_dims[1])), call.dtype)
        assert_right(kernel.attention(**asked.arguments()), expected, asked)
    # Only the sequence whose keys are all NaN becomes NaN.
    for tensor in (call.key, call.value):
        tensor[:, :, 751:2051] = float("nan")
    is_nan = kernel.attention(**call.arguments()).isnan().any(-1)[0]
    assert not is_nan[:, :701].any()
    assert not is_nan[:, 2001:].any()
    assert is_nan[:, 701:2001].any()


@pytest.mark.parametrize("head_dim", [64, 128, 256])
def test_padded(head_dim: int) -> None:
    """NaN in the padding, before and after the keys, reaches no output."""
    starts, counts = lengths(0, 130, 61), lengths(500, 370, 64)
    keys = torch.arange(500, device=DEVICE)
    is_key = (keys >= starts[:, None]) & (keys < (starts + counts)[:, None])
    call = call_of((3, 4, 2, 500, 500), head_dim, is_causal=False)
    call = replace(call, attn_mask=is_key[:, None, None])
    expected = Expected.of(call).reference
    for tensor in (call.key, call.value):
        tensor.masked_fill_(~is_key[:, None, :, None], float("nan"))
    from attention_kernels.portable.varlen import KeyRanges, padded_prefill

    output = padded_prefill(call.query, call.key, call.value, KeyRanges(starts, counts))
    assert_right(output, expected, call)
