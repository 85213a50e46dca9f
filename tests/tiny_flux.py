"""Tiny Flux transformer with two attention calls per step."""

from typing import Any

import torch
from torch import Tensor

from tests.factories import normal


def model() -> Any:
    from diffusers import FluxTransformer2DModel

    torch.manual_seed(0)
    return FluxTransformer2DModel(
        patch_size=1,
        in_channels=4,
        num_layers=1,
        num_single_layers=1,
        attention_head_dim=16,
        num_attention_heads=2,
        joint_attention_dim=32,
        pooled_projection_dim=32,
        axes_dims_rope=(4, 4, 8),
    ).eval()


def step(denoiser: Any, device: torch.device | str = "cpu") -> Tensor:
    output: Tensor = denoiser(
        hidden_states=normal(1, 16, 4, device=device),
        encoder_hidden_states=normal(1, 8, 32, seed=1, device=device),
        pooled_projections=normal(1, 32, seed=2, device=device),
        timestep=torch.tensor([0.5], device=device),
        img_ids=torch.zeros(16, 3, device=device),
        txt_ids=torch.zeros(8, 3, device=device),
    ).sample
    return output
