"""Train the built-in Flux to draw captioned shapes: python -m benchmarks.training.flux"""

from __future__ import annotations

import torch
from diffusers import FluxPipeline
from torch import Tensor

from benchmarks.training import captioned, options, shapes
from benchmarks.training.autoencoder import Canvas
from benchmarks.training.captioned import TEXT_TOKENS, Scale
from benchmarks.training.conditioning import draw_times, token_ids
from benchmarks.training.loop import Loss, Stage
from benchmarks.training.shapes import Scene
from models.built_in.flux import VARIANTS, small_pipeline

VARIANT = VARIANTS["flux"]
SHIFT = 2.0
"""Logarithm of the factor on the schedule's odds of noise to signal (published: 0.5 to 1.15).

A thing's place shows in a thousand latent values at once, so it is decided while the noise is still
ten times the signal or more. With the published shift for so few tokens, this phase is over after
the first of twelve steps.
"""


FULL = Scale(
    canvas=Canvas(256, 256, frames=1),  # 64×64 latents in 32×32 = 1,024 tokens
    autoencoder_batch=32,
    autoencoder_crops=64,
    bank=60_000,
    bank_batch=128,
    bank_seconds=30,
    batch=128,
    judged=100,
    runs=((12, VARIANT.guidance_scale), (28, VARIANT.guidance_scale)),
    autoencoder=Stage("flux autoencoder", steps=4000, seconds=70, learning_rate=2e-3),
    transformer=Stage("flux transformer", 12_000, 320, learning_rate=2e-3, muon_learning_rate=0.02),
)
SMOKE = Scale(
    canvas=Canvas(32, 32, frames=1),
    autoencoder_batch=2,
    autoencoder_crops=4,
    bank=16,
    bank_batch=8,
    bank_seconds=10,
    batch=2,
    judged=4,
    runs=((2, VARIANT.guidance_scale),),
    autoencoder=Stage("flux autoencoder", 8, 10, learning_rate=2e-3, average=0.5),
    transformer=Stage(
        "flux transformer", 6, 10, learning_rate=2e-3, average=0.5, muon_learning_rate=0.02
    ),
)


def main(arguments: list[str] | None = None) -> None:
    """Train, save, load, judge, and write the card."""
    given = options.parse("flux", __doc__, arguments)
    captioned.run(Flux(), SMOKE if given.smoke else FULL, given)


class Flux(captioned.Model):
    title = "Flux"
    medium = "pictures"
    scenes = shapes.pictures()
    encoders = ("text_encoder", "text_encoder_2")
    loss_name = "flow-matching"
    shown = 24, 4

    def build(self, canvas: Canvas) -> FluxPipeline:
        return small_pipeline(
            VARIANT,
            layers=(1, 2),
            vae_channels=(16, 32, 32),
            vae={
                "norm_num_groups": 8,
                "sample_size": canvas.height,
                "shift_factor": 0.0,
                "scaling_factor": 1.0,
            },
            scheduler={"base_shift": SHIFT, "max_shift": SHIFT},
            words=shapes.words(shapes.pictures() + shapes.videos()),
        )

    def normalise(self, latents: Tensor) -> dict[str, float]:
        # Centred and of unit size, as the pipeline expects.
        return {"shift_factor": float(latents.mean()), "scaling_factor": 1 / float(latents.std())}

    def loss(
        self, pipeline: FluxPipeline, latents: Tensor, captions: list[str], batch: int
    ) -> Loss:
        """Match the flow: predict noise − latent from (1 − t) latent + t noise."""
        device = latents.device
        t5_ids = token_ids(pipeline.tokenizer_2, captions, TEXT_TOKENS).to(device)
        clip_ids = token_ids(pipeline.tokenizer, captions, 77).to(device)
        side = latents.shape[-1] // 2
        image_ids = pipeline._prepare_latent_image_ids(1, side, side, device, torch.float32)
        text_ids = torch.zeros(TEXT_TOKENS, 3, device=device)
        config = pipeline.vae.config

        def loss(generator: torch.Generator, progress: float) -> Tensor:
            chosen = torch.randint(len(latents), (batch,), generator=generator, device=device)
            clean = (latents[chosen].float() - config.shift_factor) * config.scaling_factor
            clean = pipeline._pack_latents(clean, *clean.shape)
            noise = torch.randn(clean.shape, generator=generator, device=device)
            # The noise level is shifted as in the pipeline.
            time = draw_times(batch, progress, generator, device)
            sigma = torch.sigmoid(time.logit(1e-4) + SHIFT)
            predicted = pipeline.transformer(
                hidden_states=torch.lerp(clean, noise, sigma[:, None, None]),
                timestep=sigma,
                guidance=torch.full_like(sigma, VARIANT.guidance_scale),
                pooled_projections=pipeline.text_encoder(clip_ids[chosen]).pooler_output,
                encoder_hidden_states=pipeline.text_encoder_2(t5_ids[chosen])[0],
                txt_ids=text_ids,
                img_ids=image_ids,
            ).sample
            return (predicted.float() - (noise - clean)).square().mean()

        return loss

    def wanted(self, held_out: list[Scene], count: int, generator: torch.Generator) -> list[Scene]:
        return shapes.sample(held_out, count, generator)

    def sentences(self, canvas: Canvas) -> dict[str, str]:
        tokens = (canvas.height // 8) ** 2
        return {
            "What it is": (
                "A `FluxPipeline` trained by `python -m benchmarks.training.flux` to draw "
                "captioned shapes: transformer of 1 double and 2 single blocks of 2 heads of 128, "
                f"over {TEXT_TOKENS} text and {tokens:,} image tokens; an autoencoder that "
                "compresses 4×4 pixels into 4 channels; a T5 encoder (2 layers, 64 wide) and a "
                "CLIP text model (2 layers, 64 wide), trained with the transformer."
            ),
            "Training": f"flow matching, the odds of noise to signal shifted by exp({SHIFT:g}).",
            "Limits": (
                "Circles and crosses are often out of shape. The guidance input was "
                f"{VARIANT.guidance_scale:g} throughout training: another value is untried."
            ),
        }


if __name__ == "__main__":
    main()
