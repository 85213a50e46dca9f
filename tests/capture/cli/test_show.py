"""`capture show` describes masks, pages and shared memory."""

import contextlib
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from torch import Tensor, nn

from capture import load, record
from capture.cli.dataset_tables import show, show_statistics
from capture.storage.call_file import PackedCall
from tests.factories import normal, random_call
from tests.printed import printed
from tests.variant_calls import in_float8, paged_call

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
    text = printed(show, load(tmp_path), width=200)
    assert said in text
    assert "\nmodel-000000 " in text  # the name that `replay --call` takes


def test_pages_and_a_value_in_the_key_in_words(tmp_path: Path) -> None:
    call = in_float8(paged_call([40, 70], 16, head_dim=24), "key")
    call = replace(call, value=call.key[..., :16])
    PackedCall.of(call).write(tmp_path / "model-000000.safetensors")
    text = printed(show, load(tmp_path), width=200)
    scaled = "14 pages of 16, scaled key (float8_e4m3fn)"
    assert f"{scaled}, value = 16 columns of key · query and key BHSD" in text


def test_early_end_is_called_incomplete(layers: nn.Module, states: Tensor, tmp_path: Path) -> None:
    with contextlib.suppress(KeyboardInterrupt), record(layers, tmp_path):
        layers(states)
        raise KeyboardInterrupt
    text = printed(show, load(tmp_path), width=200)
    assert "incomplete: interrupted, or calls or the manifest were lost" in text


def test_statistics_by_layer(tmp_path: Path) -> None:
    for index, module in enumerate(["layers.10", "layers.2", "layers.2", "[red]x"]):
        call = random_call(q_len=64, kv_len=64)
        call = replace(call, query=call.query * 0) if module == "[red]x" else call
        origin = replace(call.origin, model="model", module=module, phase="prefill")
        PackedCall.of(replace(call, origin=origin)).write(tmp_path / f"m-{index}.safetensors")
    dataset = load(tmp_path)
    broken = tmp_path / "m-0.safetensors"
    broken.write_bytes(broken.read_bytes()[:-8])
    lines = printed(show_statistics, dataset).splitlines()
    assert lines[0].startswith("note: ")
    assert "m-0.safetensors" in "".join(lines[:5])
    table = [line.split() for line in lines if line.startswith(("layers", "[red]"))]
    assert [(line[0], line[1]) for line in table] == [("layers.2", "2"), ("[red]x", "1")]
    assert table[1][4:] == ["1.000", "0.016", "0.016"]


def test_layer_without_keys_has_dashes_and_the_others_their_statistics(tmp_path: Path) -> None:
    for index, (module, kv_len) in enumerate([("layers.0", 0), ("layers.1", 64), ("layers.1", 1)]):
        call = random_call(q_len=64, kv_len=kv_len)
        origin = replace(call.origin, model="model", module=module, phase="prefill")
        PackedCall.of(replace(call, origin=origin)).write(tmp_path / f"m-{index}.safetensors")
    text = printed(show_statistics, load(tmp_path))
    lines = [line.split() for line in text.splitlines() if line.startswith("layers")]
    assert lines[0] == ["layers.0", "1", *"-----"]
    assert lines[1][:3] == ["layers.1", "2", "0"]
    assert not {"-", "inf"}.intersection(lines[1])
