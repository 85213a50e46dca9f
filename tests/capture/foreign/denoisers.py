"""Denoisers of pictures, videos and sound, from diffusers."""

from collections import Counter
from collections.abc import Callable
from typing import Any

import diffusers
import torch
from torch import Tensor

from tests.capture.foreign.model import Foreign, Run, denoised

TIMES = (999.0, 500.0)

_generator = torch.Generator()


def noise(*sizes: int) -> Tensor:
    return torch.randn(sizes, generator=_generator)


def mask(*lengths: int, of: int) -> Tensor:
    """Return a mask (B, `of`) that is True for each text's real tokens and False for padding."""
    return torch.stack([torch.arange(of) < length for length in lengths])


def grid(*sizes: int) -> Tensor:
    """Return the coordinates (tokens, axes) of a picture's or a text's tokens."""
    return torch.cartesian_prod(*(torch.arange(size) for size in sizes))


def denoiser(
    kind: str,
    config: dict[str, Any],
    inputs: Callable[[], dict[str, Any]],
    *,
    time: str = "timestep",
    change: Callable[[Any], object] = lambda model: None,
) -> Callable[[], tuple[Any, Run]]:
    """Return a function that builds a denoiser and runs it for each of `TIMES`.

    Args:
        inputs: returns the other arguments of the forward pass.
        time: name of the argument for the time step, (B,).
        change: function applied to the model.
    """

    def build() -> tuple[Any, Run]:
        torch.manual_seed(0)
        _generator.manual_seed(0)
        model = getattr(diffusers, kind)(**config).eval()
        change(model)
        given = inputs()
        first = next(iter(given.values()))

        def run() -> Any:
            return [
                model(**given, **{time: torch.full((len(first),), each)}, return_dict=False)
                for each in TIMES
            ]

        return model, run

    return build


SMALL = {
    "in_channels": 4,
    "out_channels": 4,
    "num_layers": 2,
    "num_attention_heads": 2,
    "attention_head_dim": 8,
}
FLUX = {
    **SMALL,
    "num_single_layers": 1,
    "attention_head_dim": 16,
    "joint_attention_dim": 32,
    "pooled_projection_dim": 32,
    "axes_dims_rope": (4, 4, 8),
}
WAN = {
    "num_attention_heads": 2,
    "attention_head_dim": 12,
    "in_channels": 16,
    "out_channels": 16,
    "text_dim": 32,
    "freq_dim": 16,
    "ffn_dim": 32,
    "num_layers": 2,
    "rope_max_seq_len": 32,
}
SD3 = {
    "sample_size": 8,
    "patch_size": 1,
    "in_channels": 8,
    "num_layers": 3,
    "attention_head_dim": 8,
    "num_attention_heads": 4,
    "joint_attention_dim": 32,
    "caption_projection_dim": 32,
    "pooled_projection_dim": 64,
    "out_channels": 8,
}


def flux_inputs() -> dict[str, Any]:
    return {
        "hidden_states": noise(1, 16, 4),
        "encoder_hidden_states": noise(1, 8, 32),
        "pooled_projections": noise(1, 32),
        "img_ids": grid(1, 4, 4),
        "txt_ids": torch.zeros(8, 3),
    }


def one_block_by_flex(model: Any) -> None:
    model.transformer_blocks[1].attn.processor._attention_backend = "flex"


def video(*, frames: int = 2, channels: int = 4, text: int = 16) -> dict[str, Any]:
    return {
        "hidden_states": noise(1, channels, frames, 8, 8),
        "encoder_hidden_states": noise(1, 6, text),
    }


def image(
    *, batch: int = 2, channels: int = 4, size: int = 8, tokens: int = 6, text: int = 8
) -> dict[str, Any]:
    return {
        "hidden_states": noise(batch, channels, size, size),
        "encoder_hidden_states": noise(batch, tokens, text),
    }


