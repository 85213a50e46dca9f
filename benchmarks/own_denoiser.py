"""Denoiser without a pipeline, as a user's own model: `benchmarks/own_denoiser.py:denoiser`."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

HEADS, LAYERS = 16, 12


class Layer(nn.Module):
    """Attention and a feed-forward network."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.projected = nn.Linear(width, 3 * width)
        self.feed_forward = nn.Sequential(
            nn.LayerNorm(width), nn.Linear(width, 4 * width), nn.GELU(), nn.Linear(4 * width, width)
        )

    def forward(self, x: Tensor) -> Tensor:
        """Return states like `x` (B, S, width)."""
        projected = self.projected(x).unflatten(-1, (3, HEADS, -1))
        query, key, value = (part.transpose(1, 2) for part in projected.unbind(2))
        output = nn.functional.scaled_dot_product_attention(query, key, value)
        x = x + output.transpose(1, 2).flatten(2)
        return x + self.feed_forward(x)


class Denoiser(nn.Module):
    """Layers whose input is scaled by the time step."""

    def __init__(self, layers: int, width: int) -> None:
        super().__init__()
        self.layers = nn.ModuleList(Layer(width) for _ in range(layers))

    def forward(self, x: Tensor, timestep: Tensor) -> Tensor:
        """Return the noise in `x` (B, S, width)."""
        x = x * (1 + timestep)
        for layer in self.layers:
            x = layer(x)
        return x


def denoiser(
    device: torch.device, dtype: torch.dtype, steps: int = 8
) -> tuple[nn.Module, Callable[[], Any]]:
    """Return a denoiser of 8,192 tokens with head_dim 128; on a CPU, of 256 with head_dim 16."""
    tokens, head_dim = (8192, 128) if device.type == "cuda" else (256, 16)
    width = HEADS * head_dim
    model = Denoiser(LAYERS, width).to(device, dtype).eval()
    noise = torch.randn(1, tokens, width, device=device, dtype=dtype)
    times = torch.linspace(1, 0, steps, device=device, dtype=dtype)

    def run() -> Tensor:
        x = noise
        for time in times:
            x = x - model(x, timestep=time) / steps
        return x

    return model, run
