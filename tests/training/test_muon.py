"""Muon moves all directions of a matrix equally far, and only the matrices it is given."""

from __future__ import annotations

import pytest
import torch
from diffusers import CogVideoXTransformer3DModel

from training.muon import Muon, hidden_matrices, orthogonal


def matrices(*shape: int) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(0))


@pytest.mark.parametrize("shape", [(3, 8, 8), (2, 24, 8), (2, 8, 24)])
def test_singular_values_come_close_to_one_and_directions_stay(shape: tuple[int, ...]) -> None:
    given = matrices(*shape)
    made = orthogonal(given)
    left, _, right = torch.linalg.svd(given, full_matrices=False)
    singular = (left.mT @ made @ right.mT).diagonal(dim1=1, dim2=2)
    assert made.shape == given.shape
    assert singular.min() > 0.3
    assert singular.max() < 1.3


def test_matrices_of_one_shape_are_made_orthogonal_each_alone() -> None:
    given = matrices(2, 6, 4) * torch.tensor([1.0, 1000.0])[:, None, None]
    torch.testing.assert_close(orthogonal(given)[:1], orthogonal(given[:1]))


@pytest.mark.parametrize(("out", "size"), [(8, 1.0), (32, 2.0)])
def test_a_step_is_as_long_as_said_whatever_the_gradient(out: int, size: float) -> None:
    moved = []
    for scale in (1e-3, 1e3):
        weight = torch.zeros(out, 8, requires_grad=True)
        weight.grad = scale * matrices(out, 8)
        Muon([weight]).step(0.1)
        moved.append(weight.detach())
        assert float(torch.linalg.matrix_norm(weight.detach(), 2)) == pytest.approx(
            0.1 * size, rel=0.3
        )
    torch.testing.assert_close(*moved, rtol=1e-2, atol=1e-3)  # of elements about 0.03


def test_weights_decay_and_gradients_are_remembered() -> None:
    weight = torch.eye(4).requires_grad_()
    muon = Muon([weight], weight_decay=0.5)
    weight.grad = torch.zeros(4, 4)
    muon.step(0.1)
    torch.testing.assert_close(weight.detach(), 0.95 * torch.eye(4))
    weight.grad = torch.eye(4)
    muon.step(0.0)
    before = weight.detach().clone()
    weight.grad = torch.zeros(4, 4)
    muon.step(0.1)
    assert (weight.detach() - before).diagonal().max() < -0.05


def test_only_what_is_inside_of_the_blocks_and_modulates_nothing() -> None:
    transformer = CogVideoXTransformer3DModel(
        num_attention_heads=1, num_layers=2, in_channels=4, time_embed_dim=8, text_embed_dim=8
    )
    chosen = {id(matrix) for matrix in hidden_matrices(transformer)}
    names = {name for name, p in transformer.named_parameters() if id(p) in chosen}
    assert names == {
        f"transformer_blocks.{index}.{name}.weight"
        for index in range(2)
        for name in (
            *("attn1.to_q", "attn1.to_k", "attn1.to_v", "attn1.to_out.0"),
            *("ff.net.0.proj", "ff.net.2"),
        )
    }
