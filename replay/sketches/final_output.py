"""Final output of a run, and random directions in which its error is measured.

The error of pictures, latents and other tensors is the relative L2 error, and directions are
standard normal: the mean of ⟨u, δ⟩² over u ~ N(0, 1) is ‖δ‖².

The error of logits is KL(own ‖ kernel). To second order it is half of δᵀFδ with the Fisher matrix
F = diag(p) − ppᵀ of the softmax p (Martens, "New insights and perspectives on the natural gradient
method", JMLR 21, 2020, section 8). F is the covariance of the gradient of log p(y) with respect to
the logits, for labels y drawn from p. So with u this gradient, the mean of ⟨u, δ⟩² is 2 KL.
"""

from __future__ import annotations

import contextlib
import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

import torch
from torch import Tensor, nn

from replay.sketches.gradients_on import GradientError

Measure = Literal["relative_l2", "kl"]

VAE = "vae"
"""Component of a pipeline that decodes latents."""


@dataclass(frozen=True)
class FinalOutput:
    """Final output of a run, with its graph."""

    tensor: Tensor
    """Latents, pictures or another tensor; or logits (T, V)."""
    measure: Measure

    @property
    def scale(self) -> float:
        """Number by which ⟨u, δ⟩ is divided, so that its mean square is the squared error or KL."""
        if self.measure == "kl":
            return math.sqrt(2 * len(self.tensor))
        return float(self.tensor.detach().float().norm())

    def direction(self, generator: torch.Generator) -> Tensor:
        """Draw a direction u of the output's shape and dtype."""
        output = self.tensor.detach()
        if self.measure == "kl":
            p = output.float().softmax(-1).cpu()
            drawn = torch.multinomial(p, 1, generator=generator)
            u = (-p).scatter_add_(1, drawn, torch.ones_like(drawn, dtype=p.dtype))
        else:
            u = torch.randn(output.shape, generator=generator)
        return u.to(output)


def error_between(own: FinalOutput, other: FinalOutput) -> float:
    """Return the relative L2 error of another run's output, or √KL(own ‖ other) per token."""
    ours, theirs = own.tensor.detach().double(), other.tensor.detach().double()
    if own.measure == "kl":
        p, q = ours.log_softmax(-1), theirs.log_softmax(-1)
        return math.sqrt(max(float((p.exp() * (p - q)).sum(-1).mean()), 0.0))
    return float((theirs - ours).norm() / ours.norm())


@dataclass
class DecodedLatents:
    """Latents that a pipeline's VAE decoded."""

    latest: Tensor | None = field(default=None)

    @contextlib.contextmanager
    def kept(self, roots: Mapping[str, nn.Module]) -> Iterator[None]:
        """Keep the latents that are decoded in the block, and decode them without gradients.

        The pictures then have no graph, so they may be converted to numpy or PIL.
        """
        vae: Any = roots.get(VAE)
        decode = getattr(vae, "decode", None)
        if decode is None:
            yield
            return

        def without_gradients(latents: Tensor, *args: Any, **kwargs: Any) -> Any:
            self.latest = latents
            # Not torch.no_grad(), which has no effect here (`replay.sketches.gradients_on`).
            before = torch.is_grad_enabled()
            torch.set_grad_enabled(False)
            try:
                return decode(latents.detach(), *args, **kwargs)
            finally:
                torch.set_grad_enabled(before)

        vae.decode = without_gradients
        try:
            yield
        finally:
            del vae.decode


def final_output(result: Any, decoded: Tensor | None = None) -> FinalOutput:
    """Return the output of a run whose error is foretold.

    Args:
        result: `{"input_ids": …, "logits": (1, T, V)}`, the output of `generate` with logits, or
            of a pipeline, or any object that begins with a floating-point tensor.
        decoded: latents that a VAE decoded, which stand for a result without `latents`.

    Raises:
        GradientError: the result has none of these.
    """
    if isinstance(result, Mapping) and {"input_ids", "logits"} <= result.keys():
        return FinalOutput(result["logits"][0], "kl")
    logits = getattr(result, "logits", None)
    if isinstance(logits, tuple) and logits:
        return FinalOutput(torch.stack([step[0] for step in logits]), "kl")
    if isinstance(logits, Tensor) and logits.ndim == 3:
        return FinalOutput(logits[0], "kl")
    latents = getattr(result, "latents", None)
    found = latents if isinstance(latents, Tensor) else decoded
    if found is None:
        found = next(_floating(result), None)
    if found is None:
        raise GradientError(
            f"the run returned an object of type {type(result).__name__} without a tensor to "
            "foretell: return latents, pictures as tensors, or logits"
        )
    return FinalOutput(found, "relative_l2")


def _floating(value: Any) -> Iterator[Tensor]:
    if isinstance(value, Tensor):
        if value.is_floating_point():
            yield value
    elif isinstance(value, Mapping):
        for each in value.values():
            yield from _floating(each)
    elif isinstance(value, list | tuple):
        for each in value:
            yield from _floating(each)
