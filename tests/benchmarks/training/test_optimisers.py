"""Muon updates the matrices inside the blocks, and its step length is unchanged."""

from pathlib import Path
from types import ModuleType

import pytest
import torch
from diffusers import CogVideoXTransformer3DModel

from benchmarks.training import cogvideo, flux
from benchmarks.training.optimisers import adamw, hidden_matrices, muon


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


def test_biases_and_scales_do_not_decay() -> None:
    layer = torch.nn.Linear(4, 2)
    optimiser = adamw(list(layer.parameters()), learning_rate=0.1, weight_decay=0.5, fused=False)
    before = {name: parameter.detach().clone() for name, parameter in layer.named_parameters()}
    for parameter in layer.parameters():
        parameter.grad = torch.zeros_like(parameter)
    optimiser.step()
    torch.testing.assert_close(layer.weight.detach(), 0.95 * before["weight"])
    assert torch.equal(layer.bias, before["bias"])


@pytest.mark.parametrize(("out", "size"), [(8, 1.0), (32, 2.0)])
def test_a_muon_step_is_as_long_as_when_the_weights_were_made(out: int, size: float) -> None:
    """A step's spectral norm is the learning rate, times √(out / in) if that is above 1."""
    weight = torch.eye(out, 8).requires_grad_()
    optimiser = muon([weight], learning_rate=0.1, weight_decay=0.5)
    weight.grad = torch.randn(out, 8, generator=torch.Generator().manual_seed(0))
    optimiser.step()
    moved = weight.detach() - 0.95 * torch.eye(out, 8)
    assert float(torch.linalg.matrix_norm(moved, 2)) == pytest.approx(0.1 * size, rel=0.3)


@pytest.mark.parametrize("script", [cogvideo, flux])
def test_pytorch_without_muon_is_refused_before_training(
    script: ModuleType, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.delattr(torch.optim, "Muon")
    with pytest.raises(RuntimeError, match=r"has no Muon, .* install torch 2\.9 or newer"):
        script.main(["--smoke", "--device", "cpu", "--out", str(tmp_path)])
    assert not list(tmp_path.iterdir())