def wan_2_2() -> tuple[Any, Run]:
    """Return Wan 2.2, whose two transformers each run some of the steps."""
    torch.manual_seed(0)
    _generator.manual_seed(0)
    pipe = diffusers.WanPipeline(
        tokenizer=None,
        text_encoder=None,
        vae=diffusers.AutoencoderKLWan(
            base_dim=3, z_dim=16, dim_mult=[1, 1, 1, 1], num_res_blocks=1
        ),
        scheduler=diffusers.UniPCMultistepScheduler(
            prediction_type="flow_prediction", use_flow_sigmas=True, flow_shift=3.0
        ),
        transformer=diffusers.WanTransformer3DModel(**WAN).eval(),
        transformer_2=diffusers.WanTransformer3DModel(**WAN).eval(),
        boundary_ratio=0.875,
    )
    pipe.set_progress_bar_config(disable=True)
    text, empty = noise(1, 6, 32), noise(1, 6, 32)

    def run() -> Any:
        return pipe(
            prompt_embeds=text,
            negative_prompt_embeds=empty,
            generator=torch.Generator().manual_seed(0),
            num_inference_steps=2,
            guidance_scale=6.0,
            height=16,
            width=16,
            num_frames=5,
            output_type="latent",
        ).frames

    return pipe, run


def sd3_with_controlnet() -> tuple[Any, Run]:
    torch.manual_seed(0)
    _generator.manual_seed(0)
    transformer = diffusers.SD3Transformer2DModel(**SD3).eval()
    controlnet = diffusers.SD3ControlNetModel(**{**SD3, "num_layers": 2}).eval()
    inputs = {**image(channels=8, text=32), "pooled_projections": noise(2, 64)}
    condition = noise(2, 8, 8, 8)

    def run() -> Any:
        outputs = []
        for each in TIMES:
            given = {**inputs, "timestep": torch.full((2,), each), "return_dict": False}
            [samples] = controlnet(**given, controlnet_cond=condition)
            outputs += transformer(**given, block_controlnet_hidden_states=samples)
        return outputs

    return {"transformer": transformer, "controlnet": controlnet}, run


