"""What `capture --show` says of masks."""

from __future__ import annotations

import io
from pathlib import Path

import pytest
import torch
from rich.console import Console
from torch import Tensor

from capture import load
from capture.cli.show import show
from capture.storage.call_file import PackedCall
from tests.factories import normal, random_call

ALL = torch.ones(1, 1, 64, 64, dtype=torch.bool)


@pytest.mark.parametrize(
    ("mask", "said"),
    [
        (ALL.tril().triu(-15), "bool mask 1×1×64×64 = window 15/0 ·"),
        (ALL, "bool mask 1×1×64×64 = no mask ·"),
        (normal(64, 64), "float mask 1×1×64×64 ·"),
    ],
)
def test_masks_in_words(mask: Tensor, said: str, tmp_path: Path) -> None:
    call = random_call(q_len=64, kv_len=64, attn_mask=mask)
    PackedCall.of(call).write(tmp_path / "model-000000.safetensors")
    file = io.StringIO()
    show(load(tmp_path), Console(file=file, width=200))
    assert said in file.getvalue()
