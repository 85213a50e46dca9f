"""Small models of transformers and diffusers with random weights, whose attention is short."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, cast

import torch
from torch import Tensor, nn

Built = tuple[nn.Module, Callable[[], Any]]

FORWARDS = 100
"""Forward passes of a run."""


def dit() -> Built:
    """Return a diffusion transformer of 64 tokens."""
    from diffusers import DiTTransformer2DModel

    model = DiTTransformer2DModel(
        num_attention_heads=4,
        attention_head_dim=16,
        in_channels=4,
        num_layers=4,
        sample_size=16,
        patch_size=2,
        num_embeds_ada_norm=8,
    ).eval()
    latents, label = torch.randn(1, 4, 16, 16), torch.tensor([1])

    def run() -> Any:
        for step in range(FORWARDS):
            output = model(latents, timestep=torch.tensor([step]), class_labels=label)
        return output.sample

    return model, run


def bert() -> Built:
    """Return an encoder that reads two sentences, one of them padded, with a mask."""
    from transformers import BertConfig, BertModel

    config = BertConfig(
        hidden_size=64, num_hidden_layers=4, num_attention_heads=4, intermediate_size=128
    )
    model = BertModel(config).eval()
    mask = torch.ones(2, 48, dtype=torch.long)
    mask[1, 20:] = 0
    return model, _forwards(model, input_ids=torch.randint(1000, (2, 48)), attention_mask=mask)


def eager_bert() -> Built:
    """Return the encoder with its own attention in plain PyTorch."""
    model, run = bert()
    cast(Any, model).set_attn_implementation("eager")
    return model, run


def vit() -> Built:
    """Return an image encoder of 65 tokens."""
    from transformers import ViTConfig, ViTModel

    config = ViTConfig(
        hidden_size=96,
        num_hidden_layers=4,
        num_attention_heads=3,
        intermediate_size=192,
        image_size=64,
        patch_size=8,
    )
    model = ViTModel(config).eval()
    return model, _forwards(model, pixel_values=torch.randn(2, 3, 64, 64))


def gpt2() -> Built:
    """Return a decoder of 256 tokens."""
    from transformers import GPT2Config, GPT2Model

    config = GPT2Config(n_embd=96, n_layer=4, n_head=6, n_positions=256, vocab_size=1000)
    model = GPT2Model(config).eval()
    return model, _forwards(model, input_ids=torch.randint(1000, (1, 256)), use_cache=False)


def plain() -> Built:
    """Return layers of 64 tokens with hardly any work beside attention."""
    torch.manual_seed(0)
    model = _Plain().eval()
    start = torch.randn(1, 64, 64)

    def run() -> Any:
        for step in range(FORWARDS):
            output = model(start, timestep=step)
        return output

    return model, run


class _Plain(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(64, 192) for _ in range(6))

    def forward(self, x: Tensor, timestep: int) -> Tensor:
        for layer in self.layers:
            query, key, value = layer(x).view(1, 64, 3, 4, 16).permute(2, 0, 3, 1, 4)
            output = nn.functional.scaled_dot_product_attention(query, key, value)
            x = x + output.transpose(1, 2).reshape(1, 64, 64)
        return x


def _forwards(model: nn.Module, **inputs: Any) -> Callable[[], Tensor]:
    def run() -> Tensor:
        with torch.no_grad():
            for _ in range(FORWARDS):
                output = model(**inputs).last_hidden_state
        return output

    return run
