"""A run's outputs have names, and texts have scores."""

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image
from transformers import T5Config, T5ForConditionalGeneration

import models
from models.outputs import of_anything

Tiny = Callable[[str], models.Runnable]


def test_latents_decode_to_the_video(cogvideo_directory: Path) -> None:
    runnable = models.load(str(cogvideo_directory), steps=2, device="cpu")
    result = runnable.run()
    outputs = runnable.outputs(result)
    assert outputs.kind == "diffusion"
    assert outputs.tensors.keys() == {"frames", "latents"}
    frames, latents = outputs.tensors["frames"], outputs.tensors["latents"]
    assert torch.equal(frames, result.frames[0])
    assert latents.shape == (1, 3, 4, 12, 16)
    vae: Any = runnable.roots["vae"]
    with torch.no_grad():
        decoded = vae.decode(latents.transpose(1, 2) / vae.config.scaling_factor).sample
    again = (decoded[0].transpose(0, 1) / 2 + 0.5).clamp(0, 1)
    torch.testing.assert_close(again, frames)


def test_an_image_and_its_latents() -> None:
    runnable = models.load("flux-schnell", size="tiny", steps=1, device="cpu")
    outputs = runnable.outputs(runnable.run())
    assert outputs.kind == "diffusion"
    assert {name: tuple(each.shape) for name, each in outputs.tensors.items()} == {
        "images": (1, 3, 320, 320),
        "latents": (1, 20 * 20, 16),
    }
    assert outputs.tensors["images"].min() >= 0
    assert outputs.tensors["images"].max() <= 1


def test_a_generation(tiny: Tiny) -> None:
    runnable = tiny("llama-3.1-8b")
    result = runnable.run()
    outputs = runnable.outputs(result)
    assert outputs.kind == "language"
    assert outputs.tensors.keys() == {"sequences", "logits"}
    assert torch.equal(outputs.tensors["sequences"], result.sequences)
    assert outputs.tensors["logits"].shape == (8, 258)
    assert torch.equal(outputs.tensors["logits"].argmax(-1), result.sequences[0, -8:])


def test_scores_equal_the_logits_of_generation(tiny: Tiny) -> None:
    runnable = tiny("llama-3.1-8b")
    language = runnable.language
    generated = runnable.outputs(runnable.run()).tensors
    scored = language.score(generated["sequences"])
    assert scored.shape == (392, 258)
    # The run decoded these eight positions from the cache, one at a time.
    torch.testing.assert_close(scored[383:391], generated["logits"], rtol=1e-3, atol=1e-3)
    assert not scored.requires_grad


def test_text_is_encoded_and_decoded(tiny: Tiny, llama_directory: Path) -> None:
    for runnable in (tiny("llama-3.1-8b"), models.load(str(llama_directory), device="cpu")):
        language = runnable.language
        ids = language.encode("ten o'clock")
        assert ids.shape == (1, 11)
        assert language.decode(ids) == "ten o'clock"
        assert language.encode("long " * 1000).shape == (1, 4096)
        with pytest.raises(models.ModelError, match="fewer than two tokens"):
            language.encode("x")


def test_an_encoder_decoder_scores_no_text(tmp_path: Path) -> None:
    config = T5Config(
        vocab_size=64,
        d_model=32,
        d_kv=16,
        d_ff=32,
        num_layers=1,
        num_heads=2,
        decoder_start_token_id=0,
    )
    T5ForConditionalGeneration(config).save_pretrained(tmp_path)
    runnable = models.load(str(tmp_path), device="cpu", steps=3)
    assert runnable.language.score is None
    outputs = runnable.outputs(runnable.run())
    assert outputs.tensors["sequences"].shape == (1, 1 + 3)
    assert outputs.tensors["logits"].shape == (3, 64)


@dataclass
class Answer:
    note: str
    states: list[torch.Tensor]


def test_output_is_found_in_any_container() -> None:
    tensor = torch.randn(2, 3)
    for result in (tensor, (None, tensor), {"a": "text", "b": [tensor]}, Answer("", [tensor])):
        outputs = of_anything(result)
        assert outputs.kind == "tensor"
        assert torch.equal(outputs.tensors["output"], tensor)
        assert outputs.tensors["output"].data_ptr() != tensor.data_ptr()
    assert torch.equal(of_anything(tensor.numpy()).tensors["output"], tensor)
    assert of_anything(tensor.T).tensors["output"].is_contiguous()
    assert of_anything("no tensor").tensors == {}
    first = [SimpleNamespace(token_ids=ids) for ids in ([5, 6, 7], (8,))]  # two answers, as vLLM's
    second = SimpleNamespace(generated_tokens=[9, 6])  # as transformers'
    engine = {"request": SimpleNamespace(outputs=first), "other": second}
    assert of_anything(engine).tensors["sequences"].tolist() == [[5, 6, 7, 8, 9, 6]]
    assert models.Runnable.new_tokens([*engine.values()]) == 6
    assert models.Runnable.new_tokens(tensor) == models.Runnable.new_tokens([tensor, "text"]) == 0
    ids = torch.tensor([[1, 2], [3, 4]])
    assert of_anything(ids).kind == "language"
    assert torch.equal(of_anything(ids).tensors["sequences"], ids[:1])
    generated = SimpleNamespace(sequences=ids, logits=(torch.ones(2, 5), torch.zeros(2, 5)))
    assert of_anything(generated).tensors["logits"].tolist() == [[1.0] * 5, [0.0] * 5]


def test_pictures_of_any_type_are_found() -> None:
    levels = np.random.default_rng(0).integers(256, size=(2, 4, 6, 3), dtype=np.uint8)
    expected = torch.from_numpy(levels).permute(0, 3, 1, 2) / 255
    pictures = [Image.fromarray(each) for each in levels]
    for name, value in (
        ("images", pictures),
        ("images", levels / np.float32(255)),
        ("images", expected),
        ("frames", [pictures]),
        ("frames", expected[None]),
    ):
        outputs = of_anything(SimpleNamespace(**{name: value}))
        assert outputs.kind == "diffusion"
        torch.testing.assert_close(outputs.tensors[name], expected)
    broken = expected.clone()
    broken[0] = torch.nan
    assert of_anything(SimpleNamespace(images=broken)).kind == "diffusion"


def test_latents_are_not_taken_for_pictures() -> None:
    @dataclass
    class Result:
        images: torch.Tensor

    latents = torch.randn(1, 4, 8, 8)
    outputs = of_anything(Result(latents))
    assert outputs.kind == "tensor"
    assert torch.equal(outputs.tensors["output"], latents)
