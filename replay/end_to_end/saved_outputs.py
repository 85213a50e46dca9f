"""Save each kernel's outputs for viewing: pictures, video frames and texts.

DIR/<model>/<kernel>/image-000.png            images
DIR/<model>/<kernel>/frame-000.png video.webp frames, and the video
DIR/<model>/<kernel>/text.txt                 prompt and new tokens
"""

from __future__ import annotations

import hashlib
import re
from collections.abc import Callable, Mapping
from pathlib import Path

import torch
from PIL import Image
from torch import Tensor

FRAME_MS = 125
"""Duration of a frame: 8 frames per second, as in CogVideoX's training."""

LONGEST_NAME = 100
"""Maximum length of a directory's name, in characters; file systems allow 255 bytes."""


def keep(
    outputs: Mapping[str, Tensor],
    directory: Path,
    *,
    model: str,
    kernel: str,
    decode: Callable[[Tensor], str] | None = None,
) -> list[Path]:
    """Write one run's outputs under `directory`, overwriting files of the same names.

    Args:
        outputs: CPU tensors: `frames` (F, C, H, W) or `images` (N, C, H, W) in [0, 1], `sequences`
            (1, T). Other tensors cannot be viewed and are ignored.
        kernel: name of the kernel or the baseline, which may be `path/file.py:function`.
        decode: converts token ids (1, T) to text; without this function, the ids are written.

    Returns:
        The files written.
    """
    place = directory / safe_name(model) / safe_name(kernel)
    place.mkdir(parents=True, exist_ok=True)
    files: list[Path] = []
    for name, stem in (("images", "image"), ("frames", "frame")):
        if name in outputs:
            pictures = [_picture(each) for each in outputs[name]]
            for index, picture in enumerate(pictures):
                files.append(place / f"{stem}-{index:03d}.png")
                picture.save(files[-1])
            if name == "frames":
                files.append(place / "video.webp")
                first, *others = pictures
                first.save(
                    files[-1], save_all=True, append_images=others, duration=FRAME_MS, loop=0
                )
    if "sequences" in outputs:
        ids = outputs["sequences"]
        text = decode(ids) if decode else " ".join(map(str, ids[0].tolist()))
        files.append(place / "text.txt")
        files[-1].write_text(text + "\n", encoding="utf-8")
    return files


def safe_name(name: str) -> str:
    """Convert any model's or kernel's name to a unique directory name without separators.

    >>> safe_name("torch-flash")
    'torch-flash'
    >>> safe_name("mine/attention.py:fast")
    'mine-attention.py-fast-4a1d6e'
    """
    plain = re.sub(r"[^A-Za-z0-9_.+@-]+", "-", name).strip("-.")[-LONGEST_NAME:].lstrip("-.")
    if plain and plain == name:
        return name
    return f"{plain}-{hashlib.sha256(name.encode()).hexdigest()[:6]}".lstrip("-")


def _picture(values: Tensor) -> Image.Image:
    """Convert (C, H, W) in [0, 1], with 1, 3 or 4 channels, to a picture; NaN becomes black."""
    levels = (values.float().nan_to_num(nan=0.0).clamp(0, 1) * 255).round().to(torch.uint8)
    return Image.fromarray(levels.permute(1, 2, 0).squeeze(-1).numpy())
