"""`record(backward=True)` keeps the gradients of calls, and the model's own keep their bits."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn.functional import scaled_dot_product_attention
from torch.utils.checkpoint import checkpoint

from capture import load, record
from capture.call.attention_call import AttentionCall
from capture.cli.file_checks import check_files
from capture.errors import RecordingWarning


class Block(nn.Module):
    """Causal attention of four query heads and two key heads; its query is used elsewhere too."""

    def __init__(self) -> None:
        super().__init__()
        self.project, self.out = nn.Linear(32, 64), nn.Linear(32, 32)

    def forward(self, x: Tensor) -> Tensor:
        query, key, value = (
            part.unflatten(2, (-1, 8)).transpose(1, 2)
            for part in self.project(x).float().split((32, 16, 16), dim=2)
        )
        output = scaled_dot_product_attention(query, key, value, is_causal=True, enable_gqa=True)
        merged = (output + 0.1 * query).transpose(1, 2).flatten(2)
        return x + self.out(merged)


class Model(nn.Module):
    """Two blocks, with reentrant or other checkpointing, or without any."""

    def __init__(self, use_reentrant: bool | None = None) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.layers = nn.ModuleList([Block(), Block()])
        self.use_reentrant = use_reentrant

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            if self.use_reentrant is None:
                x = layer(x)
            else:
                x = checkpoint(layer, x, use_reentrant=self.use_reentrant)
        return x


def accumulate(model: Model, x: Tensor) -> None:
    for factor in (1, 2):
        model(x * factor).square().mean().backward()


def autocast(model: Model, x: Tensor) -> None:
    with torch.autocast("cpu", torch.bfloat16):
        loss = model(x).float().square().mean()
    (loss * 1024).backward()


def trained(model: Model, step: Callable[[Model, Tensor], None]) -> list[Tensor | None]:
    """Train one step and return all gradients."""
    x = torch.randn(2, 16, 32, generator=torch.Generator().manual_seed(1)).requires_grad_()
    step(model, x)
    return [each.grad for each in (x, *model.parameters())]


def recomputed(call: AttentionCall) -> list[Tensor | None]:
    leaves = [each.clone().requires_grad_() for each in (call.query, call.key, call.value)]
    output = scaled_dot_product_attention(*leaves, is_causal=True, enable_gqa=True)
    output.backward(call.grad_output)
    return [leaf.grad for leaf in leaves]


@pytest.mark.parametrize(
    ("use_reentrant", "step", "options"),
    [
        (None, accumulate, {}),
        (None, accumulate, {"max": 1, "durable": True}),
        (True, accumulate, {}),
        (False, accumulate, {}),
        (None, autocast, {}),
        (True, autocast, {}),
    ],
)
def test_gradients_are_those_of_the_call(
    use_reentrant: bool | None,
    step: Callable[[Model, Tensor], None],
    options: dict[str, Any],
    tmp_path: Path,
) -> None:
    expected = trained(Model(use_reentrant), step)
    model = Model(use_reentrant)
    with record(model, tmp_path, backward=True, **options) as recording:
        found = trained(model, step)
    assert all(map(torch.equal, found, expected))
    assert not recording.problems
    assert recording.counts.without_gradients == 0
    data = load(tmp_path)
    assert len(data) == options.get("max", 4 if step is accumulate else 2)
    for call in data:
        found = [call.grad_query, call.grad_key, call.grad_value]
        assert all(map(torch.equal, found, recomputed(call)))
        assert {call.grad_output.dtype, *(each.dtype for each in found)} == {call.dtype}
    assert all("gradients bit-identical" in check.text for check in check_files(data))


def test_calls_without_gradients_are_counted(tmp_path: Path) -> None:
    model = Model()
    model.layers[0].requires_grad_(False)
    x = torch.ones(1, 4, 32)
    with record(model, tmp_path, backward=True) as recording:
        model(x)
        model(x).sum().backward()
    assert recording.summary.endswith("4 of 4; without gradients: 3")
    assert [call.grad_query is not None for call in load(tmp_path)] == [False] * 3 + [True]
    explained = pytest.warns(RecordingWarning, match=r"ents: 2 \(none came .*`backward\(\)` bef")
    with explained, record(model, tmp_path / "none", backward=True):
        model(x)


@pytest.mark.parametrize(("heads", "kept"), [([0, 1], True), ([1, 2], False)])
def test_gradient_of_a_key_needs_its_whole_group(
    heads: list[int], kept: bool, tmp_path: Path
) -> None:
    model = Model()
    with record(model, tmp_path, backward=True, heads=heads):
        trained(model, accumulate)
    for call in load(tmp_path):
        assert call.grad_query is not None
        assert (call.grad_key is not None) == kept


def test_function_s_own_gradients_are_kept(tmp_path: Path) -> None:
    """Through the wrapper of other entry points, whose arguments are views in another layout."""
    transformers = pytest.importorskip("transformers")
    config = transformers.LlamaConfig(
        vocab_size=32,
        hidden_size=32,
        intermediate_size=32,
        num_hidden_layers=1,
        num_attention_heads=4,
        num_key_value_heads=2,
        attn_implementation="eager",
    )
    model = transformers.LlamaForCausalLM(config)
    tokens = torch.arange(12)[None]
    with record(model, tmp_path, backward=True):
        model(tokens, labels=tokens).loss.backward()
    (call,) = load(tmp_path)
    assert call.origin.entry_point == "transformers"
    leaves = [each.clone().requires_grad_() for each in (call.query, call.key, call.value)]
    scaled_dot_product_attention(
        *leaves, attn_mask=call.attn_mask, scale=call.scale, enable_gqa=True
    ).backward(call.grad_output)
    for leaf, found in zip(leaves, (call.grad_query, call.grad_key, call.grad_value), strict=True):
        torch.testing.assert_close(leaf.grad, found)
