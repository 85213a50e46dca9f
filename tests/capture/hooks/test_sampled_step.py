"""Attention outside all entry points is found by its operations, and nothing else is."""

import sys
import threading
import types
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.attention.bias import causal_lower_right
from torch.utils._python_dispatch import TorchDispatchMode, _get_current_dispatch_mode_stack

from capture import record
from tests.factories import normal

pytestmark = pytest.mark.filterwarnings("ignore::capture.errors.RecordingWarning")

Compute = Callable[["Attends", Tensor], Tensor]


class Attends(nn.Module):
    """Projections around a given computation."""

    def __init__(self, compute: Compute) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.compute = compute
        self.qkv, self.out, self.router = nn.Linear(16, 48), nn.Linear(16, 16), nn.Linear(16, 16)
        self.experts = nn.Parameter(torch.randn(16, 16, 16))
        self.heads = nn.MultiheadAttention(16, 2, batch_first=True)
        self.probe = nn.Parameter(torch.randn(1, 1, 16))
        self.cache: Tensor
        self.register_buffer("cache", torch.zeros(2, 6, 16))

    def forward(self, states: Tensor) -> Tensor:
        return self.out(self.compute(self, states))

    def split(self, states: Tensor) -> list[Tensor]:
        return [*self.qkv(states).chunk(3, -1)]


class Both(nn.Sequential):
    def forward(self, states: Tensor) -> Any:
        return self[1].forward(self[0](states))


def einsum(model: Attends, states: Tensor) -> Tensor:
    query, key, value = model.split(states)
    weights = torch.einsum("bqd,bkd->bqk", query, key).softmax(-1)
    return torch.einsum("bqk,bkd->bqd", weights, value)


def masked(model: Attends, states: Tensor) -> Tensor:
    """Bloom's way: baddbmm with a bias, then float32, mask and dropout."""
    query, key, value = model.split(states)
    scores = torch.baddbmm(torch.zeros(2, 6, 6), query, key.mT, alpha=0.25)
    scores = scores.float().masked_fill(torch.ones(6, 6).triu(1).bool(), -1e9)
    return F.dropout(F.softmax(scores, -1), 0.1, training=False).to(value.dtype) @ value


def of_channels(model: Attends, states: Tensor) -> Tensor:
    query, key, value = (each.mT for each in model.split(states))
    scores = F.normalize(query, dim=-1) @ F.normalize(key, dim=-1).mT
    return (scores.softmax(-1) @ value).mT


def by_exponentials(model: Attends, states: Tensor) -> Tensor:
    query, key, value = model.split(states)
    scores = query @ key.mT
    weights = (scores - scores.amax(-1, keepdim=True)).exp_()
    return (weights / weights.sum(-1, keepdim=True)) @ value


def over_a_buffer(model: Attends, states: Tensor) -> Tensor:
    query, key, value = model.split(states)
    model.cache.copy_(key.detach())
    return (query @ model.cache.mT).softmax(-1) @ value


def of_a_probe(model: Attends, states: Tensor) -> Tensor:
    query, key, value = model.qkv(model.probe)[..., :16], *model.split(states)[1:]
    return (query @ key.mT).softmax(-1) @ value


def operator(model: Attends, states: Tensor) -> Tensor:
    query, key, value = (each[:, None] for each in model.split(states))
    result: Tensor = torch.ops.aten.scaled_dot_product_attention(query, key, value)
    return result[:, 0]


def compiled_script(model: Attends, states: Tensor) -> Tensor:
    return scripted(*model.split(states))


@torch.jit.script
def scripted(query: Tensor, key: Tensor, value: Tensor) -> Tensor:
    return (query @ key.mT).softmax(-1) @ value


def with_weights(model: Attends, states: Tensor) -> Tensor:
    return model.heads(states, states, states)[0]


ATTENTION: tuple[Compute, ...] = (
    einsum,
    masked,
    of_channels,
    by_exponentials,
    over_a_buffer,
    of_a_probe,
    operator,
    compiled_script,
    with_weights,
)


def seen(model: Attends, states: Tensor) -> Tensor:
    query, key, value = (each[:, None] for each in model.split(states))
    return F.scaled_dot_product_attention(query, key, value)[:, 0]


def biased(model: Attends, states: Tensor) -> Tensor:
    """The bias is a subclass of tensors."""
    return F.scaled_dot_product_attention(states, states, states, causal_lower_right(6, 6))


@torch.library.custom_op("attention_replay_tests::attention", mutates_args=())
def attention_operator(query: Tensor, key: Tensor, value: Tensor) -> Tensor:
    return F.scaled_dot_product_attention(query, key, value)


def seen_in_an_operator(model: Attends, states: Tensor) -> Tensor:
    """Engines call attention in operators of their own, which are written in Python."""
    return attention_operator(*(each[:, None] for each in model.split(states)))[:, 0]


def refused(model: Attends, states: Tensor) -> Tensor:
    """xFormers' function is counted by name, so its inside is not missed."""
    function: Callable[..., Tensor] = sys.modules["xformers.ops.fmha"].memory_efficient_attention
    return function(*(each[:, :, None] for each in model.split(states)))[:, :, 0]


def classified(model: Attends, states: Tensor) -> Tensor:
    probabilities = model.router(states).softmax(-1)
    return probabilities @ model.router.weight


