"""Completes a user's request with defaults, and checks the request before anything is built."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import torch

from . import pretrained_weights
from .errors import ModelError

DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}


@dataclass(frozen=True)
class Request:
    """Request to build and run a model.

    ``prompt`` and ``steps`` are None if the model's own defaults apply. ``size`` and ``weights``
    are None for a user's directory or function, which itself determines size and weights.
    """

    name: str
    size: str | None
    weights: str | None
    checkpoint: str | None
    prompt: str | None
    steps: int | None
    seed: int
    dtype: torch.dtype
    device: torch.device
    arguments: Mapping[str, str] = field(default_factory=dict)
    """Other arguments of the pipeline or of ``generate``, as text, by name."""
    given: frozenset[str] = frozenset()
    """Names of the options that the user gave, among prompt, steps, dtype and device."""

    @property
    def is_tiny(self) -> bool:
        """True for a short run with few steps and tokens."""
        return self.size == "tiny"

    @property
    def is_built_in(self) -> bool:
        """True for our own tiny model, rather than an official or given configuration."""
        return self.is_tiny and self.checkpoint is None

    def settings(self, **more: Any) -> dict[str, Any]:
        """Return the request as plain JSON with the model's own settings (``prompt``, …) added."""
        return {
            "size": self.size,
            "weights": self.weights,
            "checkpoint": self.checkpoint,
            "seed": self.seed,
            "dtype": str(self.dtype).removeprefix("torch."),
            "device": str(self.device),
            **more,
        }


def from_user(
    name: str,
    *,
    named: bool,
    size: str | None,
    weights: str | None,
    checkpoint: str | None,
    prompt: str | None,
    steps: int | None,
    seed: int,
    dtype: str | None,
    device: str | None,
    arguments: Mapping[str, str] | None = None,
) -> Request:
    """Complete and check a request.

    Args:
        named: True if ``name`` is one of ``models.NAMES``.
    """
    _one_of("size", size, ("tiny", "full"))
    _one_of("weights", weights, ("random", "pretrained"))
    _one_of("dtype", dtype, tuple(DTYPES))
    if steps is not None and steps < 1:
        raise ModelError(f"--steps is {steps}: it must be at least 1")
    where = _device(device)
    if named:
        if size is None:
            size = "full" if checkpoint or where.type == "cuda" else "tiny"
        if weights is None:
            exist = checkpoint or size == "full" or pretrained_weights.directory(name)
            weights = "pretrained" if exist else "random"
        bare = size == "tiny" and checkpoint is None
        if bare and weights == "pretrained" and pretrained_weights.directory(name) is None:
            raise ModelError(
                f"there are no pretrained weights for the tiny {name}: use --weights random, "
                "--size full, or --checkpoint DIR"
            )
    else:
        options = {"--size": size, "--weights": weights, "--checkpoint": checkpoint}
        if meaningless := [option for option, value in options.items() if value is not None]:
            raise ModelError(
                f"{name} has its own size and weights: leave out {' and '.join(meaningless)}"
            )
    optional = {"prompt": prompt, "steps": steps, "dtype": dtype, "device": device}
    return Request(
        name=name,
        size=size,
        weights=weights,
        checkpoint=checkpoint,
        prompt=prompt,
        steps=steps,
        seed=seed,
        dtype=DTYPES[dtype or ("bfloat16" if where.type == "cuda" else "float32")],
        device=where,
        arguments=dict(arguments or {}),
        given=frozenset(option for option, value in optional.items() if value is not None),
    )


def _one_of(option: str, value: str | None, choices: tuple[str, ...]) -> None:
    if value is not None and value not in choices:
        raise ModelError(f"--{option} is {value!r}: choose from {', '.join(choices)}")


def _device(name: str | None) -> torch.device:
    if name is None:
        return torch.device("cuda" if torch.cuda.is_available() else "cpu")
    try:
        device = torch.device(name)
    except RuntimeError as error:
        raise ModelError(f"--device is {name!r}: write, e.g., cpu, cuda or cuda:1") from error
    if device.type not in ("cpu", "cuda"):
        raise ModelError(f"--device is {name!r}: only cpu and cuda are supported")
    if device.type == "cpu" and device.index is not None:
        raise ModelError(f"--device is {name!r}: there is one, write --device cpu")
    if device.type == "cuda" and (device.index or 0) >= torch.cuda.device_count():
        raise ModelError(
            f"--device is {name!r}, but PyTorch finds {torch.cuda.device_count()} CUDA devices: "
            "use --device cpu, or install a CUDA build of PyTorch"
        )
    return device
