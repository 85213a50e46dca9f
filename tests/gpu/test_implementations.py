"""Calls of real libraries other than SDPA are recorded, and replayed by every kernel."""

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from capture import load, record
from capture.cli.file_checks import check_files
from replay.kernels.registry import find
from tests.gpu.replayed_rows import replayed_rows

LENGTH = 640
SIZES = {
    "vocab_size": 256,
    "hidden_size": 256,
    "intermediate_size": 256,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 64,
    "max_position_embeddings": 4096,
}
MODELS: dict[str, dict[str, Any]] = {
    "Llama": {},
    "Mistral": {"sliding_window": 128},
    "Gemma2": {"sliding_window": 128, "attn_logit_softcapping": 30.0},
}
BACKENDS = {"flash_attention_2": "fa2", "flex_attention": "flex"}
KERNELS = (
    *("fa2", "fa2-varlen", "fa2-kvcache"),
    *("triton-fa2", "triton-varlen", "triton-decode", "eager"),
)


def _model(kind: str, implementation: str) -> Any:
    transformers = pytest.importorskip("transformers")
    if implementation == "flash_attention_2":
        pytest.importorskip("flash_attn")
    torch.manual_seed(0)
    config = getattr(transformers, f"{kind}Config")(
        **SIZES, **MODELS[kind], attn_implementation=implementation
    )
    model = getattr(transformers, f"{kind}ForCausalLM")(config)
    return model.to("cuda", torch.bfloat16).eval()


def _tokens(batch: int = 1) -> Tensor:
    generator = torch.Generator().manual_seed(0)
    return torch.randint(5, 256, (batch, LENGTH), generator=generator).cuda()


def _replayed(directory: Path, tmp_path: Path, more: str = "fa2") -> list[dict[str, Any]]:
    able = [name for name in KERNELS if find(name).unavailable(torch.device("cuda")) is None]
    kernels = ",".join(dict.fromkeys([*able, more]))
    arguments = ["--dir", str(directory), "--kernels", kernels, "--rounds", "3"]
    return replayed_rows(tmp_path, *arguments)


def _right_by_several(rows: list[dict[str, Any]], names: set[str]) -> None:
    wrong = {"inaccurate", "invalid", "error"}
    assert not [(row["kernel"], row["reason"]) for row in rows if row["status"] in wrong]
    assert names <= {row["kernel"] for row in rows if row["status"] == "ok"}


@pytest.mark.parametrize(
    ("kind", "implementation"),
    [
        ("Llama", "flash_attention_2"),
        ("Gemma2", "flash_attention_2"),
        ("Mistral", "flex_attention"),
    ],
)
def test_prompt_and_tokens_are_recorded_and_replayed(
    kind: str, implementation: str, tmp_path: Path
) -> None:
    model = _model(kind, implementation)
    tokens = _tokens()
    with torch.no_grad():
        expected = model.generate(tokens, max_new_tokens=2, do_sample=False)
        with record(model, tmp_path / "calls") as recording:
            generated = model.generate(tokens, max_new_tokens=2, do_sample=False)
    assert torch.equal(generated, expected)
    assert recording.problems == []
    data = load(tmp_path / "calls")
    assert len(data) == 4
    assert {call.origin.backend for call in data} == {BACKENDS[implementation]}
    assert all(finding.good for finding in check_files(data))
    backend = BACKENDS[implementation]
    rows = _replayed(tmp_path / "calls", tmp_path, backend)
    _right_by_several(rows, {"triton-fa2", "eager", backend})


def test_packed_sequences_of_flash_attention_2_are_replayed(tmp_path: Path) -> None:
    model = _model("Mistral", "flash_attention_2")
    lengths = (300, 1, 339)
    positions = torch.cat([torch.arange(length) for length in lengths])[None].cuda()
    with torch.no_grad(), record(model, tmp_path / "calls") as recording:
        model(_tokens(), position_ids=positions, use_cache=False)
    assert recording.problems == []
    data = load(tmp_path / "calls")
    for call in data:
        assert call.cu_seqlens_q is not None
        assert call.cu_seqlens_q.tolist() == [0, 300, 301, 640]
    rows = _replayed(tmp_path / "calls", tmp_path)
    _right_by_several(rows, {"fa2-varlen", "triton-varlen"})


def test_padding_of_flash_attention_2_is_replayed(tmp_path: Path) -> None:
    """Transformers removes the padding of a batch and calls flash-attn on the packed tokens."""
    model = _model("Llama", "flash_attention_2")
    mask = torch.ones(2, LENGTH, dtype=torch.long, device="cuda")
    mask[1, :200] = 0
    with torch.no_grad(), record(model, tmp_path / "calls") as recording:
        model(_tokens(2), attention_mask=mask, use_cache=False)
    assert recording.problems == []
    assert len(load(tmp_path / "calls")) == 2
    rows = _replayed(tmp_path / "calls", tmp_path)
    assert {"fa2-varlen", "triton-varlen"} & {r["kernel"] for r in rows if r["status"] == "ok"}
    assert not [row for row in rows if row["status"] in {"inaccurate", "invalid", "error"}]
