"""One training loop for every stage: seeded, within a time limit, resumable, with a progress line.

A step draws all its randomness from the seed and its own number, so that a resumed run continues on
the same data as an uninterrupted one. A stage that ends by its time limit, as most do, still ends
at a different step each time. The final weights are the running average, which samples and predicts
better than the last weights.
"""

from __future__ import annotations

import math
import os
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from benchmarks.training.optimisers import adamw, muon

SAVE_SECONDS = 60.0
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
    """(step, mean loss since the last point) during training, and the same for validation."""

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
    work: Path,
    seed: int,
    device: torch.device,
    validate: Callable[[], float] | None = None,
    matrices: Sequence[Tensor] = (),
) -> History:
    """Train ``module``, leaving it with the averaged weights, in eval mode.

    Muon updates ``matrices``, a subset of the module's parameters, and AdamW the others. With
    ``validate`` (lower is better), the averaged weights that scored best are used instead. A state
    in ``work`` is resumed; if it is of a finished stage, only its weights are loaded.

    Raises:
        ValueError: The state is from another seed or other settings.
    """
    run = _Run(stage, module, matrices, device, seed)
    state = work / f"{stage.name.replace(' ', '-')}.pt"
    if state.is_file():
        saved_state = torch.load(state, map_location=device, weights_only=True)
        if saved_state["of"] != run.of:
            raise ValueError(
                f"{state} is from a run with other settings ({saved_state['of']}, not {run.of}): "
                "use --restart, or another --work"
            )
        run.restore(saved_state)
    history = run.history
    progress = run.progress()
    generator = torch.Generator(device)
    module.train()
    started = time.monotonic() - history.seconds
    reported, saved, validated = 0.0, history.seconds, history.seconds
    recent: list[Tensor] = []
    while progress < 1:
        generator.manual_seed(seed * 1_000_003 + history.steps)
        with torch.autocast(device.type, torch.bfloat16, enabled=device.type == "cuda"):
            value = loss(generator, progress)
        run.step(value, progress)
        recent.append(value.detach())
        # The GPU runs asynchronously: without this, the time would be that of the host alone.
        if device.type == "cuda" and history.steps % 10 == 0:
            torch.cuda.synchronize()
        history.seconds = time.monotonic() - started
        progress = run.progress()
        if history.seconds - reported >= REPORT_SECONDS or progress >= 1 or history.steps == 1:
            mean = float(torch.stack(recent).mean())
            if not math.isfinite(mean):
                raise FloatingPointError(f"{stage.name}: the loss is {mean} at {history.steps}")
            history.losses.append((history.steps, mean))
            recent.clear()
            reported = history.seconds
            _report(stage, history)
        if validate and (history.seconds - validated >= VALIDATE_SECONDS or progress >= 1):
            with run.averaged_weights():
                run.keep_if_best(validate())
            validated = history.seconds
        if history.seconds - saved >= SAVE_SECONDS or progress >= 1:
            run.save(state)
            saved = history.seconds
    run.finish()
    return history


