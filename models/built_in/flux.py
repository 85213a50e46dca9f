"""FLUX.1: text to image. The dev model has the guidance scale as input; schnell needs 4 steps."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from .. import pretrained_weights
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
    "diffusers": (0, 36),  # the first that can be imported with transformers 5
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
    """Build FLUX.1 as requested.

    Raises:
        ModelError: The checkpoint cannot be read.
    """
    from diffusers import FluxPipeline

    from ..diffusion import (
        embeddings,
        pipeline_runnable,
        read_built_in,
        read_pipeline,
        refuse_prompt,
        unknown_words,
    )

    variant = VARIANTS[request.name]
    trained = pretrained_weights.directory(request.name) if request.is_built_in else None
    prompt = request.prompt
    if prompt is None:
        prompt = BUILT_IN_PROMPT if trained else PROMPT
    text_tokens = TINY_TEXT_TOKENS if request.is_tiny else variant.text_tokens
    texts: dict[str, Any] = {"prompt": prompt}
    note = ""
    if trained:
        pipeline = read_built_in(FluxPipeline, trained, request)
        weights = pretrained_weights.describe(request.name, request.weights, request.seed)
        note = unknown_words(request, pipeline.tokenizer_2)
    elif request.is_built_in:
        pipeline = tiny_pipeline(variant, request)
        weights = f"random, seed {request.seed} (built-in tiny configuration)"
    elif request.weights == "pretrained":
        source = request.checkpoint or variant.hub_id
        pipeline = read_pipeline(FluxPipeline, source, request.dtype)
        weights = f"pretrained: {source}"
    else:
        refuse_prompt(request)
        pipeline = _random(variant, request)
        config = pipeline.transformer.config
        shape = (1, text_tokens, config.joint_attention_dim)
        texts = {
            "prompt_embeds": embeddings(*shape, request=request, stream=1),
            "pooled_prompt_embeds": embeddings(
                1, config.pooled_projection_dim, request=request, stream=2
            ),
        }
        prompt = "random text embeddings"
        origin = request.checkpoint or variant.hub_id.partition("/")[2]
        weights = f"random, seed {request.seed} ({origin} configuration)"

    if trained:
        pixels, tiny_steps = pipeline.vae.config.sample_size, BUILT_IN_STEPS
    else:
        pixels, tiny_steps = (TINY_PIXELS if request.is_tiny else FULL_PIXELS), 4
    decodes = pipeline.vae is not None
    run = {
        "height": pixels,
        "width": pixels,
        "num_inference_steps": request.steps or (tiny_steps if request.is_tiny else variant.steps),
        "guidance_scale": variant.guidance_scale,
        "max_sequence_length": text_tokens,
        "output_type": "pt" if decodes else "latent",
    }
    settings = request.settings(
        prompt=prompt,
        steps=run["num_inference_steps"],
        height=pixels,
        width=pixels,
        guidance_scale=variant.guidance_scale,
        text_tokens=text_tokens,
        output="image" if decodes else "latents: the VAE is left out",
    )
    return pipeline_runnable(
        pipeline,
        request,
        arguments={**texts, **run},
        weights=weights,
        settings=settings,
        note=note,
    )


def tiny_pipeline(variant: Variant, request: Request) -> FluxPipeline:
    """Build a pipeline with 2 double and 4 single blocks of 2 heads (D = 128).

    There are 64 text tokens and 20·20 image tokens.
    """
    from diffusers import (
        AutoencoderKL,
        FlowMatchEulerDiscreteScheduler,
        FluxPipeline,
        FluxTransformer2DModel,
    )
    from transformers import CLIPTextConfig, CLIPTextModel

    from ..diffusion import tiny_t5
    from ..inference import seeded
    from ..offline_tokenizers import clip_tokenizer, t5_tokenizer

    clip_tokens, t5_tokens = clip_tokenizer(max_length=77), t5_tokenizer()
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
    with seeded(request.seed, request.device):
        pipeline = FluxPipeline(
            tokenizer=clip_tokens,
            text_encoder=CLIPTextModel(clip_config),
            tokenizer_2=t5_tokens,
            text_encoder_2=tiny_t5(len(t5_tokens)),
            transformer=FluxTransformer2DModel(
                in_channels=16,
                num_layers=2,
                num_single_layers=4,
                num_attention_heads=2,
                joint_attention_dim=64,
                pooled_projection_dim=64,
                **variant.transformer,
            ),
            vae=AutoencoderKL(
                down_block_types=("DownEncoderBlock2D",) * 4,
                up_block_types=("UpDecoderBlock2D",) * 4,
                block_out_channels=(8, 8, 16, 32),
                norm_num_groups=4,
                latent_channels=4,  # packed 2×2 into the transformer's 16 channels
                use_quant_conv=False,
                use_post_quant_conv=False,
                scaling_factor=0.3611,
                shift_factor=0.1159,
            ),
            scheduler=FlowMatchEulerDiscreteScheduler(**variant.scheduler),
        )
    return pipeline.to(request.dtype)


def _random(variant: Variant, request: Request) -> FluxPipeline:
    """Build a pipeline of only the full-size transformer, which contains the attention."""
    from diffusers import FlowMatchEulerDiscreteScheduler, FluxPipeline, FluxTransformer2DModel

    from ..hub import read_checkpoint
    from ..random_weights import build_random

    if request.checkpoint:
        config = read_checkpoint(
            FluxTransformer2DModel.load_config, request.checkpoint, subfolder="transformer"
        )
    else:
        config = variant.transformer
    transformer = build_random(
        lambda: FluxTransformer2DModel.from_config(config),
        seed=request.seed,
        dtype=request.dtype,
        device=request.device,
    )
    return FluxPipeline(
        tokenizer=None,
        text_encoder=None,
        tokenizer_2=None,
        text_encoder_2=None,
        vae=None,
        transformer=transformer,
        scheduler=FlowMatchEulerDiscreteScheduler(**variant.scheduler),
    )
