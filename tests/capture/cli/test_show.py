"""What `capture --show` says of masks, pages and shared memory."""

from __future__ import annotations

import io
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from rich.console import Console
from torch import Tensor

from capture import load
from capture.cli.show import show
from capture.storage.call_file import PackedCall
from tests.factories import normal, random_call
from tests.variant_calls import paged_call

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


def test_pages_and_a_value_in_the_key_in_words(tmp_path: Path) -> None:
    call = paged_call([40, 70], 16, head_dim=24)
    call = replace(call, value=call.key[..., :16])
    PackedCall.of(call).write(tmp_path / "model-000000.safetensors")
    file = io.StringIO()
    show(load(tmp_path), Console(file=file, width=200))
    said = "seqused_k, 14 pages of 16, value = 16 columns of key · query and key BHSD"
    assert said in file.getvalue()