MODELS = [
    Foreign("Flux", denoiser("FluxTransformer2DModel", FLUX, flux_inputs), denoised(3)),
    Foreign(
        "Flux (one block by FlexAttention)",
        denoiser("FluxTransformer2DModel", FLUX, flux_inputs, change=one_block_by_flex),
        denoised(3),
        frozenset({"sdpa", "diffusers"}),
    ),
    # Each block attends to itself and to the text.
    Foreign(
        "Wan 2.1",
        denoiser("WanTransformer3DModel", WAN, lambda: video(channels=16, text=32)),
        denoised(4),
    ),
    # Guidance makes each step two forward passes. Here each step has its own transformer.
    Foreign("Wan 2.2", wan_2_2, Counter({("denoise", 0): 8, ("denoise", 1): 8})),
    Foreign(
        "HunyuanVideo 1.5",
        denoiser(
            "HunyuanVideo15Transformer3DModel",
            {
                **SMALL,
                "num_refiner_layers": 1,
                "mlp_ratio": 2.0,
                "text_embed_dim": 16,
                "text_embed_2_dim": 8,
                "image_embed_dim": 12,
                "rope_axes_dim": (2, 2, 4),
                "target_size": 16,
                "task_type": "t2v",
            },
            lambda: {
                **video(frames=1),
                "encoder_attention_mask": mask(5, of=6),
                "encoder_hidden_states_2": noise(1, 4, 8),
                "encoder_attention_mask_2": mask(3, of=4),
                "image_embeds": torch.zeros(1, 3, 12),
            },
        ),
        denoised(3),
    ),
    Foreign(
        "Qwen-Image",
        denoiser(
            "QwenImageTransformer2DModel",
            {
                **SMALL,
                "in_channels": 16,
                "attention_head_dim": 16,
                "joint_attention_dim": 16,
                "axes_dims_rope": (8, 4, 4),
            },
            lambda: {
                "hidden_states": noise(2, 16, 16),
                "encoder_hidden_states": noise(2, 8, 16),
                "encoder_hidden_states_mask": mask(8, 5, of=8),
                "img_shapes": [(1, 4, 4)] * 2,
            },
        ),
        denoised(2),
    ),
    # In each block, video and sound attend to themselves, their texts and one another.
    Foreign(
        "LTX-2",
        denoiser(
            "LTX2VideoTransformer3DModel",
            {
                **SMALL,
                "cross_attention_dim": 16,
                "audio_in_channels": 4,
                "audio_out_channels": 4,
                "audio_num_attention_heads": 2,
                "audio_attention_head_dim": 4,
                "audio_cross_attention_dim": 8,
                "caption_channels": 16,
                "rope_double_precision": False,
            },
            lambda: {
                "hidden_states": noise(1, 32, 4),
                "audio_hidden_states": noise(1, 9, 4),
                "encoder_hidden_states": noise(1, 8, 16),
                "audio_encoder_hidden_states": noise(1, 8, 16),
                "encoder_attention_mask": mask(6, of=8),
                "num_frames": 2,
                "height": 4,
                "width": 4,
                "audio_num_frames": 9,
            },
        ),
        denoised(12),
    ),
    # The first layer is for the picture, the second for the text, and the third for both.
    Foreign(
        "Z-Image",
        denoiser(
            "ZImageTransformer2DModel",
            {
                "dim": 16,
                "n_layers": 1,
                "n_refiner_layers": 1,
                "n_heads": 1,
                "n_kv_heads": 1,
                "cap_feat_dim": 16,
                "axes_dims": [8, 4, 4],
                "axes_lens": [256, 32, 32],
            },
            lambda: {"x": [noise(16, 1, 8, 8)], "cap_feats": [noise(6, 16)]},
            time="t",
        ),
        denoised(3),
    ),
    Foreign("Stable Diffusion 3 with ControlNet", sd3_with_controlnet, denoised(3 + 2)),
    Foreign(
        "CogVideoX",
        denoiser(
            "CogVideoXTransformer3DModel",
            {
                **SMALL,
                "attention_head_dim": 16,
                "time_embed_dim": 8,
                "text_embed_dim": 16,
                "sample_width": 8,
                "sample_height": 8,
                "sample_frames": 5,
                "max_text_seq_length": 6,
            },
            lambda: {
                "hidden_states": noise(1, 2, 4, 8, 8),
                "encoder_hidden_states": noise(1, 6, 16),
            },
        ),
        denoised(2),
    ),
    # Attention to the picture is linear; only attention to the text uses softmax.
    Foreign(
        "SANA",
        denoiser(
            "SanaTransformer2DModel",
            {
                **SMALL,
                "attention_head_dim": 4,
                "num_cross_attention_heads": 2,
                "cross_attention_head_dim": 4,
                "cross_attention_dim": 8,
                "caption_channels": 8,
                "sample_size": 8,
            },
            lambda: {**image(), "encoder_attention_mask": mask(6, 3, of=6)},
        ),
        denoised(2),
    ),
    # A block makes one call per text, without padding; one more attention call pools the texts.
    Foreign(
        "Mochi",
        denoiser(
            "MochiTransformer3DModel",
            {
                **SMALL,
                "pooled_projection_dim": 16,
                "text_embed_dim": 16,
                "time_embed_dim": 4,
                "max_sequence_length": 8,
            },
            lambda: {
                "hidden_states": noise(2, 4, 2, 8, 8),
                "encoder_hidden_states": noise(2, 8, 16),
                "encoder_attention_mask": mask(8, 5, of=8),
            },
        ),
        denoised(2 * 2 + 1),
    ),
    # One layer down, one in the middle and two up attend to themselves and to the text.
    Foreign(
        "Stable Diffusion 1.5",
        denoiser(
            "UNet2DConditionModel",
            {
                "sample_size": 8,
                "block_out_channels": (8, 16),
                "layers_per_block": 1,
                "norm_num_groups": 4,
                "down_block_types": ("CrossAttnDownBlock2D", "DownBlock2D"),
                "up_block_types": ("UpBlock2D", "CrossAttnUpBlock2D"),
                "attention_head_dim": 2,
                "cross_attention_dim": 16,
            },
            lambda: {"sample": noise(1, 4, 8, 8), "encoder_hidden_states": noise(1, 6, 16)},
        ),
        denoised(8),
    ),
    # Each of two levels has one attention call down and one up.
    Foreign(
        "Stable Cascade",
        denoiser(
            "StableCascadeUNet",
            {
                "in_channels": 4,
                "out_channels": 4,
                "conditioning_dim": 16,
                "block_out_channels": (8, 16),
                "num_attention_heads": (2, 2),
                "down_num_layers_per_block": (1, 1),
                "up_num_layers_per_block": (1, 1),
                "clip_text_in_channels": 16,
                "clip_text_pooled_in_channels": 16,
                "clip_image_in_channels": 16,
                "switch_level": (False,),
            },
            lambda: {
                "sample": noise(1, 4, 8, 8),
                "clip_text_pooled": noise(1, 1, 16),
                "clip_text": noise(1, 6, 16),
                "clip_img": noise(1, 1, 16),
            },
            time="timestep_ratio",
        ),
        denoised(4),
    ),
]
