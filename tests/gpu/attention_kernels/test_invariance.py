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

BFLOAT = torch.bfloat16
ENDS = [64, 201, 1100, 1165, 2311, 2500]
HOPPER_SIZES = [(8, 2, 64), (3, 3, 64), (4, 2, 128), (2, 2, 96), (2, 1, 256)]
CASES: list[tuple[Sizes, dict[str, Any]]] = [
    *((sizes, {}) for sizes in HOPPER_SIZES),
    ((2, 1, 192), {"v_dim": 128}),
    ((8, 2, 64), {"window": (300, 0)}),
    ((4, 2, 128), {"window": (300, 0)}),
    ((3, 3, 64), {"window": (1200, 0)}),
    ((2, 1, 256), {"window": (1200, 0)}),
    ((8, 2, 64), {"softcap": 20.0}),
    ((4, 2, 128), {"dtype": torch.bfloat16}),
]
"""Each case needs seven programs, which take seconds to compile."""


def test_long_prefill_in_chunks() -> None:
    """Chunks of 64, 100, 1000, 14220 and 1000 queries; most begin within a tile."""
    assert different(prefilled((32, 8, 128), [64, 164, 1164, 15384, 16384], True)) == []


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


@pytest.mark.parametrize(
    ("sizes", "dtype", "left"),
    [
        *((sizes, dtype, None) for sizes in HOPPER_SIZES[::2] for dtype in (torch.bool, BFLOAT)),
        ((4, 2, 128), torch.bool, 300),
    ],
    ids=str,
)
def test_masks(sizes: Sizes, dtype: torch.dtype, left: int | None) -> None:
    for begin in (64, 1165):
        assert different(masked(sizes, 2500, begin, True, dtype, left)) == []


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
