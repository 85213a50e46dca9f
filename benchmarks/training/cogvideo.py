"""Train the built-in CogVideoX to move captioned shapes: python -m benchmarks.training.cogvideo"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch
from diffusers import AutoencoderKLCogVideoX, CogVideoXPipeline, CogVideoXTransformer3DModel
from torch import Tensor, nn

from benchmarks.training import card, figures, judge, options, shapes
from benchmarks.training.autoencoder import Canvas, encode_scenes, reconstruct, train_autoencoder
from benchmarks.training.conditioning import draw_times, start_as_identity, token_ids
from benchmarks.training.loop import History, Stage, train
from benchmarks.training.optimisers import hidden_matrices, require_muon
from benchmarks.training.shapes import Scene
from models.built_in.cogvideo import VARIANTS, scheduler
from models.diffusion import tiny_t5
from models.offline_tokenizers import t5_tokenizer

VARIANT = VARIANTS["cogvideo"]
TEXT_TOKENS = 64
WITHOUT_CAPTION = 0.1  # share of training without caption, which guidance needs
LATENT_CHANNELS = 8
SHOWN = 16  # videos on the contact sheet, five frames each
FRAMES_PER_LATENT = 2
SNR_SHIFT = 50.0
"""Factor by which the schedule is noisier than Stable Diffusion's; CogVideoX-2b has 3.

