"""Denoisers of pictures, videos and sound, from diffusers."""

from __future__ import annotations

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
    """Return a mask (B, of) that is True for real tokens of each text, not padding."""
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
        inputs: the other arguments of its forward pass.
        time: the name of the time step, (B,).
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


FLUX = {
    "in_channels": 4,
    "num_layers": 2,
    "num_single_layers": 1,
    "attention_head_dim": 16,
    "num_attention_heads": 2,
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
UNET = {
    "sample_size": 8,
    "block_out_channels": (8, 16),
    "layers_per_block": 1,
    "norm_num_groups": 4,
    "down_block_types": ("CrossAttnDownBlock2D", "DownBlock2D"),
    "up_block_types": ("UpBlock2D", "CrossAttnUpBlock2D"),
    "attention_head_dim": 2,
    "cross_attention_dim": 16,
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


def of_size(inputs: dict[str, Any]) -> dict[str, Any]:
    sizes = {"original_size": [64, 64], "target_size": [64, 64], "crop_coords": [0, 0]}
    batch = len(inputs["hidden_states"])
    return {**inputs, **{name: torch.tensor([each] * batch) for name, each in sizes.items()}}


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


def hunyuan_dit_inputs() -> dict[str, Any]:
    return {
        **image(tokens=4),
        "text_embedding_mask": torch.ones(2, 4),
        "encoder_hidden_states_t5": noise(2, 4, 8),
        "text_embedding_mask_t5": torch.ones(2, 4),
        "image_meta_size": torch.tensor([[64.0, 64, 16, 16, 0, 0]] * 2),
        "style": torch.zeros(2, dtype=torch.long),
        "image_rotary_emb": (torch.ones(16, 8), torch.zeros(16, 8)),
    }


CASCADE: dict[str, Any] = {
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
}

MODELS = [
    Foreign("Flux", denoiser("FluxTransformer2DModel", FLUX, flux_inputs), denoised(3)),
    Foreign(
        "Flux (one block by FlexAttention)",
        denoiser("FluxTransformer2DModel", FLUX, flux_inputs, change=one_block_by_flex),
        denoised(3),
        frozenset({"sdpa", "diffusers"}),
    ),
    Foreign(
        "Flux 2",
        denoiser(
            "Flux2Transformer2DModel",
            {
                **{name: FLUX[name] for name in FLUX if name != "pooled_projection_dim"},
                "timestep_guidance_channels": 16,
                "axes_dims_rope": (4, 4, 4, 4),
            },
            lambda: {
                "hidden_states": noise(1, 16, 4),
                "encoder_hidden_states": noise(1, 8, 32),
                "img_ids": grid(1, 4, 4, 1)[None],
                "txt_ids": grid(1, 1, 1, 8)[None],
                "guidance": torch.ones(1),
            },
        ),
        denoised(3),
    ),
    Foreign(
        "Chroma",
        denoiser(
            "ChromaTransformer2DModel",
            {
                **{name: FLUX[name] for name in FLUX if name != "pooled_projection_dim"},
                "approximator_num_channels": 8,
                "approximator_hidden_dim": 16,
                "approximator_layers": 1,
            },
            lambda: {
                **{k: each for k, each in flux_inputs().items() if k != "pooled_projections"},
                "attention_mask": mask(21, of=24),
            },
        ),
        denoised(3),
    ),
    # Each block attends to itself and to the text.
    Foreign(
        "Wan 2.1",
        denoiser("WanTransformer3DModel", WAN, lambda: video(channels=16, text=32)),
        denoised(4),
    ),
    # With classifier-free guidance each step is two forward passes, here the first two of one
    # transformer and the first two of the other.
    Foreign("Wan 2.2", wan_2_2, Counter({("denoise", 0): 8, ("denoise", 1): 8})),
    Foreign(
        "HunyuanVideo",
        denoiser(
            "HunyuanVideoTransformer3DModel",
            {
                "in_channels": 4,
                "out_channels": 4,
                "num_attention_heads": 2,
                "attention_head_dim": 10,
                "num_layers": 1,
                "num_single_layers": 1,
                "num_refiner_layers": 1,
                "patch_size": 1,
                "text_embed_dim": 16,
                "pooled_projection_dim": 8,
                "rope_axes_dim": (2, 4, 4),
            },
            lambda: {
                **video(),
                "pooled_projections": noise(1, 8),
                "encoder_attention_mask": mask(4, of=6),
                "guidance": torch.full((1,), 6000.0),
            },
        ),
        denoised(3),
    ),
    Foreign(
        "HunyuanVideo 1.5",
        denoiser(
            "HunyuanVideo15Transformer3DModel",
            {
                "in_channels": 4,
                "out_channels": 4,
                "num_attention_heads": 2,
                "attention_head_dim": 8,
                "num_layers": 2,
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
                "in_channels": 16,
                "out_channels": 4,
                "num_layers": 2,
                "attention_head_dim": 16,
                "num_attention_heads": 2,
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
    Foreign(
        "LTX-Video",
        denoiser(
            "LTXVideoTransformer3DModel",
            {
                "in_channels": 4,
                "out_channels": 4,
                "num_attention_heads": 2,
                "attention_head_dim": 8,
                "cross_attention_dim": 16,
                "num_layers": 2,
                "caption_channels": 16,
            },
            lambda: {
                "hidden_states": noise(1, 32, 4),
                "encoder_hidden_states": noise(1, 8, 16),
                "encoder_attention_mask": mask(6, of=8),
                "num_frames": 2,
                "height": 4,
                "width": 4,
            },
        ),
        denoised(4),
    ),
    # Each block: video and sound attend to themselves, their texts and one another.
    Foreign(
        "LTX-2",
        denoiser(
            "LTX2VideoTransformer3DModel",
            {
                "in_channels": 4,
                "out_channels": 4,
                "num_attention_heads": 2,
                "attention_head_dim": 8,
                "cross_attention_dim": 16,
                "audio_in_channels": 4,
                "audio_out_channels": 4,
                "audio_num_attention_heads": 2,
                "audio_attention_head_dim": 4,
                "audio_cross_attention_dim": 8,
                "num_layers": 2,
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
    # One layer for the picture, one for the text, then one for both.
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
    Foreign(
        "Stable Diffusion 3",
        denoiser(
            "SD3Transformer2DModel",
            # A block with two attentions.
            {**SD3, "qk_norm": "rms_norm", "dual_attention_layers": (0,)},
            lambda: {**image(channels=8, text=32), "pooled_projections": noise(2, 64)},
        ),
        denoised(4),
    ),
    Foreign("Stable Diffusion 3 with ControlNet", sd3_with_controlnet, denoised(3 + 2)),
    # A block attends to itself and to the conditions.
    Foreign(
        "Stable Audio",
        denoiser(
            "StableAudioDiTModel",
            {
                "sample_size": 8,
                "in_channels": 4,
                "num_layers": 2,
                "attention_head_dim": 8,
                "num_attention_heads": 4,
                "num_key_value_attention_heads": 2,
                "out_channels": 4,
                "cross_attention_dim": 16,
                "time_proj_dim": 8,
                "global_states_input_dim": 8,
                "cross_attention_input_dim": 16,
            },
            lambda: {
                "hidden_states": noise(1, 4, 8),
                "encoder_hidden_states": noise(1, 5, 16),
                "global_hidden_states": noise(1, 1, 8),
                "rotary_embedding": (torch.ones(9, 4), torch.zeros(9, 4)),
            },
        ),
        denoised(4),
    ),
    Foreign(
        "CogVideoX",
        denoiser(
            "CogVideoXTransformer3DModel",
            {
                "num_attention_heads": 2,
                "attention_head_dim": 16,
                "in_channels": 4,
                "out_channels": 4,
                "time_embed_dim": 8,
                "text_embed_dim": 16,
                "num_layers": 2,
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
    *(
        Foreign(
            name,
            denoiser(
                kind,
                {
                    "in_channels": 4,
                    "num_layers": 2,
                    "attention_head_dim": 8,
                    "num_attention_heads": 2,
                    "out_channels": 4,
                    "text_embed_dim": 8,
                    "time_embed_dim": 8,
                    "condition_dim": 4,
                    **more,
                },
                lambda: of_size(image()),
            ),
            denoised(2),
        )
        for name, kind, more in (
            ("CogView 3+", "CogView3PlusTransformer2DModel", {"pos_embed_max_size": 8}),
            ("CogView 4", "CogView4Transformer2DModel", {"rope_axes_dim": (8, 8)}),
        )
    ),
    Foreign(
        "PixArt",
        denoiser(
            "PixArtTransformer2DModel",
            {
                "sample_size": 8,
                "num_layers": 2,
                "attention_head_dim": 4,
                "num_attention_heads": 2,
                "cross_attention_dim": 8,
                "caption_channels": 8,
                "use_additional_conditions": False,
            },
            lambda: {
                **image(),
                "encoder_attention_mask": mask(6, 3, of=6),
                "added_cond_kwargs": {"resolution": None, "aspect_ratio": None},
            },
        ),
        denoised(4),
    ),
    # A refining layer for the picture, one for the text, then both.
    Foreign(
        "Lumina 2",
        denoiser(
            "Lumina2Transformer2DModel",
            {
                "sample_size": 8,
                "in_channels": 4,
                "hidden_size": 24,
                "num_layers": 2,
                "num_refiner_layers": 1,
                "num_attention_heads": 3,
                "num_kv_heads": 1,
                "multiple_of": 2,
                "axes_dim_rope": (4, 2, 2),
                "axes_lens": (128, 128, 128),
                "cap_feat_dim": 8,
            },
            lambda: {**image(), "encoder_attention_mask": mask(6, 4, of=6)},
        ),
        denoised(4),
    ),
    # Attention to the picture is linear; only attention to the text uses softmax.
    Foreign(
        "SANA",
        denoiser(
            "SanaTransformer2DModel",
            {
                "in_channels": 4,
                "out_channels": 4,
                "num_layers": 2,
                "attention_head_dim": 4,
                "num_attention_heads": 2,
                "num_cross_attention_heads": 2,
                "cross_attention_head_dim": 4,
                "cross_attention_dim": 8,
                "caption_channels": 8,
                "sample_size": 8,
            },
            lambda: {**image(), "encoder_attention_mask": mask(6, 3, of=6)},
        ),
        denoised(2),
        unseen={"Attention": 4},
    ),
    Foreign(
        "AuraFlow",
        denoiser(
            "AuraFlowTransformer2DModel",
            {
                "sample_size": 8,
                "in_channels": 4,
                "num_mmdit_layers": 1,
                "num_single_dit_layers": 2,
                "attention_head_dim": 8,
                "num_attention_heads": 4,
                "caption_projection_dim": 32,
                "joint_attention_dim": 8,
                "out_channels": 4,
                "pos_embed_max_size": 16,
            },
            image,
        ),
        denoised(3),
    ),
    # A block attends to itself and to the text; one more attention pools the text of T5.
    Foreign(
        "Hunyuan-DiT",
        denoiser(
            "HunyuanDiT2DModel",
            {
                "sample_size": 8,
                "patch_size": 2,
                "in_channels": 4,
                "num_layers": 2,
                "attention_head_dim": 8,
                "num_attention_heads": 2,
                "cross_attention_dim": 8,
                "cross_attention_dim_t5": 8,
                "pooled_projection_dim": 4,
                "hidden_size": 16,
                "text_len": 4,
                "text_len_t5": 4,
                "activation_fn": "gelu-approximate",
            },
            hunyuan_dit_inputs,
        ),
        denoised(5),
    ),
    # A block makes one call per text, without padding; one more attention pools the texts.
    Foreign(
        "Mochi",
        denoiser(
            "MochiTransformer3DModel",
            {
                "num_attention_heads": 2,
                "attention_head_dim": 8,
                "num_layers": 2,
                "pooled_projection_dim": 16,
                "in_channels": 4,
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
    Foreign(
        "Allegro",
        denoiser(
            "AllegroTransformer3DModel",
            {
                "num_attention_heads": 2,
                "attention_head_dim": 24,
                "in_channels": 4,
                "out_channels": 4,
                "num_layers": 2,
                "cross_attention_dim": 48,
                "sample_width": 8,
                "sample_height": 8,
                "sample_frames": 8,
                "caption_channels": 16,
            },
            video,
        ),
        denoised(4),
    ),
    Foreign(
        "HiDream",
        denoiser(
            "HiDreamImageTransformer2DModel",
            {
                "patch_size": 2,
                "in_channels": 4,
                "out_channels": 4,
                "num_layers": 1,
                "num_single_layers": 1,
                "attention_head_dim": 8,
                "num_attention_heads": 4,
                "caption_channels": [8, 4],
                "text_emb_dim": 8,
                "num_routed_experts": 2,
                "num_activated_experts": 2,
                "axes_dims_rope": (4, 2, 2),
                "max_resolution": (32, 32),
                "llama_layers": (0, 1),
                "force_inference_output": True,
            },
            lambda: {
                "hidden_states": noise(2, 4, 8, 8),
                "encoder_hidden_states_t5": noise(2, 6, 8),
                "encoder_hidden_states_llama3": noise(2, 2, 6, 4),
                "pooled_embeds": noise(2, 8),
            },
            time="timesteps",
        ),
        denoised(2),
    ),
    # A block attends to itself and to the text, then to itself over time.
    Foreign(
        "Latte",
        denoiser(
            "LatteTransformer3DModel",
            {
                "sample_size": 8,
                "num_layers": 2,
                "patch_size": 2,
                "attention_head_dim": 4,
                "num_attention_heads": 2,
                "caption_channels": 16,
                "in_channels": 4,
                "cross_attention_dim": 8,
                "out_channels": 8,
                "num_embeds_ada_norm": 1000,
                "norm_type": "ada_norm_single",
                "norm_elementwise_affine": False,
                "video_length": 2,
            },
            video,
        ),
        denoised(6),
    ),
    Foreign(
        "EasyAnimate",
        denoiser(
            "EasyAnimateTransformer3DModel",
            {
                "attention_head_dim": 16,
                "num_attention_heads": 2,
                "in_channels": 4,
                "mmdit_layers": 2,
                "num_layers": 2,
                "out_channels": 4,
                "patch_size": 2,
                "text_embed_dim": 16,
                "time_embed_dim": 8,
            },
            video,
        ),
        denoised(2),
    ),
    Foreign(
        "Kandinsky 5",
        denoiser(
            "Kandinsky5Transformer3DModel",
            {
                "in_visual_dim": 4,
                "in_text_dim": 16,
                "in_text_dim2": 8,
                "time_dim": 16,
                "out_visual_dim": 4,
                "model_dim": 16,
                "ff_dim": 32,
                "num_text_blocks": 1,
                "num_visual_blocks": 2,
                "axes_dims": (4, 2, 2),
            },
            lambda: {
                "hidden_states": noise(1, 2, 8, 8, 4),
                "encoder_hidden_states": noise(1, 6, 16),
                "pooled_projections": noise(1, 8),
                "visual_rope_pos": [torch.arange(2), torch.arange(4), torch.arange(4)],
                "text_rope_pos": torch.arange(6),
            },
        ),
        # The text's block attends to itself; the other blocks also attend to the text.
        denoised(1 + 2 * 2),
    ),
    Foreign(
        "Kandinsky 2.2 prior",
        denoiser(
            "PriorTransformer",
            {
                "num_attention_heads": 2,
                "attention_head_dim": 4,
                "num_layers": 2,
                "embedding_dim": 8,
                "num_embeddings": 7,
            },
            lambda: {
                "hidden_states": noise(2, 8),
                "proj_embedding": noise(2, 8),
                "encoder_hidden_states": noise(2, 7, 8),
                "attention_mask": mask(7, 4, of=7),
            },
        ),
        denoised(2),
    ),
    # One layer down, one in the middle, two up, each attending to itself and to the text.
    Foreign(
        "Stable Diffusion 1.5",
        denoiser(
            "UNet2DConditionModel",
            UNET,
            lambda: {"sample": noise(1, 4, 8, 8), "encoder_hidden_states": noise(1, 6, 16)},
        ),
        denoised(8),
    ),
    # As above, but two blocks deep at the lower resolution, including the middle.
    Foreign(
        "Stable Diffusion XL",
        denoiser(
            "UNet2DConditionModel",
            {
                **UNET,
                "down_block_types": ("DownBlock2D", "CrossAttnDownBlock2D"),
                "up_block_types": ("CrossAttnUpBlock2D", "UpBlock2D"),
                "transformer_layers_per_block": (1, 2),
                "use_linear_projection": True,
                "addition_embed_type": "text_time",
                "addition_time_embed_dim": 8,
                "projection_class_embeddings_input_dim": 80,
            },
            lambda: {
                "sample": noise(1, 4, 8, 8),
                "encoder_hidden_states": noise(1, 6, 16),
                "added_cond_kwargs": {"text_embeds": noise(1, 32), "time_ids": torch.ones(1, 6)},
            },
        ),
        denoised(16),
    ),
    # Two levels, each with one attention down and one up.
    Foreign(
        "Stable Cascade",
        denoiser(
            "StableCascadeUNet",
            CASCADE,
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