def routed(model: Attends, states: Tensor) -> Tensor:
    """A mixture of experts, which combines the experts' outputs by a product."""
    chosen = (states @ F.normalize(model.router.weight).half().float().mT).softmax(-1)
    outputs = torch.einsum("bsd,ede->bsed", states, model.experts)
    return torch.einsum("bse,bsed->bsd", chosen, outputs)


def linear_attention(model: Attends, states: Tensor) -> Tensor:
    query, key, value = model.split(states)
    return query.softmax(-1) @ (key.softmax(1).mT @ value)


def quadratic_linear_attention(model: Attends, states: Tensor) -> Tensor:
    query, key, value = model.split(states)
    decay = model.router.bias.exp()[:6]
    return model.out(((query @ key.mT) * decay).tril() @ value).softmax(-1) @ states.mT @ states


def gated(model: Attends, states: Tensor) -> Tensor:
    return F.layer_norm(states * states.mean(1, keepdim=True).softmax(-1), (16,))


OTHER: tuple[Compute, ...] = (
    seen,
    biased,
    seen_in_an_operator,
    refused,
    classified,
    routed,
    linear_attention,
    quadratic_linear_attention,
    gated,
)


@pytest.fixture(autouse=True)
def xformers(monkeypatch: pytest.MonkeyPatch) -> None:
    def memory_efficient_attention(query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        weights = torch.einsum("bqhd,bkhd->bhqk", query, key).softmax(-1)
        return torch.einsum("bhqk,bkhd->bqhd", weights, value)

    module = types.ModuleType("xformers.ops.fmha")
    module.memory_efficient_attention = memory_efficient_attention  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, module.__name__, module)


STATES = normal(2, 6, 16)


@pytest.mark.parametrize("mode", [torch.enable_grad, torch.no_grad, torch.inference_mode])
@pytest.mark.parametrize("compute", ATTENTION + OTHER, ids=lambda each: each.__name__)
def test_attention_is_found_and_nothing_else(
    compute: Compute, mode: Callable[[], torch.no_grad], tmp_path: Path
) -> None:
    model = Both(Attends(compute), Attends(compute)).eval()
    with mode():
        expected = model(STATES)
        with record(model, tmp_path) as recording:
            assert torch.equal(model(STATES), expected)
            assert torch.equal(model(STATES), expected)
    missed = [str(each) for each in recording.missed_attention]
    kind, path = ("MultiheadAttention", "0.heads") if compute is with_weights else ("Attends", "0")
    found = [f"4 runs of 2 modules of class {kind} (such as {path})"]
    assert missed == (found if compute in ATTENTION else [])


@pytest.mark.parametrize("compute", [einsum, masked], ids=lambda each: each.__name__)
def test_weights_cast_by_autocast_before_the_recording_are_still_constant(
    compute: Compute, tmp_path: Path
) -> None:
    model, router = Attends(compute), Attends(routed)
    with torch.no_grad(), torch.autocast("cpu", torch.bfloat16):
        for each, missed in ((model, 1), (router, 0)):
            expected = each(STATES)
            with record(each, tmp_path / str(missed)) as recording:
                assert torch.equal(each(STATES), expected)
            assert len(recording.missed_attention) == missed


class Counting(TorchDispatchMode):
    operations = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):  # type: ignore[no-untyped-def]
        self.operations += 1
        return func(*args, **(kwargs or {}))


def test_modes_of_the_program_work_as_before(tmp_path: Path) -> None:
    """A mode may be active, begin inside the model, or end after it."""
    modes: list[Counting] = []

    def begins(*_: object) -> None:
        modes.append(Counting())
        modes[-1].__enter__()

    model = Attends(einsum)
    with torch.no_grad(), Counting() as alone:
        model(STATES)
    with torch.no_grad(), record(model, tmp_path) as recording:
        with Counting() as around:
            model(STATES)
        assert not recording.missed_attention  # not watched
        model.register_forward_pre_hook(begins)
        model(STATES)
        assert _get_current_dispatch_mode_stack() == modes
        modes.pop().__exit__(None, None, None)
    assert around.operations == alone.operations
    assert len(recording.missed_attention) == 1
    assert not _get_current_dispatch_mode_stack()


@pytest.mark.parametrize("error", [ZeroDivisionError, KeyboardInterrupt])
def test_pass_that_raises_leaves_no_mode(error: type[BaseException], tmp_path: Path) -> None:
    def fails(model: Attends, states: Tensor) -> Tensor:
        raise error

    model = Attends(fails)
    with record(model, tmp_path):
        with pytest.raises(error):
            model(STATES)
        assert not _get_current_dispatch_mode_stack()


def test_pass_that_outlasts_the_recording_leaves_no_mode(tmp_path: Path) -> None:
    entered, is_over = threading.Event(), threading.Event()

    def waits(model: Attends, states: Tensor) -> Tensor:
        entered.set()
        assert is_over.wait(30)
        return einsum(model, states)

    def run() -> None:
        found.extend([model(STATES), _get_current_dispatch_mode_stack()])

    found: list[Any] = []
    model, thread = Attends(waits), threading.Thread(target=run)
    with record(model, tmp_path / "first"):
        thread.start()
        assert entered.wait(30)
    with record(model, tmp_path / "second") as second:
        is_over.set()
        thread.join()
        assert torch.equal(model(STATES), found[0])
    assert torch.equal(model(STATES), found[0])
    assert len(second.missed_attention) == 1
    assert not found[1]
    assert "__new__" not in vars(torch.Tensor)
