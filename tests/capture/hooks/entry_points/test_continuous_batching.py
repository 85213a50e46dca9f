"""Batches of transformers' continuous batching are packed sequences, or read pages."""

from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import ContinuousBatchingConfig, GenerationConfig
from transformers.generation.continuous_batching import initialization, input_outputs, model_runner

from capture import load, record
from capture.call.attention_call import AttentionCall
from replay import use_kernel
from replay.accuracy.reference import attention
from tests.capture.hooks.entry_points.test_transformers import (  # noqa: F401
    _flash_functions,
    language_model,
    with_flash,
)

LENGTHS = list(enumerate((150, 3, 1, 30, 9, 21)))
SLIDING = {"sliding_window": 12}
EXPERTS = {"num_local_experts": 4, "num_experts_per_tok": 2}


def generated(model: Any, **options: Any) -> list[list[int]]:
    """Return the tokens of more prompts than a batch of 64 tokens has room for."""
    prompts = [[63 - index, *range(1, min(n, 60)), *[7] * (n - 60)] for index, n in LENGTHS]
    settings = GenerationConfig(max_new_tokens=5, do_sample=False, eos_token_id=-1)
    sizes: Any = {"page_size": 16, "num_blocks": 64, "max_batch_tokens": 64}
    batching = ContinuousBatchingConfig(**sizes, **options)
    results = model.generate_batch(prompts, settings, batching)
    return [each.generated_tokens for each in results.values()]


def recorded(model: Any, out: Path, **options: Any) -> list[AttentionCall]:
    """Return the calls; check count, modules, outputs, and that tokens are those of the model."""
    expected = generated(model, **options)
    passes: list[str] = []
    hook = model.model.register_forward_hook(lambda *_: passes.append(""))
    with record(model, out, max=100) as recording:
        assert generated(model, **options) == expected
    hook.remove()
    calls = list(load(out))
    assert (recording.seen, recording.problems) == (len(calls), [])
    modules = ["model.layers.0.self_attn", "model.layers.1.self_attn"]
    assert [call.origin.module for call in calls] == modules * len(passes)
    for call in calls:
        assert call.output is not None
        assert torch.allclose(attention(call), call.output.double(), atol=1e-5)
    with use_kernel("eager", model) as swap:
        assert generated(model, **options) == expected
    assert swap.hits > 0
    assert swap.fallbacks == {}
    return calls


@pytest.mark.parametrize(
    ("kind", "backend", "config", "windows", "features"),
    [
        ("Llama", "transformers.sdpa", {}, (None, None), {"packed"}),
        ("Mistral", "transformers.sdpa", SLIDING, (11, 11), {"packed"}),
        ("Gemma2", "eager", SLIDING, (11, None), {"packed"}),
        ("GptOss", "eager", {**SLIDING, **EXPERTS}, (11, None), {"packed", "sinks"}),
    ],
)
def test_batches_are_packed_sequences(
    kind: str, backend: str, config: Any, windows: Any, features: set[str], tmp_path: Path
) -> None:
    model = language_model(kind, backend.removeprefix("transformers."), **config)
    calls = recorded(model, tmp_path / "calls")
    phases = [call.origin.phase for call in calls[::2]]
    assert (phases[:2], phases[-1]) == (["prefill", "extend"], "decode")
    assert "mixed" in phases
    for index, call in enumerate(calls):
        assert (call.origin.backend, call.attn_mask) == (backend, None)
        assert call.variant.window[0] == windows[index % 2]
        assert {*call.features} - {"window", "bottom-right"} == features
        assert call.shape.kv_heads == 2


def hide_a_key(monkeypatch: pytest.MonkeyPatch) -> None:
    """Hide the first key from all queries but its own."""

    def build(attention_mask: Any, **lengths: Any) -> None:
        build_attention_mask(attention_mask, **lengths)
        attention_mask[..., 1:, 0] = torch.finfo(attention_mask.dtype).min

    build_attention_mask = input_outputs.build_attention_mask
    monkeypatch.setattr(input_outputs, "build_attention_mask", build)


def pad(monkeypatch: pytest.MonkeyPatch) -> None:
    """Pad batches to a few sizes, as for CUDA graphs."""
    always = property(lambda runner: True, lambda runner, value: None)
    monkeypatch.setattr(model_runner.ModelRunner, "pad_inputs", always, raising=False)


@pytest.mark.parametrize("implementation", ["sdpa", "eager"])
@pytest.mark.parametrize("change", [hide_a_key, pad])
def test_mask_that_lengths_do_not_say_is_kept(
    implementation: str, change: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    change(monkeypatch)
    calls = recorded(language_model("Llama", implementation), tmp_path / "calls")
    assert all(call.cu_seqlens_q is None for call in calls[:6])
    assert all(call.attn_mask is not None for call in calls[:6])


@pytest.mark.usefixtures("_flash_functions")
@pytest.mark.parametrize(("kind", "blocks"), [("Llama", 0), ("Llama", 16), ("Mistral", 0)])
def test_flash_attention_reads_packed_sequences_or_pages(
    kind: str, blocks: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    available = "ensure_decode_fast_path_is_available"
    monkeypatch.setattr(initialization, available, lambda *others: None)
    model = with_flash(language_model(kind, "eager", **(SLIDING if kind == "Mistral" else {})))
    calls = recorded(model, tmp_path / "calls", max_blocks_per_request=blocks)
    for call in calls:
        is_paged = call.origin.phase == "decode" and blocks > 0
        assert ("paged" if is_paged else "packed") in call.features
        assert call.origin.backend == "fa2"
    pad(monkeypatch)
    with record(model, tmp_path / "padded") as recording:
        generated(model, max_blocks_per_request=blocks)
    assert "a batch padded for CUDA graphs" in recording.summary
