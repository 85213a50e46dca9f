"""A user's run that trains: its loss and gradient norms, and the same weights at each start."""

from pathlib import Path

import pytest
import torch

import models
from models.training import FIRST_GRADIENT, SAMPLED, Steps

from .test_userfunction import write

TRAINS = """
def make():
    model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 1))
    adam = torch.optim.AdamW(model[0].parameters(), 0.1)
    sgd = torch.optim.SGD(model[1].parameters(), 0.1, momentum=0.9)

    @torch.enable_grad()
    def run():
        losses = []
        for step in range(3):
            loss = model(torch.ones(2, 4)).square().mean()
            loss.backward()
            for optimizer in (adam, sgd):
                {step}
                optimizer.zero_grad()
            losses.append({loss})
        return {result}

    return model, run
"""


def runnable(
    directory: Path, step: str = "optimizer.step()", loss: str = "loss", result: str = "losses"
) -> models.Runnable:
    text = TRAINS.format(step=step, loss=loss, result=result)
    return models.load(write(directory, text))


def test_every_run_trains_the_same_weights(tmp_path: Path) -> None:
    model = runnable(tmp_path)
    (root,) = model.roots.values()
    before = {name: each.clone() for name, each in root.state_dict().items()}
    first, second = (model.outputs(model.run()) for _ in range(2))
    assert first.kind == "training"
    losses = first.tensors["loss"]
    assert len(set(losses.tolist())) == 3
    assert all(torch.equal(first.tensors[name], second.tensors[name]) for name in first.tensors)
    for name, each in root.state_dict().items():
        assert torch.equal(each, before[name])
    assert all(each.grad is None for each in root.parameters())


def test_gradient_norm_is_that_of_all_optimisers(tmp_path: Path) -> None:
    model = runnable(tmp_path, result="{'loss': losses[0]}")
    (root,) = model.roots.values()
    found = model.outputs(model.run()).tensors
    loss = root(torch.ones(2, 4)).square().mean()
    gradients = torch.autograd.grad(loss, list(root.parameters()))
    norm = torch.cat([each.flatten() for each in gradients]).norm()
    assert found["loss"].tolist() == [pytest.approx(loss.item())]
    assert len(found["grad_norm"]) == 3
    assert float(found["grad_norm"][0]) == pytest.approx(float(norm), rel=1e-6)
    for (name, _), gradient in zip(root.named_parameters(), gradients, strict=True):
        assert torch.allclose(found[f"{FIRST_GRADIENT}{name}"], gradient.flatten())
    own = runnable(tmp_path, result="{'loss': loss, 'grad_norm': 2}")
    assert own.outputs(own.run()).tensors["grad_norm"].tolist() == [2]


def test_a_run_without_its_loss_or_gradients_is_refused(tmp_path: Path) -> None:
    for result in ("None", "{'logits': loss}", "torch.ones(3, 3)"):
        model = runnable(tmp_path, result=result)
        with pytest.raises(models.ModelError, match="must return its loss"):
            model.outputs(model.run())
    text = TRAINS.format(step="pass", loss="loss", result="losses").replace("@torch.enable", "#")
    with pytest.raises(models.ModelError, match=r"train inside `with torch.enable_grad\(\):`"):
        models.load(write(tmp_path, text)).run()


def test_sample_of_a_large_gradient_has_its_norm() -> None:
    large = torch.nn.Parameter(torch.zeros(100, 100))
    large.grad = torch.ones(100, 100)
    steps = Steps({}, {large: "large"})
    assert float(steps.square([large], is_first=True)) == pytest.approx(1e4)
    assert SAMPLED <= len(steps.first["large"]) < 2 * SAMPLED
    assert float(steps.first["large"].norm()) == pytest.approx(100.0)
