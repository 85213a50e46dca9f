"""The run that the picture and the video model share: train, save, load, judge, write the card."""

from __future__ import annotations

import argparse
import sys
from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from diffusers import DiffusionPipeline
from torch import Tensor, nn

from benchmarks.training import card, figures, judge, shapes
from benchmarks.training.autoencoder import Canvas, encode_scenes, reconstruct, train_autoencoder
from benchmarks.training.conditioning import start_as_identity
from benchmarks.training.loop import Loss, Stage, train
from benchmarks.training.optimisers import hidden_matrices, require_muon
from benchmarks.training.shapes import Scene

TEXT_TOKENS = 64


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


class Model(ABC):
    """Parts of the run that differ between the two models."""

    title: str
    """Name in the card and in the figures."""
    medium: str
    """``pictures`` or ``videos``."""
    scenes: list[Scene]
    encoders: tuple[str, ...]
    """Names of the text encoders, which are trained with the transformer."""
    loss_name: str
    shown: tuple[int, int]
    """Numbers of samples and of columns on the contact sheet."""

    @abstractmethod
    def build(self, canvas: Canvas) -> DiffusionPipeline:
        """Build the architecture with new weights."""

    @abstractmethod
    def normalise(self, latents: Tensor) -> dict[str, float]:
        """Return the autoencoder's settings that scale its latents."""

    @abstractmethod
    def loss(
        self, pipeline: DiffusionPipeline, latents: Tensor, captions: list[str], batch: int
    ) -> Loss:
        """Return the transformer's loss on ``batch`` latents and their captions."""

    @abstractmethod
    def wanted(self, held_out: list[Scene], count: int, generator: torch.Generator) -> list[Scene]:
        """Draw scenes to judge."""

    @abstractmethod
    def sentences(self, canvas: Canvas) -> dict[str, str]:
        """Return the card's sentences about this model only, by section."""