A thing's place and motion show in thousands of latent values at once, so they are decided while the
noise is still a thousand times the signal. With 3, this phase is over after the first of ten steps,
and takes a tenth of the training.
"""


@dataclass(frozen=True)
class Scale:
    """Size of the run; ``runs`` are pairs of steps and guidance scale to judge."""

    canvas: Canvas
    autoencoder_batch: int
    autoencoder_crops: int
    bank: int
    bank_batch: int
    bank_seconds: float
    batch: int
    judged: int
    runs: tuple[tuple[int, float], ...]
    autoencoder: Stage
    transformer: Stage


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
    require_muon()
    torch.backends.cuda.enable_cudnn_sdp(False)  # benchmarks.training.flux explains why
    scale = SMOKE if given.smoke else FULL
    stages = given.limited([scale.autoencoder, scale.transformer])
    canvas, device, seed = scale.canvas, given.device, given.seed
    seen, held_out = shapes.split(shapes.videos())

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
    pipeline.vae.register_to_config(scaling_factor=1 / float(latents.float().std()))
    start_as_identity(pipeline.transformer)
    if given.compile:
        for block in pipeline.transformer.transformer_blocks:  # all share one compilation
            block.compile()
    second = train_transformer(stages[1], pipeline, latents, scenes, scale, given)
    pipeline.to(torch.bfloat16).save_pretrained(given.out)

    # From here on, use the saved model, loaded the way a user would load it.
    saved = CogVideoXPipeline.from_pretrained(given.out, dtype=torch.bfloat16).to(device)
    saved.set_progress_bar_config(disable=True)
    order = torch.randperm(len(held_out), generator=torch.Generator().manual_seed(seed)).tolist()
    wanted = [held_out[index] for index in order[: scale.judged]]
    rates: dict[str, dict[str, float]] = {}
    for steps, guidance in scale.runs:
        drawn = draw(saved, wanted, steps=steps, guidance=guidance, scale=scale, seed=seed)
        watched = judge.watch_all(drawn)
        rates[f"{steps} steps, guidance {guidance:g}"] = judge.rates(wanted, watched)
        print(rates, file=sys.stderr)
    decoded, psnr = reconstruct(saved.vae, canvas, wanted, device)
    rates["the autoencoder alone"] = judge.rates(wanted, judge.watch_all(decoded))
    rates["chance (the captions exchanged)"] = judge.chance(wanted, watched)
    data = (canvas.draw(wanted, seed, device).transpose(1, 2) / 2 + 0.5).cpu()
    rates["the data itself"] = judge.rates(wanted, judge.watch_all(data.unbind()))
    shown = range(min(SHOWN, len(wanted)))
    figures.contact_sheet(
        given.out / "samples.png",
        [list(drawn[index][:: max(1, canvas.frames // 4)][:, :, ::2, ::2]) for index in shown],
        [str(wanted[index]) for index in shown],
        columns=2,
    )
    figures.loss_curve(
        given.out / "loss.png",
        {"autoencoder": first.losses, "transformer": second.losses},
        "CogVideoX: error of the autoencoder, v-prediction loss of the transformer",
    )
    steps, guidance = scale.runs[-1]
    latent_frames = (canvas.frames - 1) // FRAMES_PER_LATENT + 1
    tokens = latent_frames * (canvas.height // 8) * (canvas.width // 8)
    card.write(
        given.out,
        "Built-in CogVideoX",
        {
            "What it is": (
                "A `CogVideoXPipeline` trained by `python -m benchmarks.training.cogvideo` to move "
                "a captioned shape in the captioned direction: transformer of 4 layers of 3 heads "
                f"of 64, over {TEXT_TOKENS} text and {tokens:,} video tokens; an autoencoder that "
                f"compresses {FRAMES_PER_LATENT}×4×4 pixels into {LATENT_CHANNELS} channels; a T5 "
                "encoder (2 layers, 64 wide), trained with the transformer. All captions look "
                f"like “{wanted[0]}”."
            ),
            "Data and licence": (
                f"Procedural videos of {canvas.frames} frames of {canvas.width}×{canvas.height} "
                f"pixels (`benchmarks/training/shapes.py`): {len(seen)} captions to "
                f"train, {len(held_out)} held out, {len(scenes):,} videos. "
                "Nothing was downloaded. Data and weights are under this package's licence."
            ),
            "Size": card.sizes(given.out),
            "Training": (
                f"{card.machine(device)}, seed {seed}. {first.describe(stages[0])}; batches of "
                f"{scale.autoencoder_crops} quarters of videos, then of "
                f"{scale.autoencoder_batch} full ones. {second.describe(stages[1])}; v-prediction "
                f"on the published noise schedule, but with snr_shift_scale {SNR_SHIFT:g} in place "
                f"of {VARIANT.snr_shift_scale:g}; batches of {scale.batch} videos, "
                f"{WITHOUT_CAPTION:.0%} without caption.\n\n![loss](loss.png)"
            ),
            "Measured": (
                f"{len(wanted)} held-out captions, bfloat16; how often what the caption says is "
                "seen by `benchmarks/training/judge.py`, which reads pixels and not the "
                "caption:\n\n"
                + card.rates_table(rates)
                + "\n\nA shape or texture counts only where a thing of its colour is seen; given "
                f"the colour, a guess gets {1 / len(shapes.SHAPES):.0%} of the shapes and "
                f"{1 / len(shapes.TEXTURES):.0%} of the textures. The autoencoder alone has PSNR "
                f"{psnr:.1f} dB on such videos. Below: "
                f"{steps} steps, guidance {guidance:g}, half size.\n\n![samples](samples.png)"
            ),
            "Limits": (
                f"It knows {len(shapes.words(seen + held_out))} words, four shapes, six colours "
                "and four directions. Shapes and textures come out wrong most often; its "
                "autoencoder blurs them too. It exists so that attention kernels can be judged on "
                "the inputs of a trained model without a download."
            ),
        },
    )
    print(f"{rates}; PSNR {psnr:.1f} dB; card in {given.out}")


def make_pipeline(scale: Scale) -> CogVideoXPipeline:
    """Build the architecture with new weights."""
    tokenizer = t5_tokenizer(shapes.words(shapes.pictures() + shapes.videos()))
    canvas = scale.canvas
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
            # Finer than published: those positions hardly differ over so few patches and frames.
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


def train_transformer(
    stage: Stage,
    pipeline: CogVideoXPipeline,
    latents: Tensor,
    scenes: Sequence[Scene],
    scale: Scale,
    given: options.Options,
) -> History:
    """Train to predict v = √ᾱ noise − √(1 − ᾱ) latent from √ᾱ latent + √(1 − ᾱ) noise."""
    device = given.device
    ids = token_ids(pipeline.tokenizer, [str(scene) for scene in scenes], TEXT_TOKENS).to(device)
    empty_ids = token_ids(pipeline.tokenizer, [""], TEXT_TOKENS).to(device)
    signal = pipeline.scheduler.alphas_cumprod.to(device, torch.float32)
    scaling = pipeline.vae.config.scaling_factor

    def loss(generator: torch.Generator, progress: float) -> Tensor:
        def uniform(end: int) -> Tensor:
            return torch.randint(end, (scale.batch,), generator=generator, device=device)

        batch = uniform(len(latents))
        time = draw_times(scale.batch, progress, generator, device)
        time = (time * len(signal)).long().clamp(max=len(signal) - 1)
        clean = latents[batch].float().transpose(1, 2) * scaling  # (B, T, C, H, W)
        noise = torch.randn(clean.shape, generator=generator, device=device)
        signal_scale = signal[time].sqrt()[:, None, None, None, None]
        noise_scale = (1 - signal[time]).sqrt()[:, None, None, None, None]
        is_unconditional = uniform(1000) < 1000 * WITHOUT_CAPTION
        captions = torch.where(is_unconditional[:, None], empty_ids, ids[batch])
        predicted = pipeline.transformer(
            hidden_states=signal_scale * clean + noise_scale * noise,
            encoder_hidden_states=pipeline.text_encoder(captions)[0],
            timestep=time,
        ).sample
        velocity = signal_scale * noise - noise_scale * clean
        return (predicted.float() - velocity).square().mean()

    trained = nn.ModuleList([pipeline.transformer, pipeline.text_encoder])
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
    pipeline: CogVideoXPipeline,
    scenes: Sequence[Scene],
    *,
    steps: int,
    guidance: float,
    scale: Scale,
    seed: int,
) -> list[Tensor]:
    """Draw a video (T, 3, H, W) in 0…1 for each caption."""
    drawn: list[Tensor] = []
    for start in range(0, len(scenes), 25):
        prompts = [str(scene) for scene in scenes[start : start + 25]]
        frames = pipeline(
            prompts,
            height=scale.canvas.height,
            width=scale.canvas.width,
            num_frames=scale.canvas.frames,
            num_inference_steps=steps,
            guidance_scale=guidance,
            max_sequence_length=TEXT_TOKENS,
            generator=torch.Generator().manual_seed(seed + start),
            output_type="pt",
        ).frames
        drawn += frames.float().cpu().unbind()
    return drawn


if __name__ == "__main__":
    main()
