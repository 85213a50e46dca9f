"""One training loop for every stage: seeded, within a time limit, with a progress line.

A step draws all its randomness from the seed and its own number. A stage that ends by its time
limit, as most do, still ends at a different step each time. The final weights are the running
average, which samples and predicts better than the last weights.
"""

from __future__ import annotations

import math
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor, nn

from benchmarks.training.optimisers import adamw, muon

REPORT_SECONDS = 5.0
VALIDATE_SECONDS = 20.0
WARM_UP_STEPS = 100

Loss = Callable[[torch.Generator, float], Tensor]
"""Maps a generator on the training device and the progress 0…1 to a scalar."""


@dataclass(frozen=True)
class Stage:
    """A training stage, which ends after ``steps`` or ``seconds``, whichever comes first.

    The learning rate warms up for a hundred steps and decays as a cosine to a hundredth, over the
    share of the steps or of the seconds that is used up, whichever is larger.
    """

    name: str
    steps: int
    seconds: float
    learning_rate: float
    weight_decay: float = 0.01
    average: float = 0.999
    muon_learning_rate: float = 0.0


@dataclass
class History:
    """Pairs of step and mean loss since the previous pair, in training and in validation."""

    losses: list[tuple[int, float]] = field(default_factory=list)
    validations: list[tuple[int, float]] = field(default_factory=list)
    steps: int = 0
    seconds: float = 0.0

    @property
    def first(self) -> float:
        return self.losses[0][1]

    @property
    def last(self) -> float:
        return self.losses[-1][1]

    def describe(self, stage: Stage) -> str:
        muon = ""
        if stage.muon_learning_rate:
            muon = (
                "; for the matrices inside blocks torch.optim.Muon, learning rate "
                f"{stage.muon_learning_rate:g}"
            )
        ended = "all its steps" if self.steps >= stage.steps else "its time limit"
        return (
            f"{stage.name}: {self.steps} steps in {self.seconds:.0f} s (ended by {ended}), "
            f"loss {self.first:.4f} → {self.last:.4f}, AdamW, learning rate "
            f"{stage.learning_rate:g}, weight decay {stage.weight_decay:g}{muon}"
        )


def train(
    stage: Stage,
    module: nn.Module,
    loss: Loss,
    *,
    seed: int,
    device: torch.device,
    validate: Callable[[], float] | None = None,
    matrices: Sequence[Tensor] = (),
) -> History:
    """Train ``module``, leaving it with the averaged weights, in eval mode.

    Muon updates ``matrices``, a subset of the module's parameters, and AdamW the others. With
    ``validate`` (lower is better), the averaged weights that scored best are used instead.
    """
    history = History()
    parameters: list[Tensor] = [p for p in module.parameters() if p.requires_grad]
    average = best = [parameter.detach().clone() for parameter in parameters]
    optimisers = _optimisers(stage, parameters, matrices, fused=device.type == "cuda")
    generator = torch.Generator(device)
    module.train()
    started = time.monotonic()
    progress = reported = validated = 0.0
    recent: list[Tensor] = []
    while progress < 1:
        generator.manual_seed(seed * 1_000_003 + history.steps)
        with torch.autocast(device.type, torch.bfloat16, enabled=device.type == "cuda"):
            value = loss(generator, progress)
        for optimiser in optimisers:
            optimiser.zero_grad(set_to_none=True)
            for group in optimiser.param_groups:
                group["lr"] = group["initial_lr"] * _rate(stage, history.steps, progress)
        value.backward()
        nn.utils.clip_grad_norm_(parameters, 1.0)
        for optimiser in optimisers:
            optimiser.step()
        history.steps += 1
        decay = min(stage.average, (1 + history.steps) / (10 + history.steps))
        with torch.no_grad():
            torch._foreach_lerp_(average, parameters, 1 - decay)
        recent.append(value.detach())
        # The GPU runs asynchronously, so without this wait only the host's time would be measured.
        if device.type == "cuda" and history.steps % 10 == 0:
            torch.cuda.synchronize()
        history.seconds = time.monotonic() - started
        progress = min(1.0, max(history.steps / stage.steps, history.seconds / stage.seconds))
        if history.seconds - reported >= REPORT_SECONDS or progress >= 1 or history.steps == 1:
            mean = float(torch.stack(recent).mean())
            if not math.isfinite(mean):
                raise FloatingPointError(f"{stage.name}: the loss is {mean} at {history.steps}")
            history.losses.append((history.steps, mean))
            recent.clear()
            reported = history.seconds
            _report(stage, history)
        if validate and (history.seconds - validated >= VALIDATE_SECONDS or progress >= 1):
            present = [parameter.detach().clone() for parameter in parameters]
            _assign(parameters, average)
            module.eval()
            score = validate()
            if score < min((past for _, past in history.validations), default=math.inf):
                best = [tensor.clone() for tensor in average]
            history.validations.append((history.steps, score))
            _assign(parameters, present)
            module.train()
            validated = history.seconds
    _assign(parameters, best)
    module.eval()
    return history


def _optimisers(
    stage: Stage, parameters: Sequence[Tensor], matrices: Sequence[Tensor], *, fused: bool
) -> list[torch.optim.Optimizer]:
    by_muon = {id(matrix) for matrix in matrices}
    others = [parameter for parameter in parameters if id(parameter) not in by_muon]
    decay = stage.weight_decay
    optimisers = [adamw(others, learning_rate=stage.learning_rate, weight_decay=decay, fused=fused)]
    if matrices:
        rate = stage.muon_learning_rate
        optimisers.append(muon(matrices, learning_rate=rate, weight_decay=decay))
    for optimiser in optimisers:
        for group in optimiser.param_groups:
            group["initial_lr"] = group["lr"]
    return optimisers


def _rate(stage: Stage, steps: int, progress: float) -> float:
    """Return the learning rate relative to its maximum, after ``steps`` steps."""
    # A short run warms up for only a tenth of its steps.
    warm_up = min(WARM_UP_STEPS, max(1, stage.steps // 10))
    rate = 0.01 + 0.99 * (1 + math.cos(math.pi * progress)) / 2
    return rate * min(1.0, (steps + 1) / warm_up)


def _assign(parameters: list[Tensor], values: list[Tensor]) -> None:
    with torch.no_grad():
        torch._foreach_copy_(parameters, values)


def _report(stage: Stage, history: History) -> None:
    rate = history.steps / max(history.seconds, 1e-9)
    validation = f"  validation {history.validations[-1][1]:.4f}" if history.validations else ""
    print(
        f"{stage.name}  step {history.steps} of {stage.steps}  "
        f"{history.seconds:.0f} of {stage.seconds:.0f} s  loss {history.last:.4f}"
        f"{validation}  {rate:.2f} steps/s",
        file=sys.stderr,
        flush=True,
    )