def run(model: Model, scale: Scale, given: argparse.Namespace) -> None:
    """Train, save, load, judge, and write the card."""
    require_muon()
    # cuDNN's backward failed here on an H200 with torch 2.11 and cuDNN 9.19.0, inside Flux's
    # transformer: "Expected mha_graph.execute(...).is_good()". The other backends work, and so does
    # cuDNN for contiguous tensors of the same shape.
    torch.backends.cuda.enable_cudnn_sdp(False)
    canvas, device, seed = scale.canvas, given.device, given.seed
    seen, held_out = shapes.split(model.scenes)
    pipeline = model.build(canvas).to(device)
    first = train_autoencoder(
        scale.autoencoder,
        pipeline.vae,
        canvas,
        seen,
        batch=scale.autoencoder_batch,
        crops=scale.autoencoder_crops,
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
    pipeline.vae.register_to_config(**model.normalise(latents.float()))
    start_as_identity(pipeline.transformer)
    trained = nn.ModuleList(
        [pipeline.transformer, *(getattr(pipeline, name) for name in model.encoders)]
    )
    second = train(
        scale.transformer,
        trained,
        model.loss(pipeline, latents, [str(scene) for scene in scenes], scale.batch),
        seed=seed,
        device=device,
        matrices=hidden_matrices(*trained),
    )
    pipeline.to(torch.bfloat16).save_pretrained(given.out)

    # From here on, use the saved model, loaded the way a user would load it.
    saved = type(pipeline).from_pretrained(given.out, dtype=torch.bfloat16).to(device)
    saved.set_progress_bar_config(disable=True)
    wanted = model.wanted(held_out, scale.judged, torch.Generator().manual_seed(seed))
    rates: dict[str, dict[str, float]] = {}
    for steps, guidance in scale.runs:
        drawn = draw(saved, wanted, canvas, steps=steps, guidance=guidance, seed=seed)
        watched = judge.watch_all(drawn)
        rates[f"{steps} steps, guidance {guidance:g}"] = judge.rates(wanted, watched)
        print(rates, file=sys.stderr)
    decoded, psnr = reconstruct(saved.vae, canvas, wanted, device)
    rates["the autoencoder alone"] = judge.rates(wanted, judge.watch_all(decoded))
    rates["chance (the captions exchanged)"] = judge.chance(wanted, watched)
    data = (canvas.draw(wanted, seed, device).transpose(1, 2) / 2 + 0.5).cpu()
    rates["the data itself"] = judge.rates(wanted, judge.watch_all(data.unbind()))
    count, columns = model.shown
    every = max(1, canvas.frames // 4)
    figures.contact_sheet(
        given.out / "samples.png",
        [list(sample[::every, :, ::2, ::2]) for sample in drawn[:count]],
        [str(scene) for scene in wanted[:count]],
        columns=columns,
    )
    figures.loss_curve(
        given.out / "loss.png",
        {"autoencoder": first.losses, "transformer": second.losses},
        f"{model.title}: error of the autoencoder, {model.loss_name} loss of the transformer",
    )
    frames = f"{canvas.frames} frames of " if canvas.frames > 1 else ""
    steps, guidance = scale.runs[-1]
    own = model.sentences(canvas)
    card.write(
        given.out,
        f"Built-in {model.title}",
        {
            "What it is": f"{own['What it is']} All captions look like “{wanted[0]}”.",
            "Data and licence": (
                f"Procedural {model.medium} of {frames}{canvas.width}×{canvas.height} pixels "
                f"(`benchmarks/training/shapes.py`): {len(seen):,} captions to train, "
                f"{len(held_out):,} held out, {len(scenes):,} {model.medium}. Nothing was "
                "downloaded. Data and weights are under this package's licence."
            ),
            "Size": card.sizes(given.out),
            "Training": (
                f"{card.machine(device)}, seed {seed}. {first.describe(scale.autoencoder)}; "
                f"batches of {scale.autoencoder_crops} quarters of {model.medium}, then of "
                f"{scale.autoencoder_batch} full ones. {second.describe(scale.transformer)}; "
                f"batches of {scale.batch}; {own['Training']}\n\n![loss](loss.png)"
            ),
            "Measured": (
                f"{len(wanted)} {model.medium} of {len(set(wanted))} held-out captions, bfloat16; "
                "how often the caption is true according to `benchmarks/training/judge.py`, which "
                "reads the pixels and not the caption:\n\n"
                + card.rates_table(rates)
                + "\n\nA shape or texture counts only where a thing of its colour is seen; given "
                f"the colour, a guess gets {1 / len(shapes.SHAPES):.0%} of the shapes and "
                f"{1 / len(shapes.TEXTURES):.0%} of the textures. The autoencoder alone has PSNR "
                f"{psnr:.1f} dB on such {model.medium}. Below: {steps} steps, guidance "
                f"{guidance:g}, half size.\n\n![samples](samples.png)"
            ),
            "Limits": (
                f"It knows {len(shapes.words(model.scenes))} words of captions. {own['Limits']} It "
                "exists so that attention kernels can be judged on the inputs of a trained model "
                "without a download."
            ),
        },
    )
    print(f"{rates}; PSNR {psnr:.1f} dB; card in {given.out}")


@torch.no_grad()
def draw(
    pipeline: DiffusionPipeline,
    scenes: Sequence[Scene],
    canvas: Canvas,
    *,
    steps: int,
    guidance: float,
    seed: int,
) -> list[Tensor]:
    """Draw a picture or a video (T, 3, H, W) in 0…1 for each caption."""
    length: dict[str, Any] = {"num_frames": canvas.frames} if canvas.frames > 1 else {}
    drawn: list[Tensor] = []
    for start in range(0, len(scenes), 25):
        prompts = [str(scene) for scene in scenes[start : start + 25]]
        made = pipeline(
            prompts,
            height=canvas.height,
            width=canvas.width,
            num_inference_steps=steps,
            guidance_scale=guidance,
            max_sequence_length=TEXT_TOKENS,
            generator=torch.Generator().manual_seed(seed + start),
            output_type="pt",
            **length,
        )[0]
        drawn += made.float().cpu().view(len(prompts), canvas.frames, *made.shape[-3:]).unbind()
    return drawn
