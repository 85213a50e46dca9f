"""Sketch of the final output's error, from which the error of every plan is foretold.

To first order, the final output's error of a plan is Σ J_c ε_c. c are the model's places (a module
at a step), ε_c is the error of the place's kernel on the values of the unchanged run, and J_c the
derivative of the final output with respect to the attention's output there. One backward pass of a
random direction u gives J_cᵀu at all places, and so the score s_c = ⟨u, J_c ε_c⟩ of every kernel at
every place. The mean of (Σ s_c)² over u is the energy ‖Σ J_c ε_c‖² of the plan, with all cross
terms (Johnson and Lindenstrauss, 1984; relative error √(2 / directions)).

Sensitivities differ more between prompts than between directions. A few prompts whose derivatives
explode must not decide, so each prompt's energies are divided by the prompt's own scale before
their mean is taken, and multiplied by the geometric mean of all scales. The error foretold is
therefore the geometric mean over prompts, as a mean PSNR is.
"""

from __future__ import annotations

import functools
import json
import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save
from torch import Tensor

from attention_replay.errors import Error
from capture.storage.json_data import parsed
from replay.plan.plan import Plan
from replay.sketches.final_output import Measure

FORMAT = "attention-replay-sketch/1"

CROSS_TERMS = 0.5
"""Share of the cross terms between places that is kept. Their estimates are noisy and have a mean
of 0 for kernels with random errors, so they are shrunk towards 0."""


class SketchError(Error):
    """Reason why a sketch cannot be read or used; the message gives the remedy."""


class Place(NamedTuple):
    """Place of attention calls in a run, for which a plan names one kernel."""

    module: str
    phase: str
    kv_len: int
    step: int
    """Denoising step, or index of the forward pass."""


KernelAt = Callable[[str, str, int, int], str]
"""Function that returns the name of the kernel for a module, phase, key length and step."""


@dataclass(frozen=True)
class Foretold:
    """Error of the final output that a sketch foretells for a plan."""

    error: float
    """Relative L2 error, or √KL in nats per token; the geometric mean over prompts."""
    measure: Measure
    margin_db: float = 0.0
    """Standard error of the foretold error in dB, by the spread over prompts."""
    psnr: float | None = None
    """PSNR of the pictures in dB; None if it is not known."""
    by_place: Mapping[Place, float] = field(default_factory=dict)
    """Share of the squared error by place, without places of the model's own attention. The shares
    sum to 1, and one is negative if its error cancels others."""

    @property
    def kl(self) -> float | None:
        """KL in nats per token; None for other outputs."""
        return self.error**2 if self.measure == "kl" else None

    @property
    def upper(self) -> float:
        """Error plus its standard error, to compare with a budget."""
        return self.error * 10 ** (self.margin_db / 20)

    def share_by(self, name: str) -> dict[Any, float]:
        """Return the share of the squared error by `module` or `step`, in the order of the run."""
        found: dict[Any, float] = {}
        for place, share in self.by_place.items():
            key = getattr(place, name)
            found[key] = found.get(key, 0.0) + share
        return found


