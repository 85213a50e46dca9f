"""The training loop: a resumed run ends with the same weights as an uninterrupted run."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from torch import Tensor, nn

from benchmarks.training import loop
from benchmarks.training.loop import History, Stage, train

STAGE = Stage("a test", steps=24, seconds=1e9, learning_rate=1e-2, average=0.9)
CPU = torch.device("cpu")


class Stopped(Exception):
    pass


def model() -> nn.Linear:
    torch.manual_seed(1)
    return nn.Linear(4, 2)


def loss_of(module: nn.Module, *, stops_at: int | None = None) -> loop.Loss:
    """Regression on random inputs and targets; raises in step ``stops_at``, counted from 0."""
    calls = 0

    def loss(generator: torch.Generator, _: float) -> Tensor:
        nonlocal calls
        if calls == stops_at:
            raise Stopped
        calls += 1
        inputs = torch.randn(8, 4, generator=generator)
        error: Tensor = (module(inputs) - inputs[:, :2]).square().mean()
        return error

    return loss


def run(
    work: Path, *, seed: int = 0, stops_at: int | None = None, stage: Stage = STAGE
) -> tuple[Tensor, History]:
    module = model()
    loss = loss_of(module, stops_at=stops_at)
    matrices = [module.weight] if stage.muon_learning_rate else []
    history = train(stage, module, loss, work=work, seed=seed, device=CPU, matrices=matrices)
    return torch.cat([parameter.detach().flatten() for parameter in module.parameters()]), history


@pytest.fixture
def saves_every_step(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(loop, "SAVE_SECONDS", 0.0)


@pytest.mark.usefixtures("saves_every_step")
@pytest.mark.parametrize("stage", [STAGE, replace(STAGE, muon_learning_rate=0.01)])
@pytest.mark.parametrize("stops_at", [1, 13, 23])
def test_a_stopped_run_ends_with_the_weights_of_an_unbroken_one(
    tmp_path: Path, stops_at: int, stage: Stage
) -> None:
    unbroken, _ = run(tmp_path / "unbroken", stage=stage)
    with pytest.raises(Stopped):
        run(tmp_path / "stopped", stops_at=stops_at, stage=stage)
    # If the resumed run repeated the beginning, it would stop again.
    resumed, history = run(tmp_path / "stopped", stops_at=STAGE.steps - stops_at, stage=stage)
    assert torch.equal(resumed, unbroken)
    assert history.steps == STAGE.steps


def test_the_seed_decides_the_weights(tmp_path: Path) -> None:
    first, again, other = (
        run(tmp_path / name, seed=seed)[0] for name, seed in (("a", 0), ("b", 0), ("c", 1))
    )
    assert torch.equal(first, again)
    assert not torch.equal(first, other)


def test_a_finished_stage_only_gives_its_weights(tmp_path: Path) -> None:
    trained, _ = run(tmp_path)
    again, history = run(tmp_path, stops_at=0)
    assert torch.equal(again, trained)
    assert history.describe(STAGE).startswith("a test: 24 steps in ")


def test_a_card_says_which_optimisers_there_were() -> None:
    history = History(losses=[(1, 2.0), (24, 1.0)], steps=24, seconds=3)
    adamw = "loss 2.0000 → 1.0000, AdamW, learning rate 0.01, weight decay 0.01"
    assert history.describe(STAGE).endswith(adamw)
    both = history.describe(replace(STAGE, muon_learning_rate=0.02))
    assert both.endswith(
        f"{adamw}; for the matrices inside blocks torch.optim.Muon, learning rate 0.02"
    )


def test_it_learns_and_leaves_the_average_in_eval_mode(tmp_path: Path) -> None:
    module = model()
    before = float((module.weight.detach() - torch.eye(2, 4)).norm())
    stage = Stage("longer", steps=400, seconds=1e9, learning_rate=3e-2, average=0.9)
    history = train(stage, module, loss_of(module), work=tmp_path, seed=0, device=CPU)
    assert float((module.weight.detach() - torch.eye(2, 4)).norm()) < 0.05 * before
    assert history.last < 0.05 * history.first
    assert not module.training


def test_the_time_limit_ends_it_and_is_named(tmp_path: Path) -> None:
    module = model()
    stage = Stage("short", steps=10**9, seconds=0.2, learning_rate=1e-2)
    history = train(stage, module, loss_of(module), work=tmp_path, seed=0, device=CPU)
    assert 0 < history.steps < stage.steps
    assert "ended by its time limit" in history.describe(stage)


def test_the_weights_that_validated_best_are_kept(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(loop, "VALIDATE_SECONDS", 0.0)
    module = model()
    seen: list[Tensor] = []

    def validate() -> float:
        assert not module.training
        seen.append(module.weight.detach().clone())
        return abs(len(seen) - 7.0)  # the minimum is at the seventh

    history = train(
        STAGE, module, loss_of(module), work=tmp_path, seed=0, device=CPU, validate=validate
    )
    assert len(seen) == len(history.validations) == STAGE.steps
    assert torch.equal(module.weight, seen[6])
    assert not torch.equal(module.weight, seen[-1])


def test_a_loss_that_is_not_finite_is_an_error_that_names_the_stage(tmp_path: Path) -> None:
    module = model()

    def broken(_: torch.Generator, __: float) -> Tensor:
        return module.weight.sum() * torch.nan

    with pytest.raises(FloatingPointError, match="a test: the loss is nan at 1"):
        train(STAGE, module, broken, work=tmp_path, seed=0, device=CPU)


def test_progress_rises_to_one_and_the_learning_rate_falls(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
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

    train(STAGE, module, loss, work=tmp_path, seed=0, device=CPU)
    assert seen == pytest.approx([step / 24 for step in range(24)])
    # Of 24 steps two warm up; the cosine starts at 1 and ends near a hundredth.
    assert rates[0] == pytest.approx(0.5)
    assert rates[12] == pytest.approx(0.01 + 0.99 * 0.5)
    assert rates[2:] == sorted(rates[2:], reverse=True)
    assert 0.01 < rates[-1] < 0.02


@pytest.mark.usefixtures("saves_every_step")
def test_a_checkpoint_of_other_settings_is_not_continued(tmp_path: Path) -> None:
    run(tmp_path)
    for other in ({"seed": 1}, {"stage": replace(STAGE, learning_rate=STAGE.learning_rate / 2)}):
        with pytest.raises(ValueError, match=r"other settings .* use --restart"):
            run(tmp_path, **other)
    longer = replace(STAGE, steps=STAGE.steps + 5)
    assert run(tmp_path, stage=longer)[1].steps == longer.steps
