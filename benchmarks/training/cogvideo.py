"""Train the built-in CogVideoX to move captioned shapes: python -m benchmarks.training.cogvideo"""

from __future__ import annotations

from dataclasses import replace

import torch
from diffusers import AutoencoderKLCogVideoX, CogVideoXPipeline, CogVideoXTransformer3DModel
from torch import Tensor

from benchmarks.training import captioned, options, shapes
from benchmarks.training.autoencoder import Canvas
from benchmarks.training.captioned import TEXT_TOKENS, Scale
from benchmarks.training.conditioning import draw_times, token_ids
from benchmarks.training.loop import Loss, Stage
from benchmarks.training.shapes import Scene
from models.built_in.cogvideo import VARIANTS, scheduler
from models.diffusion import tiny_t5
from models.offline_tokenizers import t5_tokenizer

VARIANT = VARIANTS["cogvideo"]
WITHOUT_CAPTION = 0.1  # share of training without caption, which guidance needs
LATENT_CHANNELS = 8
FRAMES_PER_LATENT = 2
SNR_SHIFT = 50.0
"""Factor by which the schedule is noisier than Stable Diffusion's; CogVideoX-2b has 3.

A thing's place and motion show in thousands of latent values at once, so they are decided while the
noise is still a thousand times the signal. With a factor of 3, this phase is over after the first
of ten steps, and takes a tenth of the training.
"""


FULL = Scale(
    canvas=Canvas(160, 192, frames=9),  # 5·40·48 latents in 5·20·24 = 2,400 tokens
    autoencoder_batch=12,
    autoencoder_crops=32,
    bank=24_000,
    bank_batch=32,
    bank_seconds=20,
    batch=32,
    judged=100,
    runs=((10, 1.0), (6, 6.0), (10, 6.0), (20, 3.0), (10, 3.0)),
    autoencoder=Stage("cogvideo autoencoder", steps=4000, seconds=125, learning_rate=2e-3),
    transformer=Stage(
        "cogvideo transformer", 20_000, 265, learning_rate=2e-3, muon_learning_rate=0.02
    ),
)
SMOKE = Scale(
    canvas=Canvas(32, 32, frames=9),
    autoencoder_batch=1,
    autoencoder_crops=2,
    bank=8,
    bank_batch=4,
    bank_seconds=10,
    batch=2,
    judged=2,
    runs=((2, 3.0),),
    autoencoder=Stage("cogvideo autoencoder", 6, 10, learning_rate=2e-3, average=0.5),
    transformer=Stage(
        "cogvideo transformer", 8, 10, learning_rate=2e-3, average=0.5, muon_learning_rate=0.02
    ),
)


def main(arguments: list[str] | None = None) -> None:
    """Train, save, load, judge, and write the card."""
    given = options.parse("cogvideo", __doc__, arguments)
    captioned.run(CogVideoX(), SMOKE if given.smoke else FULL, given)