@dataclass(frozen=True, eq=False)
class ErrorSketch:
    """Scores of every kernel at every place of a model, for random directions."""

    model: str
    measure: Measure
    kernels: list[str]
    places: list[Place]
    """Places in the order of the run."""
    prompt_of: list[int]
    """Prompt of each direction, from 0."""
    scores: Tensor
    """⟨u, J ε⟩ over the scale of the output, (directions, places, kernels), float32."""
    local: Tensor
    """Squared relative L2 error of the attention's outputs, (places, kernels), mean of prompts."""
    runs: int
    """Forward and backward passes that the sketch took."""
    picture_db: float | None = None
    """PSNR of the pictures at a relative L2 error of 1: PSNR = this − 20 log₁₀(error)."""

    def foretell(self, plan: Plan | KernelAt) -> Foretold:
        """Return the final output's error with a plan.

        Args:
            plan: a plan, or a function; kernels that are not in the sketch must be the model's own
                attention.

        Raises:
            SketchError: the plan names a kernel that the sketch does not have.
        """
        if isinstance(plan, Plan):
            self._check(plan)
            plan = plan.kernel_at
        index = {name: at for at, name in enumerate(self.kernels)}
        chosen = [
            (at, index[kernel])
            for at, place in enumerate(self.places)
            if (kernel := plan(*place)) in index
        ]
        if not chosen:
            return Foretold(0.0, self.measure, psnr=None if self.picture_db is None else math.inf)
        places, kernels = (list(each) for each in zip(*chosen, strict=True))
        scores = self.scores[:, places, kernels].double()
        own = (1 - CROSS_TERMS) * scores.square()
        parts = own + CROSS_TERMS * scores * scores.sum(1, keepdim=True)
        energies = self._mean(parts)
        total = float(energies.sum())
        if total <= 0:  # kernels that are as exact as the model's own attention
            return Foretold(0.0, self.measure, psnr=None if self.picture_db is None else math.inf)
        error = math.sqrt(total)
        names = (self.places[at] for at in places)
        return Foretold(
            error,
            self.measure,
            self._standard_error_db(parts.sum(1)),
            None if self.picture_db is None else self.picture_db - 20 * math.log10(error),
            {name: float(each) / total for name, each in zip(names, energies, strict=True)},
        )

    @property
    def energies(self) -> Tensor:
        """Squared error of each kernel at each place alone, (places, kernels), float64."""
        return self._mean(self.scores.double().square())

    @functools.cached_property
    def additive(self) -> Tensor:
        """Squared errors of each kernel at each place for a sum over places, like `energies`.

        A kernel's energies are multiplied by one factor, so that their sum over all places has the
        cross terms that are foretold for the kernel everywhere.
        """
        energies = self.energies
        for at, kernel in enumerate(self.kernels):
            alone = float(energies[:, at].sum())
            if alone > 0:
                everywhere = self.foretell(lambda *place, name=kernel: name).error ** 2
                energies[:, at] *= everywhere / alone
        return energies

    def _mean(self, energies: Tensor, without: int | None = None) -> Tensor:
        """Average (directions, …) over directions and prompts, as the module's docstring says.

        Args:
            without: prompt to leave out.
        """
        prompts, scales = self._scales
        kept = torch.arange(len(scales)) != (-1 if without is None else without)
        number = torch.bincount(prompts)
        weights = kept * scales[kept].log().mean().exp() / (int(kept.sum()) * number * scales)
        return torch.tensordot(weights[prompts], energies, 1)

    def _standard_error_db(self, energies: Tensor) -> float:
        """Return the jackknife's standard error of the mean of a plan's energies (directions,).

        It leaves out one prompt at a time (Efron and Tibshirani, An Introduction to the Bootstrap,
        equation 11.5). A single prompt has the error of its directions, √(2 / directions).
        """
        prompts = len(self._scales[1])
        if prompts == 1:
            return 10 * math.log10(1 + math.sqrt(2 / len(energies)))
        means = torch.stack([self._mean(energies, without=at) for at in range(prompts)])
        levels = 10 * means.clamp(min=torch.finfo(means.dtype).tiny).log10()
        return float(((prompts - 1) / prompts * (levels - levels.mean()).square().sum()).sqrt())

    @functools.cached_property
    def _scales(self) -> tuple[Tensor, Tensor]:
        """Prompt of each direction, and the scale of each prompt.

        The scale is the geometric mean over the kernels of the energy with one at every place.
        """
        prompts = torch.tensor(self.prompt_of)
        everywhere = self.scores.double().square().sum(1)
        means = torch.stack([everywhere[prompts == at].mean(0) for at in prompts.unique()])
        known = means[:, (means > 0).all(0)]
        scales = known.log().mean(1).exp() if known.shape[1] else torch.ones(len(means)).double()
        return prompts, scales

    def _check(self, plan: Plan) -> None:
        unknown = [kernel for kernel in plan.kernels if kernel not in self.kernels]
        if unknown:
            raise SketchError(
                f"the sketch has no errors of {', '.join(unknown)}: make it again with "
                f"--kernels {','.join([*self.kernels, *unknown])}"
            )

    def save(self, path: str | Path) -> None:
        """Write the sketch as a safetensors file.

        Raises:
            SketchError: the file cannot be written.
        """
        data = {
            name: value for name, value in vars(self).items() if name not in ("scores", "local")
        }
        data = {name: data[name] for name in self.__dataclass_fields__ if name in data}
        header = {"format": FORMAT, "sketch": json.dumps(data)}
        try:
            Path(path).write_bytes(save({"scores": self.scores, "local": self.local}, header))
        except OSError as error:
            raise SketchError(f"cannot write the sketch {path}: {error.strerror}") from error

    @classmethod
    def load(cls, path: str | Path) -> ErrorSketch:
        """Read a sketch.

        Raises:
            SketchError: the file does not exist, or is not a sketch.
        """
        how = "make one with `replay foretell --dir DIR`"
        try:
            with safe_open(str(path), "pt") as file:
                header = file.metadata() or {}
                if header.get("format") != FORMAT:
                    raise SketchError(f"{path} is not a sketch of this version: {how}")
                data = parsed(header["sketch"])
                tensors = {name: file.get_tensor(name) for name in ("scores", "local")}
            data["places"] = [Place(*each) for each in data["places"]]
            return cls(**data, **tensors)
        except OSError as error:
            raise SketchError(f"cannot read the sketch {path}: {how}") from error
        except (SafetensorError, KeyError, TypeError, ValueError) as error:
            raise SketchError(f"the sketch {path} is damaged ({error}): {how}") from error
