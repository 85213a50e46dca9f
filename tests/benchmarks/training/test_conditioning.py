"""The times that training draws from the noise schedule, and a denoiser before training."""

import torch
from torch import nn

from benchmarks.training.conditioning import NOISIER, draw_times, start_as_identity

CPU = torch.device("cpu")


def times(count: int, progress: float) -> torch.Tensor:
    return draw_times(count, progress, torch.Generator().manual_seed(0), CPU)


def test_times_are_mostly_noisy_at_first() -> None:
    shares = [float((times(1000, progress) > 0.9).float().mean()) for progress in (0, 0.5, 1)]
    exponents = (NOISIER[0], (NOISIER[0] + NOISIER[1]) / 2, NOISIER[1])
    for share, exponent in zip(shares, exponents, strict=True):
        assert abs(share - 0.1 ** (1 / exponent)) < 0.01  # P(1 − uᵖ > 0.9)
    assert shares[0] > 0.5 > shares[2] > 0.1


def test_every_batch_has_all_kinds() -> None:
    for progress in (0.0, 1.0):
        exponent = NOISIER[0] + progress * (NOISIER[1] - NOISIER[0])
        edges = 1 - (torch.arange(9) / 8) ** exponent
        drawn = times(8, progress)
        assert ((edges[1:] <= drawn) & (drawn <= edges[:-1])).all()


def test_denoiser_starts_at_zero() -> None:
    module = nn.ModuleDict(
        {
            "norm1": nn.ModuleDict({"linear": nn.Linear(2, 2)}),
            "ff": nn.ModuleDict({"linear": nn.Linear(2, 2)}),
            "proj_out": nn.Linear(2, 2),
        }
    )
    start_as_identity(module)
    zero = {name for name, p in module.named_parameters() if not p.any()}
    assert zero == {
        "norm1.linear.weight",
        "norm1.linear.bias",
        "proj_out.weight",
        "proj_out.bias",
    }
