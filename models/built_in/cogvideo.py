"""CogVideoX: text to video. The 2b model has fixed positions, the 5b model rotary positions."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from .. import pretrained_weights
from ..libraries import Library, Version
from ..runnable import Runnable

if TYPE_CHECKING:
    from diffusers import CogVideoXDDIMScheduler, CogVideoXPipeline

    from ..request import Request

NAMES = {
    "cogvideo": "CogVideoX-2b, text to video (diffusers)",
    "cogvideo-5b": "CogVideoX-5b, text to video, rotary positions (diffusers)",
}
NEEDS: dict[Library, Version] = {
    "transformers": (5, 0),  # reads the tokenizers that ship with this package
    "diffusers": (0, 36),  # the first that can be imported with transformers 5
}

PROMPT = "A red panda reads a newspaper by the sea."
BUILT_IN_PROMPT = "a striped red circle moving right on a dark background"
BUILT_IN_STEPS = 6  # a video takes seconds on a CPU; the model card gives its quality
GUIDANCE_SCALE = 6.0  # above 1: every step runs the prompt and the empty prompt, a batch of 2


@dataclass(frozen=True)
class Variant:
    """A published model: its hub id, and its differences from the class's defaults."""

    hub_id: str
    transformer: dict[str, Any]
    snr_shift_scale: float


# The defaults of CogVideoXTransformer3DModel are the 2b configuration.
VARIANTS = {
    "cogvideo": Variant("THUDM/CogVideoX-2b", {}, snr_shift_scale=3.0),
    "cogvideo-5b": Variant(
        "THUDM/CogVideoX-5b",
        {
            "num_layers": 42,
            "num_attention_heads": 48,
            "use_rotary_positional_embeddings": True,
        },
        snr_shift_scale=1.0,
    ),
}


def build(request: Request) -> Runnable:
    """Build CogVideoX as requested.

    Raises:
        ModelError: The checkpoint cannot be read.
    """
    from diffusers import CogVideoXPipeline

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
    texts: dict[str, Any] = {"prompt": prompt}
    note = ""
    if trained:
        pipeline = read_built_in(CogVideoXPipeline, trained, request)
        weights = pretrained_weights.describe(request.name, request.weights, request.seed)
        note = unknown_words(request, pipeline.tokenizer)
    elif request.is_built_in:
        pipeline = tiny_pipeline(variant, request)
        weights = f"random, seed {request.seed} (built-in tiny configuration)"
    elif request.weights == "pretrained":
        source = request.checkpoint or variant.hub_id
        pipeline = read_pipeline(CogVideoXPipeline, source, request.dtype)
        weights = f"pretrained: {source}"
    else:
        refuse_prompt(request)
        pipeline = _random(variant, request)
        config = pipeline.transformer.config
        shape = (1, config.max_text_seq_length, config.text_embed_dim)
        texts = {
            "prompt_embeds": embeddings(*shape, request=request, stream=1),
            "negative_prompt_embeds": embeddings(*shape, request=request, stream=2),
        }
        prompt = "random text embeddings"
        origin = request.checkpoint or variant.hub_id.partition("/")[2]
        weights = f"random, seed {request.seed} ({origin} configuration)"

    config = pipeline.transformer.config
    decodes = pipeline.vae is not None
    tiny_steps = BUILT_IN_STEPS if trained else 4
    run = {
        "height": config.sample_height * pipeline.vae_scale_factor_spatial,
        "width": config.sample_width * pipeline.vae_scale_factor_spatial,
        "num_frames": config.sample_frames,
        "num_inference_steps": request.steps or (tiny_steps if request.is_tiny else 50),
        "guidance_scale": GUIDANCE_SCALE,
        "max_sequence_length": config.max_text_seq_length,
        "output_type": "pt" if decodes else "latent",
    }
    settings = request.settings(
        prompt=prompt,
        steps=run["num_inference_steps"],
        height=run["height"],
        width=run["width"],
        num_frames=run["num_frames"],
        guidance_scale=GUIDANCE_SCALE,
        text_tokens=config.max_text_seq_length,
        output="video" if decodes else "latents: the VAE is left out",
    )
    return pipeline_runnable(
        pipeline,
        request,
        arguments={**texts, **run},
        weights=weights,
        settings=settings,
        note=note,
    )


def scheduler(variant: Variant) -> CogVideoXDDIMScheduler:
    """Build the scheduler with the published noise schedule."""
    from diffusers import CogVideoXDDIMScheduler

    return CogVideoXDDIMScheduler(
        beta_schedule="scaled_linear",
        beta_start=0.00085,
        beta_end=0.012,
        clip_sample=False,
        prediction_type="v_prediction",
        rescale_betas_zero_snr=True,
        snr_shift_scale=variant.snr_shift_scale,
        timestep_spacing="trailing",
    )


def tiny_pipeline(variant: Variant, request: Request) -> CogVideoXPipeline:
    """Build a pipeline with 4 layers of 4 heads (D = 64), 64 text and 3·12·16 video tokens."""
    from diffusers import AutoencoderKLCogVideoX, CogVideoXPipeline, CogVideoXTransformer3DModel

    from ..diffusion import tiny_t5
    from ..inference import seeded
    from ..offline_tokenizers import t5_tokenizer

    tokenizer = t5_tokenizer()
    rotary = variant.transformer.get("use_rotary_positional_embeddings", False)
    with seeded(request.seed, request.device):
        pipeline = CogVideoXPipeline(
            tokenizer=tokenizer,
            text_encoder=tiny_t5(len(tokenizer)),
            transformer=CogVideoXTransformer3DModel(
                num_attention_heads=4,
                num_layers=4,
                in_channels=4,
                out_channels=4,
                time_embed_dim=64,
                text_embed_dim=64,
                max_text_seq_length=64,
                sample_width=32,
                sample_height=24,
                sample_frames=9,
                use_rotary_positional_embeddings=rotary,
            ),
            vae=AutoencoderKLCogVideoX(
                block_out_channels=(8, 8, 8, 8),
                latent_channels=4,
                layers_per_block=1,
                norm_num_groups=2,
            ),
            scheduler=scheduler(variant),
        )
    return pipeline.to(request.dtype)


def _random(variant: Variant, request: Request) -> CogVideoXPipeline:
    """Build a pipeline of only the full-size transformer, which contains the attention."""
    from diffusers import CogVideoXPipeline, CogVideoXTransformer3DModel

    from ..hub import read_checkpoint
    from ..random_weights import build_random

    if request.checkpoint:
        config = read_checkpoint(
            CogVideoXTransformer3DModel.load_config, request.checkpoint, subfolder="transformer"
        )
    else:
        config = variant.transformer
    transformer = build_random(
        lambda: CogVideoXTransformer3DModel.from_config(config),
        seed=request.seed,
        dtype=request.dtype,
        device=request.device,
    )
    return CogVideoXPipeline(
        tokenizer=None,
        text_encoder=None,
        vae=None,
        transformer=transformer,
        scheduler=scheduler(variant),
    )
