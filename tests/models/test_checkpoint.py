"""Checkpoints are loaded from a user's directory, or from the hub, which may not respond."""

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from huggingface_hub import HfApi
from safetensors.torch import load_file, save_file
from transformers import (
    BertConfig,
    BertModel,
    T5Config,
    T5EncoderModel,
    T5Model,
    ViTConfig,
    ViTModel,
)

import models
from models import hub

Tiny = Callable[[str], models.Runnable]


def test_a_pipeline_is_silent(cogvideo_directory: Path, capfd: pytest.CaptureFixture[str]) -> None:
    capfd.readouterr()
    runnable = models.load(str(cogvideo_directory), steps=1, device="cpu", prompt="a fox")
    assert runnable.roots.keys() == {"transformer", "text_encoder", "vae"}
    assert runnable.weights == f"pretrained: {cogvideo_directory}"
    frames = runnable.run().frames
    assert frames.shape == (1, 9, 3, 96, 128)
    assert not torch.equal(frames, runnable.for_prompt("another prompt")().frames)
    assert capfd.readouterr() == ("", "")


def test_weights_come_from_the_checkpoint(tiny: Tiny, llama_directory: Path) -> None:
    built_in = tiny("llama-3.1-8b")
    loaded = models.load("llama-3.1-8b", size="tiny", checkpoint=str(llama_directory), device="cpu")
    assert loaded.weights == f"pretrained: {llama_directory}"
    assert torch.equal(torch.stack(loaded.run().logits), torch.stack(built_in.run().logits))


def test_a_decoder_directory_generates(llama_directory: Path) -> None:
    runnable = models.load(str(llama_directory), steps=3, device="cpu")
    assert runnable.settings["prompt_tokens"] == 512
    assert runnable.run().sequences.shape == (1, 512 + 3)


def test_an_encoder_without_tokenizer_runs_on_random_ids(tmp_path: Path) -> None:
    config = BertConfig(
        vocab_size=64,
        hidden_size=128,
        num_hidden_layers=2,
        num_attention_heads=2,
        intermediate_size=128,
        max_position_embeddings=96,
    )
    BertModel(config).save_pretrained(tmp_path)
    runnable = models.load(str(tmp_path), device="cpu", seed=5)
    assert runnable.settings["prompt"] == "96 random token ids, seed 5"
    first, second = (runnable.run().last_hidden_state for _ in range(2))
    assert first.shape == (1, 96, 128)
    assert torch.equal(first, second)
    with pytest.raises(models.ModelError, match="has no tokenizer for --prompt"):
        models.load(str(tmp_path), prompt="a fox")
    with pytest.raises(models.ModelError, match="a BertModel, which decodes no tokens: leave out"):
        models.load(str(tmp_path), steps=3)


@pytest.mark.parametrize("model_class", [T5EncoderModel, T5Model])
def test_t5_runs_as_encoder_and_as_encoder_decoder(tmp_path: Path, model_class: Any) -> None:
    config = T5Config(vocab_size=64, d_model=64, d_kv=32, d_ff=64, num_layers=1, num_heads=2)
    model_class(config).save_pretrained(tmp_path)
    result = models.load(str(tmp_path), device="cpu").run()
    assert result.last_hidden_state.shape == (1, 512, 64)


def test_a_model_that_reads_no_text_is_refused(tmp_path: Path) -> None:
    config = ViTConfig(
        hidden_size=64, num_hidden_layers=1, num_attention_heads=2, intermediate_size=64
    )
    ViTModel(config).save_pretrained(tmp_path)
    with pytest.raises(models.ModelError, match=r"reads pixel_values .* FILE\.py:FUNCTION"):
        models.load(str(tmp_path))


def test_a_directory_of_something_else_is_refused(tmp_path: Path) -> None:
    with pytest.raises(models.ModelError, match="contains neither model_index"):
        models.load(str(tmp_path))
    (tmp_path / "config.json").write_text(json.dumps({"model_type": "no such model"}))
    with pytest.raises(models.ModelError, match="does not contain what this model needs"):
        models.load(str(tmp_path))


def test_missing_weights(tmp_path: Path, cogvideo_directory: Path, llama_directory: Path) -> None:
    """Without our refusal, the libraries would replace missing weights by random ones, and warn."""
    video, language = tmp_path / "video", tmp_path / "language"
    shutil.copytree(cogvideo_directory, video)
    shutil.copytree(llama_directory, language)
    drop_weight(next((video / "transformer").glob("*.safetensors")), "attn1.to_q.weight")
    drop_weight(next(language.glob("*.safetensors")), "q_proj.weight")
    for name, checkpoint in (("cogvideo", video), ("llama", language)):
        with pytest.raises(models.ModelError, match=r"lacks 1 of the model's weights \(first .*q"):
            models.load(name, checkpoint=str(checkpoint), device="cpu")
        with pytest.raises(models.ModelError, match="lacks 1 of the model's weights"):
            models.load(str(checkpoint), device="cpu")


def drop_weight(file: Path, ending: str) -> None:
    weights = load_file(file)
    del weights[next(name for name in weights if name.endswith(ending))]
    save_file(weights, file, metadata={"format": "pt"})


def test_another_architecture_is_refused(tmp_path: Path) -> None:
    BertConfig().save_pretrained(tmp_path)
    for weights in ("pretrained", "random"):
        with pytest.raises(models.ModelError, match="is a bert model, not a Llama"):
            models.load("llama", checkpoint=str(tmp_path), weights=weights, device="cpu")


def test_size_of_a_directory_is_refused(llama_directory: Path) -> None:
    with pytest.raises(models.ModelError, match="leave out --size and --weights"):
        models.load(str(llama_directory), size="tiny", weights="random")


@pytest.mark.parametrize("name", ["cogvideo", "flux", "llama"])
def test_unreachable_hub_is_reported_at_once(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    waited: list[float] = []

    def unreachable(*_: Any, timeout: float) -> None:
        waited.append(timeout)
        raise OSError("Name or service not known")

    monkeypatch.setattr(HfApi, "model_info", unreachable)
    monkeypatch.setattr(hub, "try_to_load_from_cache", lambda *_: None)
    with pytest.raises(models.ModelError) as caught:
        models.load(name, size="full", device="cpu")
    assert len(waited) == 1  # the libraries would request each file several times
    assert waited[0] <= 5
    sentence = str(caught.value)
    assert "Name or service not known" in sentence
    for remedy in ("--checkpoint DIR", "--size tiny", "--weights random"):
        assert remedy in sentence
    assert "\n" not in sentence


def test_an_unreachable_hub_with_a_copy_reads_the_copy(monkeypatch: pytest.MonkeyPatch) -> None:
    def unreachable(*_: Any, **__: Any) -> None:
        raise OSError("offline")

    monkeypatch.setattr(HfApi, "model_info", unreachable)
    monkeypatch.setattr(hub, "try_to_load_from_cache", lambda *_: "cached/config.json")
    seen = hub.read_checkpoint(lambda source, **options: (source, options), "org/name", dtype=1)
    assert seen == ("org/name", {"local_files_only": True, "dtype": 1})


def test_gated_repository_is_reported(monkeypatch: pytest.MonkeyPatch) -> None:
    def gated(source: str, **_: Any) -> None:
        raise OSError(f"You are trying to access a gated repo.\nAsk for access to {source}")

    monkeypatch.setattr(HfApi, "model_info", lambda *_, **__: None)
    with pytest.raises(models.ModelError, match=r"gated repo\): use --checkpoint DIR"):
        hub.read_checkpoint(gated, "org/name")
