"""Train the built-in Flux to draw captioned shapes: python -m benchmarks.training.flux"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from diffusers import (
    AutoencoderKL,
    FlowMatchEulerDiscreteScheduler,
    FluxPipeline,
    FluxTransformer2DModel,
)
from torch import Tensor, nn
from transformers import CLIPTextConfig, CLIPTextModel

from benchmarks.training import card, figures, judge, options, shapes
from benchmarks.training.autoencoder import Canvas, encode_scenes, reconstruct, train_autoencoder
from benchmarks.training.conditioning import draw_times, start_as_identity, token_ids
from benchmarks.training.loop import History, Stage, train
from benchmarks.training.optimisers import hidden_matrices, require_muon
from benchmarks.training.shapes import Scene
from models.built_in.flux import VARIANTS
from models.diffusion import tiny_t5
from models.offline_tokenizers import clip_tokenizer, t5_tokenizer

VARIANT = VARIANTS["flux"]
TEXT_TOKENS = 64
SHOWN = 24  # pictures on the contact sheet
SHIFT = 2.0
"""Logarithm of the factor on the schedule's odds of noise to signal; published: 0.5 to 1.15.

A thing's place shows in a thousand latent values at once, so it is decided while the noise is still
ten times the signal or more. With the published shift for so few tokens, this phase is over after
the first of twelve steps.
"""


@dataclass(frozen=True)
class Scale:
    """Size of the run."""

    side: int
    autoencoder_batch: int
    autoencoder_crops: int
    bank: int
    bank_batch: int
    bank_seconds: float
    batch: int
    judged: int
    steps: tuple[int, ...]
    autoencoder: Stage
    transformer: Stage


FULL = Scale(
    side=256,  # 64×64 latents in 32×32 = 1,024 tokens
    autoencoder_batch=32,
    autoencoder_crops=64,
    bank=60_000,
    bank_batch=128,
    bank_seconds=30,
    batch=128,
    judged=100,
    steps=(12, 28),
    autoencoder=Stage("flux autoencoder", steps=4000, seconds=70, learning_rate=2e-3),
    transformer=Stage("flux transformer", 12_000, 320, learning_rate=2e-3, muon_learning_rate=0.02),
)
SMOKE = Scale(
    side=32,
    autoencoder_batch=2,
    autoencoder_crops=4,
    bank=16,
    bank_batch=8,
    bank_seconds=10,
    batch=2,
    judged=4,
    steps=(2,),
    autoencoder=Stage("flux autoencoder", 8, 10, learning_rate=2e-3, average=0.5),
    transformer=Stage(
        "flux transformer", 6, 10, learning_rate=2e-3, average=0.5, muon_learning_rate=0.02
    ),
)


def main(arguments: list[str] | None = None) -> None:
    """Train, save, load, judge, and write the card."""
    given = options.parse("flux", __doc__, arguments)
    require_muon()
    # cuDNN's backward failed here on an H200 with torch 2.11 and cuDNN 9.19.0, inside the
    # transformer: "Expected mha_graph.execute(...).is_good()". The other backends work, and so does
    # cuDNN for contiguous tensors of the same shape.
    torch.backends.cuda.enable_cudnn_sdp(False)
    scale = SMOKE if given.smoke else FULL
    stages = given.limited([scale.autoencoder, scale.transformer])
    canvas = Canvas(scale.side, scale.side, frames=1)
    seen, held_out = shapes.split(shapes.pictures())
    device, seed = given.device, given.seed

    pipeline = make_pipeline(scale).to(device)
    first = train_autoencoder(
        stages[0],
        pipeline.vae,
        canvas,
        seen,
        batch=scale.autoencoder_batch,
        crops=scale.autoencoder_crops,
        work=given.work,
        seed=seed,
        device=device,
    )
    latents, scenes = encode_scenes(
        pipeline.vae,
        canvas,
        seen,
        count=scale.bank,
        batch=scale.bank_batch,
        seed=seed,
        device=device,
        seconds=scale.bank_seconds,
    )
    # Centred and of unit size, as the pipeline expects.
    pipeline.vae.register_to_config(
        shift_factor=float(latents.float().mean()), scaling_factor=1 / float(latents.float().std())
    )
    if given.compile:
        pipeline.transformer.compile()
    start_as_identity(pipeline.transformer)
    second = train_transformer(stages[1], pipeline, latents, scenes, scale, given)
    pipeline.to(torch.bfloat16).save_pretrained(given.out)

    # From here on, use the saved model, loaded the way a user would load it.
    saved = FluxPipeline.from_pretrained(given.out, dtype=torch.bfloat16).to(device)
    saved.set_progress_bar_config(disable=True)
    wanted = shapes.sample(held_out, scale.judged, torch.Generator().manual_seed(seed))
    rates: dict[str, dict[str, float]] = {}
    for steps in scale.steps:
        drawn = draw(saved, wanted, steps=steps, scale=scale, seed=seed)
        watched = judge.watch_all(drawn)
        rates[f"drawn in {steps} steps"] = judge.rates(wanted, watched)
        print(rates, file=sys.stderr)
    decoded, psnr = reconstruct(saved.vae, canvas, wanted, device)
    rates["the autoencoder alone"] = judge.rates(wanted, judge.watch_all(decoded))
    rates["chance (the captions exchanged)"] = judge.chance(wanted, watched)
    data = (canvas.draw(wanted, seed, device).transpose(1, 2) / 2 + 0.5).cpu()
    rates["the data itself"] = judge.rates(wanted, judge.watch_all(data.unbind()))
    shown = range(min(SHOWN, len(wanted)))
    figures.contact_sheet(
        given.out / "samples.png",
        [[drawn[index][0][:, ::2, ::2]] for index in shown],
        [str(wanted[index]) for index in shown],
        columns=4,
    )
    figures.loss_curve(
        given.out / "loss.png",
        {"autoencoder": first.losses, "transformer": second.losses},
        "Flux: error of the autoencoder, flow-matching loss of the transformer",
    )
    tokens = (scale.side // 8) ** 2
    card.write(
        given.out,
        "Built-in Flux",
        {
            "What it is": (
                "A `FluxPipeline` trained by `python -m benchmarks.training.flux` to draw "
                "captioned shapes: transformer of 1 double and 2 single blocks of 2 heads of 128, "
                f"over {TEXT_TOKENS} text and {tokens:,} image tokens; an autoencoder that "
                "compresses 4×4 pixels into 4 channels; a T5 encoder (2 layers, 64 wide) and a "
                "CLIP text model (2 layers, 64 wide), trained with the transformer. All captions "
                f"look like “{wanted[0]}”."
            ),
            "Data and licence": (
                f"Procedural pictures of {scale.side}×{scale.side} pixels "
                f"(`benchmarks/training/shapes.py`): {len(seen):,} captions to train, "
                f"{len(held_out):,} held out, {len(scenes):,} pictures. Nothing was "
                "downloaded. Data and weights are under this package's licence."
            ),
            "Size": card.sizes(given.out),
            "Training": (
                f"{card.machine(device)}, seed {seed}. {first.describe(stages[0])}; batches of "
                f"{scale.autoencoder_crops} parts of pictures, then of "
                f"{scale.autoencoder_batch} pictures. {second.describe(stages[1])}; flow "
                f"matching, the odds of noise to signal shifted by exp({SHIFT:g}), batches of "
                f"{scale.batch} pictures.\n\n![loss](loss.png)"
            ),
            "Measured": (
                f"{len(wanted)} pictures of {len(set(wanted))} held-out captions, bfloat16, "
                f"guidance {VARIANT.guidance_scale:g}; how often what the caption says is seen by "
                "`benchmarks/training/judge.py`, which reads pixels and not the caption:\n\n"
                + card.rates_table(rates)
                + "\n\nA shape or texture counts only where a thing of its colour is seen. The "
                + f"autoencoder alone has PSNR {psnr:.1f} dB on such pictures. Below: half "
                "size.\n\n![samples](samples.png)"
            ),
            "Limits": (
                f"It knows {len(shapes.words(seen + held_out))} words, four shapes and six "
                "colours. Circles and crosses are often out of shape. The guidance input was 3.5 "
                "throughout training: another value is untried. It exists so that attention "
                "kernels can be judged on the inputs of a trained model without a download."
            ),
        },
    )
    print(f"{rates}; PSNR {psnr:.1f} dB; card in {given.out}")


def make_pipeline(scale: Scale) -> FluxPipeline:
    """Build the architecture with new weights."""
    words = shapes.words(shapes.pictures() + shapes.videos())
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
            num_layers=1,
            num_single_layers=2,
            num_attention_heads=2,
            joint_attention_dim=64,
            pooled_projection_dim=64,
            **VARIANT.transformer,
        ),
        vae=AutoencoderKL(
            down_block_types=("DownEncoderBlock2D",) * 3,
            up_block_types=("UpDecoderBlock2D",) * 3,
            block_out_channels=(16, 32, 32),
            norm_num_groups=8,
            latent_channels=4,  # packed 2×2 into the transformer's 16 channels
            use_quant_conv=False,
            use_post_quant_conv=False,
            sample_size=scale.side,
            shift_factor=0.0,
            scaling_factor=1.0,
        ),
        scheduler=FlowMatchEulerDiscreteScheduler(
            **VARIANT.scheduler, base_shift=SHIFT, max_shift=SHIFT
        ),
    )


def train_transformer(
    stage: Stage,
    pipeline: FluxPipeline,
    latents: Tensor,
    scenes: Sequence[Scene],
    scale: Scale,
    given: options.Options,
) -> History:
    """Train by flow matching: predict noise − latent from (1 − t) latent + t noise."""
    device = given.device
    captions = [str(scene) for scene in scenes]
    t5_ids = token_ids(pipeline.tokenizer_2, captions, TEXT_TOKENS).to(device)
    clip_ids = token_ids(pipeline.tokenizer, captions, 77).to(device)
    side = latents.shape[-1] // 2
    image_ids = pipeline._prepare_latent_image_ids(1, side, side, device, torch.float32)
    text_ids = torch.zeros(TEXT_TOKENS, 3, device=device)
    config = pipeline.vae.config

    def loss(generator: torch.Generator, progress: float) -> Tensor:
        batch = torch.randint(len(latents), (scale.batch,), generator=generator, device=device)
        clean = (latents[batch].float() - config.shift_factor) * config.scaling_factor
        clean = pipeline._pack_latents(clean, *clean.shape)
        noise = torch.randn(clean.shape, generator=generator, device=device)
        # Shifted, as in the pipeline.
        time = draw_times(scale.batch, progress, generator, device)
        sigma = torch.sigmoid(time.logit(1e-4) + SHIFT)
        mixed = torch.lerp(clean, noise, sigma[:, None, None])
        predicted = pipeline.transformer(
            hidden_states=mixed,
            timestep=sigma,
            guidance=torch.full_like(sigma, VARIANT.guidance_scale),
            pooled_projections=pipeline.text_encoder(clip_ids[batch]).pooler_output,
            encoder_hidden_states=pipeline.text_encoder_2(t5_ids[batch])[0],
            txt_ids=text_ids,
            img_ids=image_ids,
        ).sample
        return (predicted.float() - (noise - clean)).square().mean()

    trained = nn.ModuleList([pipeline.transformer, pipeline.text_encoder, pipeline.text_encoder_2])
    return train(
        stage,
        trained,
        loss,
        work=given.work,
        seed=given.seed,
        device=device,
        matrices=hidden_matrices(*trained),
    )


@torch.no_grad()
def draw(
    pipeline: FluxPipeline, scenes: Sequence[Scene], *, steps: int, scale: Scale, seed: int
) -> list[Tensor]:
    """Draw a picture (1, 3, H, W) in 0…1 for each caption."""
    drawn: list[Tensor] = []
    for start in range(0, len(scenes), 25):
        prompts = [str(scene) for scene in scenes[start : start + 25]]
        images = pipeline(
            prompts,
            height=scale.side,
            width=scale.side,
            num_inference_steps=steps,
            guidance_scale=VARIANT.guidance_scale,
            max_sequence_length=TEXT_TOKENS,
            generator=torch.Generator().manual_seed(seed + start),
            output_type="pt",
        ).images
        drawn += images.float().cpu()[:, None].unbind()
    return drawn


if __name__ == "__main__":
    main()
