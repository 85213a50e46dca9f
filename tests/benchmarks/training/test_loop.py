"""Training: its learning rates, its time limit, the weights it keeps, and infinite losses."""

from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn

from benchmarks.training import loop
from benchmarks.training.loop import History, Stage, train

STAGE = Stage(
    "a test", steps=24, seconds=1e9, learning_rate=1e-2, average=0.9, muon_learning_rate=0.01
)
CPU = torch.device("cpu")


def model() -> nn.Linear:
    torch.manual_seed(1)
    return nn.Linear(4, 2)


def loss_of(module: nn.Module) -> loop.Loss:
    def loss(generator: torch.Generator, _: float) -> Tensor:
        inputs = torch.randn(8, 4, generator=generator)
        error: Tensor = (module(inputs) - inputs[:, :2]).square().mean()
        return error

    return loss


def run(seed: int) -> Tensor:
    module = model()
    train(STAGE, module, loss_of(module), seed=seed, device=CPU, matrices=[module.weight])
    return torch.cat([parameter.detach().flatten() for parameter in module.parameters()])


def test_the_seed_decides_the_weights() -> None:
    first, again, other = run(0), run(0), run(1)
    assert torch.equal(first, again)
    assert not torch.equal(first, other)


def test_card_names_the_optimisers() -> None:
    history = History(losses=[(1, 2.0), (24, 1.0)], steps=24, seconds=3)
    assert history.describe(STAGE).endswith(
        "loss 2.0000 → 1.0000, AdamW, learning rate 0.01, weight decay 0.01; for the matrices "
        "inside blocks torch.optim.Muon, learning rate 0.01"
    )


def test_training_learns_and_keeps_the_average() -> None:
    module = model()
    before = float((module.weight.detach() - torch.eye(2, 4)).norm())
    stage = Stage("longer", steps=400, seconds=1e9, learning_rate=3e-2, average=0.9)
    history = train(stage, module, loss_of(module), seed=0, device=CPU)
    assert float((module.weight.detach() - torch.eye(2, 4)).norm()) < 0.05 * before
    assert history.last < 0.05 * history.first
    assert not module.training


def test_time_limit_ends_the_training() -> None:
    module = model()
    stage = Stage("short", steps=10**9, seconds=0.2, learning_rate=1e-2)
    history = train(stage, module, loss_of(module), seed=0, device=CPU)
    assert 0 < history.steps < stage.steps
    assert "ended by its time limit" in history.describe(stage)


def test_the_weights_that_validated_best_are_kept(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(loop, "VALIDATE_SECONDS", 0.0)
    module = model()
    seen: list[Tensor] = []

    def validate() -> float:
        assert not module.training
        seen.append(module.weight.detach().clone())
        return abs(len(seen) - 7.0)  # the minimum is at the seventh

    history = train(STAGE, module, loss_of(module), seed=0, device=CPU, validate=validate)
    assert len(seen) == len(history.validations) == STAGE.steps
    assert torch.equal(module.weight, seen[6])
    assert not torch.equal(module.weight, seen[-1])


def test_infinite_loss_is_an_error() -> None:
    module = model()

    def broken(_: torch.Generator, __: float) -> Tensor:
        return module.weight.sum() * torch.nan

    with pytest.raises(FloatingPointError, match="a test: the loss is nan at 1"):
        train(STAGE, module, broken, seed=0, device=CPU)


def test_progress_rises_to_one_and_the_learning_rate_falls(monkeypatch: pytest.MonkeyPatch) -> None:
    rates: list[float] = []
    step: Callable[..., None] = torch.optim.AdamW.step

    def noted(optimiser: torch.optim.AdamW, *arguments: object) -> None:
        rates.append(optimiser.param_groups[0]["lr"] / STAGE.learning_rate)
        step(optimiser, *arguments)

    monkeypatch.setattr(torch.optim.AdamW, "step", noted)
    module = model()
    seen: list[float] = []
    inner = loss_of(module)

    def loss(generator: torch.Generator, progress: float) -> Tensor:
        seen.append(progress)
        return inner(generator, progress)

    train(STAGE, module, loss, seed=0, device=CPU)
    assert seen == pytest.approx([step / 24 for step in range(24)])
    # The first two of 24 steps are the warm-up; the cosine starts at 1 and ends near 0.01.
    assert rates[0] == pytest.approx(0.5)
    assert rates[12] == pytest.approx(0.01 + 0.99 * 0.5)
    assert rates[2:] == sorted(rates[2:], reverse=True)
    assert 0.01 < rates[-1] < 0.02
