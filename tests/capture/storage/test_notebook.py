"""Datasets and calls are displayed by a notebook and by `print`."""

from pathlib import Path

import torch

from capture import load
from capture.call.attention_call import AttentionCall, Origin
from capture.storage.call_file import PackedCall

HOSTILE = "<script>alert(1)</script>"


def test_dataset_is_shown_as_a_table_of_text(tmp_path: Path) -> None:
    query = torch.zeros(1, 2, 5, 8)
    for index, module in enumerate(("blocks.0.attn", HOSTILE)):
        origin = Origin(model="tiny", module=module, call_index=index, step=7, phase="denoise")
        call = AttentionCall(query, query, query, is_causal=True, origin=origin)
        PackedCall.of(call).write(tmp_path / f"tiny-{index}.safetensors")
    (tmp_path / "bad.safetensors").write_bytes(b"")
    dataset = load(tmp_path)
    assert repr(dataset) == f"Dataset({str(tmp_path)!r}, calls=2, models=['tiny'])"
    line = "AttentionCall(tiny blocks.0.attn, step 7, 1×2×5×8 float32 on cpu, causal)"
    assert str(dataset[0]) == line
    html = dataset._repr_html_()
    for shown in ("blocks.0.attn", "1×2×5×8", "causal", "denoise", "float32", "manifest.json is"):
        assert shown in html
    assert "bad.safetensors" in html
    assert html.count("<tr>") == 3
    assert "&lt;script&gt;" in html
    assert "<script" not in html
