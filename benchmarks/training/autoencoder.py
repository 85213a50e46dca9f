"""The first stage for pictures and videos: an autoencoder, and a bank of encoded scenes."""

from __future__ import annotations

import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from benchmarks.training import shapes
from benchmarks.training.loop import History, Stage, train
from benchmarks.training.shapes import Scene

DIVERGENCE = 5e-4  # weight of the KL term per latent value: gives latents of about unit size
CROPPED = 0.5  # share of the time spent on crops of half the side
EMPHASIS = 3.0  # weight of coloured pixels, which are few but all that captions describe


@dataclass(frozen=True)
class Canvas:
    """Size of the drawn pictures or videos; ``frames`` is 1 for pictures."""

    height: int
    width: int
    frames: int

    def draw(self, scenes: Sequence[Scene], seed: int, device: torch.device) -> Tensor:
        """Draw (B, 3, frames, H, W) in −1…1, the layout and range of a video autoencoder."""
        drawn = shapes.render(
            scenes,
            height=self.height,
            width=self.width,
            frames=self.frames,
            generator=torch.Generator().manual_seed(seed),
            device=device,
        )
        return 2 * drawn.transpose(1, 2) - 1


def train_autoencoder(
    stage: Stage,
    autoencoder: nn.Module,
    canvas: Canvas,
    scenes: Sequence[Scene],
    *,
    batch: int,
    crops: int,
    seed: int,
    device: torch.device,
) -> History:
    """Minimise the reconstruction error, with a small weight on the KL divergence.

    Training starts on crops of ``crops`` scenes per batch, because learning colours takes many
    things, and continues on ``batch`` full scenes. The error is the absolute error, for sharp
    edges, plus the squared error, for colours: with the absolute error alone, training can stall at
    pictures without things, because grey is the median of the things' colours.
    """
    flat = canvas.frames == 1

    def loss(generator: torch.Generator, progress: float) -> Tensor:
        cropped = progress < CROPPED
        drawn_seed = generator.initial_seed()  # avoids a read from the GPU
        chosen = shapes.sample(
            scenes, crops if cropped else batch, torch.Generator().manual_seed(drawn_seed)
        )
        clip = canvas.draw(chosen, drawn_seed, device)
        if cropped:
            height, width = canvas.height // 2, canvas.width // 2
            top, left = drawn_seed % 5 * height // 4, drawn_seed // 5 % 5 * width // 4
            clip = clip[..., top : top + height, left : left + width].contiguous()
        if flat:
            clip = clip[:, :, 0]
        posterior = autoencoder.encode(clip).latent_dist  # type: ignore[operator]
        noise = torch.randn(posterior.mean.shape, generator=generator, device=device)
        decoded = autoencoder.decode(posterior.mean + posterior.std * noise)  # type: ignore[operator]
        divergence = posterior.mean.square() + posterior.var - 1 - posterior.logvar
        error = decoded.sample - clip
        saturation = clip.amax(1, keepdim=True) - clip.amin(1, keepdim=True)
        weighted: Tensor = (1 + EMPHASIS * saturation) * (error.abs() + error.square())
        return weighted.mean() + DIVERGENCE * 0.5 * divergence.mean()

    # cuDNN tries its algorithms, because sizes are few and its first choice may be slow on narrow
    # convolutions.
    with torch.backends.cudnn.flags(enabled=True, benchmark=True):
        return train(stage, autoencoder, loss, seed=seed, device=device)


@torch.no_grad()
def encode_scenes(
    autoencoder: nn.Module,
    canvas: Canvas,
    scenes: Sequence[Scene],
    *,
    count: int,
    batch: int,
    seed: int,
    device: torch.device,
    seconds: float,
) -> tuple[Tensor, list[Scene]]:
    """Encode ``count`` drawn scenes, or as many as ``seconds`` allow.

    Returns:
        Latents in the autoencoder's layout, bfloat16 on a GPU, and their scenes.
    """
    started = time.monotonic()
    latents: list[Tensor] = []
    drawn: list[Scene] = []
    while len(drawn) < count and (not drawn or time.monotonic() - started < seconds):
        number = min(batch, count - len(drawn))
        batch_seed = seed * 1_000_003 + len(drawn) + (1 << 41)  # distinct from training's seeds
        chosen = shapes.sample(scenes, number, torch.Generator().manual_seed(batch_seed))
        clip = canvas.draw(chosen, batch_seed, device)
        with torch.autocast(device.type, torch.bfloat16, enabled=device.type == "cuda"):
            posterior = autoencoder.encode(clip[:, :, 0] if canvas.frames == 1 else clip)  # type: ignore[operator]
        latents.append(posterior.latent_dist.mean.to(_stored(device)))
        drawn += chosen
        if device.type == "cuda":
            torch.cuda.synchronize()
    print(f"encoded {len(drawn)} scenes in {time.monotonic() - started:.0f} s", file=sys.stderr)
    return torch.cat(latents), drawn


def _stored(device: torch.device) -> torch.dtype:
    return torch.bfloat16 if device.type == "cuda" else torch.float32


@torch.no_grad()
def reconstruct(
    autoencoder: nn.Module, canvas: Canvas, scenes: Sequence[Scene], device: torch.device
) -> tuple[list[Tensor], float]:
    """Draw scenes, and encode and decode them in the autoencoder's own dtype.

    Returns:
        The decoded frames (T, 3, H, W) of each scene in 0…1, and the PSNR over all scenes in dB.
    """
    dtype = next(autoencoder.parameters()).dtype
    decoded: list[Tensor] = []
    squares: list[Tensor] = []
    for start in range(0, len(scenes), 10):
        clip = canvas.draw(scenes[start : start + 10], (1 << 42) + start, device)
        flat = clip[:, :, 0] if canvas.frames == 1 else clip
        latents = autoencoder.encode(flat.to(dtype)).latent_dist.mean  # type: ignore[operator]
        again = autoencoder.decode(latents).sample.float().clamp(-1, 1)  # type: ignore[operator]
        squares.append(((again - flat) / 2).square().flatten(1).mean(1))
        decoded += (again.view_as(clip).transpose(1, 2) / 2 + 0.5).cpu().unbind()
    return decoded, float(-10 * torch.log10(torch.cat(squares).mean()))
