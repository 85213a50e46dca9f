"""Official configurations of the models, and the random weights that fill them."""

from pathlib import Path
from typing import Any

import pytest
import torch
from accelerate import init_empty_weights
from diffusers import CogVideoXTransformer3DModel, FluxTransformer2DModel
from torch import nn
from transformers import GPT2Config, GPT2LMHeadModel, LlamaConfig, LlamaForCausalLM

import models
from models.built_in import cogvideo, flux, llama
from models.random_weights import build_random

CPU = torch.device("cpu")


def official_transformer(name: str) -> nn.Module:
    if name in cogvideo.VARIANTS:
        return CogVideoXTransformer3DModel.from_config(cogvideo.VARIANTS[name].transformer)
    if name in flux.VARIANTS:
        return FluxTransformer2DModel.from_config(flux.VARIANTS[name].transformer)
    return LlamaForCausalLM(LlamaConfig(**llama.VARIANTS[name].config))


@pytest.mark.parametrize(
    ("name", "parameters"),
    [  # configurations published with the weights
        ("cogvideo", 1_693_783_872),
        ("cogvideo-5b", 5_570_283_072),
        ("flux", 11_901_408_320),
        ("flux-schnell", 11_891_178_560),
        ("llama", 6_738_415_616),
        ("llama-3.1-8b", 8_030_261_248),
    ],
)
def test_official_configurations_have_the_published_size(name: str, parameters: int) -> None:
    with init_empty_weights():
        model = official_transformer(name)
    assert sum(parameter.numel() for parameter in model.parameters()) == parameters


def test_random_weights_keep_buffers_and_scale() -> None:
    config = LlamaConfig(
        vocab_size=64,
        hidden_size=256,
        intermediate_size=512,
        num_hidden_layers=2,
        num_attention_heads=2,
        rope_parameters=llama.VARIANTS["llama-3.1-8b"].config["rope_parameters"],
    )
    model = build_random(lambda: LlamaForCausalLM(config), seed=3, dtype=torch.bfloat16, device=CPU)
    ordinary = LlamaForCausalLM(config)
    expected = dict(ordinary.named_buffers())
    buffers = dict(model.named_buffers())
    assert buffers.keys() == expected.keys()
    for name, buffer in buffers.items():
        assert buffer.dtype == expected[name].dtype
        torch.testing.assert_close(buffer, expected[name], rtol=0, atol=0)
    parameters = dict(model.named_parameters())
    assert {parameter.dtype for parameter in parameters.values()} == {torch.bfloat16}
    assert (parameters["model.norm.weight"] == 1).all()
    down = parameters["model.layers.0.mlp.down_proj.weight"].float()
    assert down.std() == pytest.approx(512**-0.5, rel=0.02)
    logits = model(torch.arange(32)[None]).logits
    assert logits.isfinite().all()
    assert 0.2 < logits.float().std() < 5


def test_random_weights_come_from_the_seed_and_stay_tied() -> None:
    config = GPT2Config(vocab_size=64, n_positions=32, n_embd=32, n_layer=1, n_head=2)

    def build(seed: int) -> GPT2LMHeadModel:
        return build_random(
            lambda: GPT2LMHeadModel(config), seed=seed, dtype=torch.float32, device=CPU
        )

    first, same, other = build(0), build(0), build(1)
    assert first.lm_head.weight is first.transformer.wte.weight
    assert torch.equal(first.lm_head.weight, same.lm_head.weight)
    assert not torch.equal(first.lm_head.weight, other.lm_head.weight)
    assert (first.transformer.h[0].attn.c_attn.bias == 0).all()


def load_random(name: str, directory: Path, *, steps: int) -> models.Runnable:
    """Load a full model whose sizes come from a directory."""
    size: dict[str, Any] = {"size": "full", "weights": "random", "checkpoint": str(directory)}
    return models.load(name, **size, steps=steps, device="cpu")


def test_full_random_run_ends_at_latents(cogvideo_directory: Path) -> None:
    runnable = load_random("cogvideo", cogvideo_directory, steps=2)
    result = runnable.run()
    assert result.frames.shape == (1, 3, 4, 12, 16)
    assert result.frames.isfinite().all()
    outputs = runnable.outputs(result).tensors
    assert outputs.keys() == {"latents"}
    assert torch.equal(outputs["latents"], result.frames)
    assert runnable.roots.keys() == {"transformer"}
    assert runnable.weights == f"random, seed 0 ({cogvideo_directory} configuration)"
    assert runnable.settings["prompt"] == "random text embeddings"
    assert runnable.settings["output"] == "latents: the VAE is left out"


def test_full_random_language_model_prefills_the_official_length(llama_directory: Path) -> None:
    runnable = load_random("llama", llama_directory, steps=1)
    result = runnable.run()
    assert result.sequences.shape == (1, 4096 + 1)
    assert torch.stack(result.logits).isfinite().all()
    assert runnable.settings["prompt"] == "4096 random token ids, seed 0"
    assert runnable.language.decode(torch.tensor([[3, 14]])) == "3 14"
    with pytest.raises(models.ModelError, match="no tokenizer"):
        runnable.language.encode("a text")


@pytest.mark.parametrize("name", ["cogvideo", "flux", "llama"])
def test_prompt_without_a_text_encoder_is_refused(name: str) -> None:
    with pytest.raises(models.ModelError, match="--prompt has no effect"):
        models.load(name, size="full", weights="random", prompt="a fox", device="cpu")
