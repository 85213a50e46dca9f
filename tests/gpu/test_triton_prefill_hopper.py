"""`triton-fa3` on a Hopper GPU: every shape, stride and type against float64 attention.

Each head dimension to 64, and each from there to 128, is one tile: a program text is compiled for a
tile, a type, causal or not, with or without logarithms, and a schedule. These tests ask for 16.
"""

from __future__ import annotations

import pytest
import torch

from capture.call import AttentionCall
from replay.accuracy.judge import Expected, judge
from replay.kernels.registry import find
from tests.factories import sized_call
from tests.replay.kernels.triton.eager import attend

DEVICE = torch.device("cuda")
KERNEL = find("triton-fa3")

pytestmark = [
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA GPU"),
    pytest.mark.skipif(
        torch.cuda.is_available() and KERNEL.unavailable(DEVICE) is not None,
        reason="needs a Hopper GPU and Triton's Gluon",
    ),
]

Sizes = tuple[int, int, int, int, int]
"""(B, Hq, Hkv, Sq, Sk)."""

SHAPES: tuple[Sizes, ...] = (
    (2, 4, 2, 1000, 1000),
    (1, 2, 2, 129, 300),
    (1, 2, 1, 700, 127),
    (1, 1, 1, 1, 1),
    (2, 3, 3, 256, 256),
    (1, 3, 1, 7, 4250),
    (40, 6, 2, 200, 130),  # more tiles than programs: each has several
    (2, 8, 2, 1000, 1000),
    (1, 8, 1, 129, 300),
    (40, 12, 3, 200, 130),
)
FEW = ((2, 4, 2, 1000, 1000), (1, 3, 1, 70, 4250))


def call_of(
    sizes: Sizes, head_dim: int, is_causal: bool, dtype: torch.dtype = torch.bfloat16
) -> AttentionCall:
    all_sizes = (*sizes, head_dim, head_dim)
    return sized_call(all_sizes, dtype=dtype, device=DEVICE, is_causal=is_causal)


def poison(shape: torch.Size, dtype: torch.dtype) -> None:
    """Leave NaN in the memory that the next output of this shape will be given."""
    torch.full(shape, float("nan"), device=DEVICE, dtype=dtype)


def check(call: AttentionCall) -> None:
    expected = Expected.of(call)
    before = [each.clone() for each in (call.query, call.key, call.value)]
    poison(call.query.shape, call.dtype)
    output = KERNEL.attention(**call.arguments())
    verdict = judge(output, expected, "exact")
    assert verdict.passed, verdict.sentence
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
    """Query, key and value as a fused linear layer leaves them, all heads of a token together."""
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
    from replay.kernels.triton.prefill_hopper import prefill_hopper

    call = call_of(sizes, head_dim, is_causal)
    poison(torch.Size(sizes[:2] + sizes[3:4]), torch.float32)
    output, lse = prefill_hopper(
        call.query, call.key, call.value, is_causal=is_causal, scale=0.3, return_lse=True
    )
    expected = attend(call.query, call.key, call.value, is_causal=is_causal, scale=0.3)
    torch.testing.assert_close(lse.double(), expected.lse, rtol=1e-4, atol=1e-4)
    torch.testing.assert_close(output.double(), expected.output, rtol=2e-2, atol=2e-2)


def test_nan_stays_in_its_row_and_column() -> None:
    call = call_of((1, 2, 2, 300, 300), 64, is_causal=False)
    call.query[0, 0, 33, 5] = float("nan")
    call.value[0, 1, 40, 7] = float("nan")
    is_nan = KERNEL.attention(**call.arguments()).isnan()
    assert bool(is_nan[0, 0, 33].all())
    assert bool(is_nan[0, 1, :, 7].all())
    assert int(is_nan.sum()) == 64 + 300


def test_the_same_bits_each_time() -> None:
    """A race between loads, products and stores would show as bits that change."""
    for head_dim, is_causal in ((64, True), (64, False), (128, True)):
        call = call_of((4, 16, 4, 777, 777), head_dim, is_causal)
        first = KERNEL.attention(**call.arguments())
        for _ in range(20):
            assert torch.equal(KERNEL.attention(**call.arguments()), first)
