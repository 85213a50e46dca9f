"""Arguments that SDPA accepts become a call with four dimensions in the kernel's dtype."""

from collections.abc import Sequence
from pathlib import Path

import pytest
import torch
from torch import Tensor

from capture.cli.file_checks import check_files
from capture.hooks.interceptor import TORCH_SDPA
from tests.capture.recording.callers import assert_good, attend, recorded


def test_three_dimensions_become_four(tmp_path: Path) -> None:
    query, key, value = torch.randn(3, 4, 5, 8)
    mask = torch.randn(4, 5, 5)
    data = recorded(
        tmp_path,
        attend(query, key, value),
        attend(query, key, value, attn_mask=mask),
        attend(query, key[:2], value[:2], enable_gqa=True),
    )
    assert_good(data)
    assert [call.query.shape for call in data] == [(1, 4, 5, 8)] * 3
    assert data[1].attn_mask is not None
    assert data[1].attn_mask.shape == (1, 4, 5, 5)


def test_two_dimensions_become_four(tmp_path: Path) -> None:
    flat = torch.randn(5, 8)
    data = recorded(tmp_path, attend(flat, flat, flat))
    assert data[0].query.shape == (1, 1, 5, 8)
    # Bits may differ, because PyTorch multiplies matrices and batches of one matrix differently.
    assert [finding.good for finding in check_files(data)] == [True]


@pytest.mark.parametrize(
    "mask", [None, (5, 5), (3, 1, 5, 5), (2, 1, 1, 5, 5), (2, 3, 4, 5, 5), (4, 1, 5)]
)
def test_five_dimensions_become_four(tmp_path: Path, mask: Sequence[int] | None) -> None:
    query, key, value = torch.randn(3, 2, 3, 4, 5, 8)
    attn_mask = None if mask is None else torch.randn(mask)
    data = recorded(tmp_path, attend(query, key, value, attn_mask))
    assert_good(data)
    assert data[0].shape == (6, 4, 4, 5, 5, 8, 8)
    expected = TORCH_SDPA(query, key, value, attn_mask).flatten(0, 1)
    torch.testing.assert_close(data[0].output, expected)


def test_batch_that_is_broadcast_is_recorded_whole(tmp_path: Path) -> None:
    query, shared = torch.randn(3, 2, 5, 8), torch.randn(1, 2, 5, 8)
    data = recorded(tmp_path, attend(query, shared, shared))
    assert_good(data)
    assert data[0].key.shape == (3, 2, 5, 8)
    assert data[0].key.stride(0) == 0


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float64])
def test_other_dtypes(tmp_path: Path, dtype: torch.dtype) -> None:
    query, key, value = torch.randn(3, 1, 2, 5, 8, dtype=dtype)
    data = recorded(tmp_path, attend(query, key, value, is_causal=True))
    assert_good(data)
    assert data[0].dtype == dtype


def test_masks_of_every_kind(tmp_path: Path) -> None:
    query, key, value = torch.randn(3, 2, 4, 5, 8)
    masks = [
        torch.ones(5, 5, dtype=torch.bool).tril(),
        torch.zeros(1, 1, 5, 5, dtype=torch.bool),  # has no keys
        torch.randn(2, 1, 1, 5),
        torch.randn(5, 5).masked_fill(torch.ones(5, 5).triu(1) > 0, -torch.inf),
        torch.randn(1, 1, 5, 5).expand(2, 4, 5, 5),
    ]
    data = recorded(tmp_path, *(attend(query, key, value, attn_mask=mask) for mask in masks))
    assert len(data) == len(masks)
    assert_good(data)


def test_autocast_records_what_reaches_the_kernel(tmp_path: Path) -> None:
    query, key = torch.randn(2, 1, 2, 5, 8)
    value = torch.randn(1, 5, 2, 8).transpose(1, 2).bfloat16()
    mask = torch.randn(5, 5)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        data = recorded(tmp_path, attend(query, key, value, attn_mask=mask))
    assert_good(data)
    tensors = data[0].tensors()
    assert {name: tensor.dtype for name, tensor in tensors.items()} == dict.fromkeys(
        tensors, torch.bfloat16
    )
    assert torch.equal(data[0].query, query.bfloat16())
    assert data[0].value.stride() == value.stride()
    assert data.captures[0].census["signatures"][0]["dtype"] == "bfloat16"


def test_complex_numbers_fail_as_without_a_recording(tmp_path: Path) -> None:
    query = torch.randn(1, 2, 5, 8, dtype=torch.complex128)

    def fails() -> Tensor:
        with pytest.raises(NotImplementedError, match="ComplexDouble"):
            attend(query, query, query)()
        return query

    data = recorded(tmp_path, fails, attend(*[query.real] * 3))
    assert_good(data)
    assert [call.dtype for call in data] == [torch.float64]
