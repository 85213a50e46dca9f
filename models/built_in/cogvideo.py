"""CogVideoX: text to video. The 2b model has fixed positions, the 5b model rotary positions."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

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
    "diffusers": (0, 36),  # older versions cannot be imported with transformers 5
}

PROMPT = "A red panda reads a newspaper by the sea."
BUILT_IN_PROMPT = "a striped red circle moving right on a dark background"
BUILT_IN_STEPS = 6  # a video takes seconds on a CPU; the model card gives its quality
GUIDANCE_SCALE = 6.0  # above 1, so each step runs the prompt and the empty prompt, a batch of 2


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
    """Build CogVideoX as requested."""
    from diffusers import CogVideoXPipeline, CogVideoXTransformer3DModel

    from ..diffusion import named_runnable

    variant = VARIANTS[request.name]

    def embeddings(config: Any) -> dict[str, tuple[int, ...]]:
        shape = (1, config.max_text_seq_length, config.text_embed_dim)
        return {"prompt_embeds": shape, "negative_prompt_embeds": shape}

    def run(pipeline: CogVideoXPipeline, is_trained: bool) -> dict[str, Any]:
        config = pipeline.transformer.config
        tiny_steps = BUILT_IN_STEPS if is_trained else 4
        return {
            "num_inference_steps": request.steps or (tiny_steps if request.is_tiny else 50),
            "height": config.sample_height * pipeline.vae_scale_factor_spatial,
            "width": config.sample_width * pipeline.vae_scale_factor_spatial,
            "num_frames": config.sample_frames,
            "guidance_scale": GUIDANCE_SCALE,
            "max_sequence_length": config.max_text_seq_length,
        }

    return named_runnable(
        request,
        CogVideoXPipeline,
        CogVideoXTransformer3DModel,
        hub_id=variant.hub_id,
        configuration=variant.transformer,
        scheduler=scheduler(variant),
        tiny=lambda: tiny_pipeline(variant, request),
        prompt=PROMPT,
        trained_prompt=BUILT_IN_PROMPT,
        embeddings=embeddings,
        run=run,
        output="video",
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
