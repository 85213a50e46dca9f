"""On a GPU, invariant calls give a sequence the same bits in any batch, padding and chunks."""

from typing import Any

import pytest
import torch

from attention_kernels import dispatch
from attention_kernels.launch.launcher import PlanCache
from attention_kernels.operators import attention
from attention_kernels.portable import varlen
from tests.attention_kernels.invariant_calls import (
    Sizes,
    decoded,
    different,
    inputs,
    masked,
    prefilled,
)

ENDS = [64, 201, 1100, 1165, 2311, 2500]
HOPPER_SIZES = [(8, 2, 64), (3, 3, 64), (4, 2, 128), (2, 2, 96), (2, 1, 256)]
OPTIONS: list[dict[str, Any]] = [{}, {"window": (300, 0)}]
CASES: list[tuple[Sizes, dict[str, Any]]] = [
    *((sizes, options) for sizes in HOPPER_SIZES for options in OPTIONS),
    ((3, 3, 64), {"window": (1200, 0)}),
    ((2, 1, 256), {"window": (1200, 0)}),
    ((8, 2, 64), {"softcap": 20.0}),
    ((4, 2, 128), {"dtype": torch.bfloat16}),
]
"""Each case needs six programs, which take seconds to compile."""


@pytest.mark.parametrize(("sizes", "options"), CASES, ids=str)
def test_prefill(sizes: Sizes, options: dict[str, Any]) -> None:
    assert different(prefilled(sizes, ENDS, True, **options)) == []


@pytest.mark.parametrize("left", [None, 300])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
@pytest.mark.parametrize("sizes", [(4, 2, 64), (2, 1, 128), (2, 1, 50), (1, 1, 256)], ids=str)
def test_portable_prefill(
    sizes: Sizes, dtype: torch.dtype, left: int | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    for module in (dispatch, varlen):
        monkeypatch.setattr(module, "has_gluon_kernels", lambda device: False)
    monkeypatch.setattr(dispatch, "_kernels", PlanCache())
    assert different(prefilled(sizes, [64, 201, 1100], True, dtype, window=(left, 0))) == []


@pytest.mark.parametrize("dtype", [torch.bool, torch.bfloat16])
@pytest.mark.parametrize("sizes", HOPPER_SIZES[::2], ids=str)
def test_masks(sizes: Sizes, dtype: torch.dtype) -> None:
    for begin in (64, 1165):
        assert different(masked(sizes, 2500, begin, True, dtype)) == []


@pytest.mark.parametrize("q_len", [1, 4])
@pytest.mark.parametrize("sizes", [(32, 8, 128), (16, 4, 64), (8, 2, 256)], ids=str)
def test_decode(sizes: Sizes, q_len: int) -> None:
    used = [30000, 1, 512, 513, 8000, 4097, 77, 25000]
    assert different(decoded(sizes, used, q_len, 20000, True)) == []


def test_latent_decode() -> None:
    query, key, _ = inputs((16, 1, 576), 3, 1, 9000)
    together, alone = (
        attention(query[own], key[own], key[own, ..., :512], enable_gqa=True, invariant=True)
        for own in (slice(3), slice(1, 2))
    )
    assert torch.equal(alone, together[1:2])


def test_otherwise_bits_depend_on_chunks_and_on_the_batch() -> None:
    for sizes in ((8, 2, 64), (4, 2, 128)):
        assert different(prefilled(sizes, ENDS, False))
    assert different(decoded((32, 8, 128), [30000, 8000], 1, None, False))