class _Run:
    """The contents of a checkpoint: weights, their average, and the optimisers."""

    def __init__(
        self,
        stage: Stage,
        module: nn.Module,
        matrices: Sequence[Tensor],
        device: torch.device,
        seed: int,
    ) -> None:
        self.stage = stage
        self.module = module
        self.history = History()
        self.parameters: list[Tensor] = [p for p in module.parameters() if p.requires_grad]
        self.average = [parameter.detach().clone() for parameter in self.parameters]
        self.best: list[Tensor] | None = None
        by_muon = {id(matrix) for matrix in matrices}
        self.optimisers = [
            adamw(
                [p for p in self.parameters if id(p) not in by_muon],
                learning_rate=stage.learning_rate,
                weight_decay=stage.weight_decay,
                fused=device.type == "cuda",
            )
        ]
        if matrices:
            self.optimisers.append(
                muon(
                    matrices,
                    learning_rate=stage.muon_learning_rate,
                    weight_decay=stage.weight_decay,
                )
            )
        # A resumed run may be given more time or steps.
        settings = {**asdict(stage), "seed": seed}
        self.of = {name: settings[name] for name in settings if name not in ("steps", "seconds")}
        self.of["optimisers"] = [type(optimiser).__name__ for optimiser in self.optimisers]
        for group in self._parameter_groups():
            group["initial_lr"] = group["lr"]

    def progress(self) -> float:
        stage, history = self.stage, self.history
        return min(1.0, max(history.steps / stage.steps, history.seconds / stage.seconds))

    def step(self, value: Tensor, progress: float) -> None:
        rate = 0.01 + 0.99 * (1 + math.cos(math.pi * progress)) / 2
        # A short run warms up for a tenth of its steps.
        warm_up = min(WARM_UP_STEPS, max(1, self.stage.steps // 10))
        rate *= min(1.0, (self.history.steps + 1) / warm_up)
        for group in self._parameter_groups():
            group["lr"] = rate * group["initial_lr"]
        self.module.zero_grad(set_to_none=True)
        value.backward()
        nn.utils.clip_grad_norm_(self.parameters, 1.0)
        for optimiser in self.optimisers:
            optimiser.step()
        self.history.steps += 1
        decay = min(self.stage.average, (1 + self.history.steps) / (10 + self.history.steps))
        with torch.no_grad():
            torch._foreach_lerp_(self.average, self.parameters, 1 - decay)

    @contextmanager
    def averaged_weights(self) -> Iterator[None]:
        present = [parameter.detach().clone() for parameter in self.parameters]
        self._assign(self.average)
        self.module.eval()
        try:
            yield
        finally:
            self._assign(present)
            self.module.train()

    def keep_if_best(self, value: float) -> None:
        validations = self.history.validations
        if not validations or value < min(past for _, past in validations):
            self.best = [tensor.clone() for tensor in self.average]
        validations.append((self.history.steps, value))

    def finish(self) -> None:
        self._assign(self.best or self.average)
        self.module.eval()

    def save(self, path: Path) -> None:
        path.parent.mkdir(parents=True, exist_ok=True)
        temporary = path.with_suffix(".tmp")
        history = self.history
        state: dict[str, Any] = {
            "of": self.of,
            "weights": [parameter.detach() for parameter in self.parameters],
            "average": self.average,
            "best": self.best,
            "optimisers": [optimiser.state_dict() for optimiser in self.optimisers],
            "losses": history.losses,
            "validations": history.validations,
            "steps": history.steps,
            "seconds": history.seconds,
        }
        torch.save(state, temporary)
        os.replace(temporary, path)

    def restore(self, state: dict[str, Any]) -> None:
        self._assign(state["weights"])
        self.average = state["average"]
        self.best = state["best"]
        for optimiser, saved in zip(self.optimisers, state["optimisers"], strict=True):
            optimiser.load_state_dict(saved)
        self.history.losses = state["losses"]
        self.history.validations = state["validations"]
        self.history.steps = state["steps"]
        self.history.seconds = state["seconds"]

    def _parameter_groups(self) -> Iterator[dict[str, Any]]:
        for optimiser in self.optimisers:
            yield from optimiser.param_groups

    def _assign(self, values: list[Tensor]) -> None:
        with torch.no_grad():
            torch._foreach_copy_(self.parameters, values)


def _report(stage: Stage, history: History) -> None:
    rate = history.steps / max(history.seconds, 1e-9)
    validation = f"  validation {history.validations[-1][1]:.4f}" if history.validations else ""
    line = (
        f"{stage.name}  step {history.steps} of {stage.steps}  "
        f"{history.seconds:.0f} of {stage.seconds:.0f} s  loss {history.last:.4f}"
        f"{validation}  {rate:.2f} steps/s"
    )
    live = sys.stderr.isatty()
    finished = history.steps >= stage.steps or history.seconds >= stage.seconds
    print(
        f"\r{line}\033[K" if live else line,
        end="" if live and not finished else "\n",
        file=sys.stderr,
        flush=True,
    )