class CogVideoX(captioned.Model):
    title = "CogVideoX"
    medium = "videos"
    scenes = shapes.videos()
    encoders = ("text_encoder",)
    loss_name = "v-prediction"
    shown = 16, 2

    def build(self, canvas: Canvas) -> CogVideoXPipeline:
        tokenizer = t5_tokenizer(shapes.words(shapes.pictures() + shapes.videos()))
        return CogVideoXPipeline(
            tokenizer=tokenizer,
            text_encoder=tiny_t5(len(tokenizer)),
            transformer=CogVideoXTransformer3DModel(
                num_attention_heads=3,
                num_layers=4,
                in_channels=LATENT_CHANNELS,
                out_channels=LATENT_CHANNELS,
                time_embed_dim=32,
                text_embed_dim=64,
                max_text_seq_length=TEXT_TOKENS,
                sample_width=canvas.width // 4,
                sample_height=canvas.height // 4,
                sample_frames=canvas.frames,
                temporal_compression_ratio=FRAMES_PER_LATENT,
                # Finer than published, as those positions hardly differ over so few patches.
                spatial_interpolation_scale=0.25,
                temporal_interpolation_scale=0.0625,
            ),
            vae=AutoencoderKLCogVideoX(
                down_block_types=("CogVideoXDownBlock3D",) * 3,
                up_block_types=("CogVideoXUpBlock3D",) * 3,
                block_out_channels=(16, 16, 32),
                latent_channels=LATENT_CHANNELS,
                layers_per_block=1,
                norm_num_groups=8,
                temporal_compression_ratio=FRAMES_PER_LATENT,
                sample_height=canvas.height,
                sample_width=canvas.width,
                scaling_factor=1.0,
            ),
            scheduler=scheduler(replace(VARIANT, snr_shift_scale=SNR_SHIFT)),
        )

    def normalise(self, latents: Tensor) -> dict[str, float]:
        return {"scaling_factor": 1 / float(latents.std())}

    def loss(
        self, pipeline: CogVideoXPipeline, latents: Tensor, captions: list[str], batch: int
    ) -> Loss:
        """Predict v = √ᾱ noise − √(1 − ᾱ) latent from √ᾱ latent + √(1 − ᾱ) noise."""
        device = latents.device
        ids = token_ids(pipeline.tokenizer, captions, TEXT_TOKENS).to(device)
        empty_ids = token_ids(pipeline.tokenizer, [""], TEXT_TOKENS).to(device)
        signal = pipeline.scheduler.alphas_cumprod.to(device, torch.float32)
        scaling = pipeline.vae.config.scaling_factor

        def loss(generator: torch.Generator, progress: float) -> Tensor:
            def uniform(end: int) -> Tensor:
                return torch.randint(end, (batch,), generator=generator, device=device)

            chosen = uniform(len(latents))
            time = draw_times(batch, progress, generator, device)
            time = (time * len(signal)).long().clamp(max=len(signal) - 1)
            clean = latents[chosen].float().transpose(1, 2) * scaling  # (B, T, C, H, W)
            noise = torch.randn(clean.shape, generator=generator, device=device)
            signal_scale = signal[time].sqrt()[:, None, None, None, None]
            noise_scale = (1 - signal[time]).sqrt()[:, None, None, None, None]
            is_unconditional = uniform(1000) < 1000 * WITHOUT_CAPTION
            predicted = pipeline.transformer(
                hidden_states=signal_scale * clean + noise_scale * noise,
                encoder_hidden_states=pipeline.text_encoder(
                    torch.where(is_unconditional[:, None], empty_ids, ids[chosen])
                )[0],
                timestep=time,
            ).sample
            velocity = signal_scale * noise - noise_scale * clean
            return (predicted.float() - velocity).square().mean()

        return loss

    def wanted(self, held_out: list[Scene], count: int, generator: torch.Generator) -> list[Scene]:
        order = torch.randperm(len(held_out), generator=generator).tolist()
        return [held_out[index] for index in order[:count]]

    def sentences(self, canvas: Canvas) -> dict[str, str]:
        latent_frames = (canvas.frames - 1) // FRAMES_PER_LATENT + 1
        tokens = latent_frames * (canvas.height // 8) * (canvas.width // 8)
        return {
            "What it is": (
                "A `CogVideoXPipeline` trained by `python -m benchmarks.training.cogvideo` to move "
                "a captioned shape in the captioned direction: transformer of 4 layers of 3 heads "
                f"of 64, over {TEXT_TOKENS} text and {tokens:,} video tokens; an autoencoder that "
                f"compresses {FRAMES_PER_LATENT}×4×4 pixels into {LATENT_CHANNELS} channels; a T5 "
                "encoder (2 layers, 64 wide), trained with the transformer."
            ),
            "Training": (
                "v-prediction on the published noise schedule, but with snr_shift_scale "
                f"{SNR_SHIFT:g} in place of {VARIANT.snr_shift_scale:g}; {WITHOUT_CAPTION:.0%} of "
                "the videos without caption."
            ),
            "Limits": (
                "Shapes and textures come out wrong most often; its autoencoder blurs them too."
            ),
        }


if __name__ == "__main__":
    main()
