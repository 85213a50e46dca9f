"""What calls ask beyond SDPA comes back from a file as it was, or the file is refused."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from capture.call import AttentionCall
from capture.errors import DatasetError
from capture.storage.call_file import FileEntry, PackedCall
from capture.variant import Variant
from tests.factories import normal, random_call
from tests.variant_calls import CALLS


@pytest.mark.parametrize("call", CALLS.values(), ids=list(CALLS))
def test_a_call_comes_back(call: AttentionCall, tmp_path: Path) -> None:
    PackedCall.of(call).write(tmp_path / "call.safetensors")
    found = FileEntry.read(tmp_path / "call.safetensors").load()
    assert found.variant == call.variant
    assert found.features == call.features
    assert found.tensors().keys() == call.tensors().keys()
    for name, tensor in call.tensors().items():
        assert torch.equal(found.tensors()[name].view(tensor.shape), tensor), name


@pytest.mark.parametrize(
    "fields",
    [
        {"sinks": normal(3)},
        {"cu_seqlens_q": torch.tensor([0, 9])},
        {"cu_seqlens_q": torch.tensor([0, 9]), "cu_seqlens_k": torch.tensor([0, 4, 13])},
        {"cu_seqlens_q": torch.tensor([0, 8]), "cu_seqlens_k": torch.tensor([0, 13])},
        {"cu_seqlens_q": torch.tensor([0, 9, 5, 9]), "cu_seqlens_k": torch.tensor([0, 1, 2, 13])},
        {"seqused_k": torch.tensor([14])},
        {"seqused_k": torch.tensor([-1])},
        {"seqused_k": torch.tensor([1, 1])},
        {"seqused_k": normal(1)},
        {"variant": Variant(softcap=0.0)},
        {"variant": Variant(window=(-1, None))},
    ],
    ids=str,
)
def test_nonsense_is_refused(fields: dict[str, Any], tmp_path: Path) -> None:
    call = replace(random_call(), **fields)
    PackedCall.of(call).write(tmp_path / "call.safetensors")
    with pytest.raises(DatasetError):
        FileEntry.read(tmp_path / "call.safetensors").load()
