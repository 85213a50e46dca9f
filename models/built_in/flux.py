"""FLUX.1: text to image. The dev model has the guidance scale as input; schnell needs 4 steps."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from types import MappingProxyType
from typing import TYPE_CHECKING, Any

from ..libraries import Library, Version
from ..runnable import Runnable

if TYPE_CHECKING:
    from diffusers import FluxPipeline

    from ..request import Request

NAMES = {
    "flux": "FLUX.1-dev, text to image (diffusers)",
    "flux-schnell": "FLUX.1-schnell, text to image in four steps (diffusers)",
}
NEEDS: dict[Library, Version] = {
    "transformers": (5, 0),  # reads the tokenizers that ship with this package
    "diffusers": (0, 36),  # older versions cannot be imported with transformers 5
}

PROMPT = "A lighthouse keeper feeds a fox at dawn, oil on canvas."
BUILT_IN_PROMPT = "a striped red circle left of a plain blue square on a light background"
BUILT_IN_STEPS = 12
FULL_PIXELS = 1024
TINY_PIXELS = 320
TINY_TEXT_TOKENS = 64


@dataclass(frozen=True)
class Variant:
    """A published model: its hub id, configurations and usual run."""

    hub_id: str
    transformer: dict[str, Any]
    scheduler: dict[str, Any]
    text_tokens: int
    steps: int
    guidance_scale: float


# The defaults of FluxTransformer2DModel are the published configuration, except for the guidance.
VARIANTS = {
    "flux": Variant(
        "black-forest-labs/FLUX.1-dev",
        transformer={"guidance_embeds": True},
        scheduler={"shift": 3.0, "use_dynamic_shifting": True},
        text_tokens=512,
        steps=28,
        guidance_scale=3.5,
    ),
    "flux-schnell": Variant(
        "black-forest-labs/FLUX.1-schnell",
        transformer={"guidance_embeds": False},
        scheduler={"shift": 1.0, "use_dynamic_shifting": False},
        text_tokens=256,
        steps=4,
        guidance_scale=0.0,
    ),
}


def build(request: Request) -> Runnable:
    """Build FLUX.1 as requested."""
    from diffusers import FlowMatchEulerDiscreteScheduler, FluxPipeline, FluxTransformer2DModel

    from ..diffusion import named_runnable

    variant = VARIANTS[request.name]
    text_tokens = TINY_TEXT_TOKENS if request.is_tiny else variant.text_tokens

    def embeddings(config: Any) -> dict[str, tuple[int, ...]]:
        return {
            "prompt_embeds": (1, text_tokens, config.joint_attention_dim),
            "pooled_prompt_embeds": (1, config.pooled_projection_dim),
        }

    def run(pipeline: FluxPipeline, is_trained: bool) -> dict[str, Any]:
        pixels, tiny_steps = (TINY_PIXELS if request.is_tiny else FULL_PIXELS), 4
        if is_trained:
            pixels, tiny_steps = pipeline.vae.config.sample_size, BUILT_IN_STEPS
        steps = tiny_steps if request.is_tiny else variant.steps
        return {
            "num_inference_steps": request.steps or steps,
            "height": pixels,
            "width": pixels,
            "guidance_scale": variant.guidance_scale,
            "max_sequence_length": text_tokens,
        }

    return named_runnable(
        request,
        FluxPipeline,
        FluxTransformer2DModel,
        hub_id=variant.hub_id,
        configuration=variant.transformer,
        scheduler=FlowMatchEulerDiscreteScheduler(**variant.scheduler),
        tiny=lambda: tiny_pipeline(variant, request),
        prompt=PROMPT,
        trained_prompt=BUILT_IN_PROMPT,
        embeddings=embeddings,
        run=run,
        output="image",
    )


def tiny_pipeline(variant: Variant, request: Request) -> FluxPipeline:
    """Build a pipeline with 2 double and 4 single blocks of 2 heads (D = 128).

    There are 64 text tokens and 20·20 image tokens.
    """
    from ..inference import seeded

    with seeded(request.seed, request.device):
        pipeline = small_pipeline(
            variant,
            layers=(2, 4),
            vae_channels=(8, 8, 16, 32),
            vae={"norm_num_groups": 4, "scaling_factor": 0.3611, "shift_factor": 0.1159},
        )
    return pipeline.to(request.dtype)


def small_pipeline(
    variant: Variant,
    *,
    layers: tuple[int, int],
    vae_channels: tuple[int, ...],
    vae: Mapping[str, Any],
    scheduler: Mapping[str, Any] = MappingProxyType({}),
    words: Sequence[str] = (),
) -> FluxPipeline:
    """Build a pipeline with new weights, and text encoders 64 wide.

    Args:
        layers: Numbers of double and of single blocks, with 2 heads (D = 128).
        vae_channels: Channels of each level of the autoencoder.
        vae: Other options of the autoencoder.
        scheduler: Options of the scheduler in addition to the variant's.
        words: Words that are one token of the T5 tokenizer.
    """
    from diffusers import (
        AutoencoderKL,
        FlowMatchEulerDiscreteScheduler,
        FluxPipeline,
        FluxTransformer2DModel,
    )
    from transformers import CLIPTextConfig, CLIPTextModel

    from ..diffusion import tiny_t5
    from ..offline_tokenizers import clip_tokenizer, t5_tokenizer

    clip_tokens, t5_tokens = clip_tokenizer(77, words), t5_tokenizer(words)
    clip_config = CLIPTextConfig(
        vocab_size=len(clip_tokens),
        hidden_size=64,
        intermediate_size=128,
        projection_dim=64,
        num_hidden_layers=2,
        num_attention_heads=2,
        bos_token_id=clip_tokens.bos_token_id,
        eos_token_id=clip_tokens.eos_token_id,
        pad_token_id=clip_tokens.pad_token_id,
    )
    return FluxPipeline(
        tokenizer=clip_tokens,
        text_encoder=CLIPTextModel(clip_config),
        tokenizer_2=t5_tokens,
        text_encoder_2=tiny_t5(len(t5_tokens)),
        transformer=FluxTransformer2DModel(
            in_channels=16,
            num_layers=layers[0],
            num_single_layers=layers[1],
            num_attention_heads=2,
            joint_attention_dim=64,
            pooled_projection_dim=64,
            **variant.transformer,
        ),
        vae=AutoencoderKL(
            down_block_types=("DownEncoderBlock2D",) * len(vae_channels),
            up_block_types=("UpDecoderBlock2D",) * len(vae_channels),
            block_out_channels=vae_channels,
            latent_channels=4,  # packed 2×2 into the transformer's 16 channels
            use_quant_conv=False,
            use_post_quant_conv=False,
            **vae,
        ),
        scheduler=FlowMatchEulerDiscreteScheduler(**{**variant.scheduler, **scheduler}),
    )
