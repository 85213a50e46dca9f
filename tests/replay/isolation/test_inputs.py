"""Every kernel gets the original inputs of a call, even if another kernel changes them."""

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor

from capture.call.attention_call import AttentionCall
from replay.bench.settings import Settings
from tests.replay.bench.small_kernels import (
    MakeCall,
    MakeWorkload,
    Register,
    Replayed,
    rows_of,
    sdpa,
)
from tests.replay.conftest import CALLS_TO_CHECK, CALLS_TO_WARM_UP


@pytest.fixture
def replay(workload: MakeWorkload, kernels: Register, quick: Settings) -> Replayed:
    """`replay(call, name=function, …)` returns the rows of kernels by name."""

    def run(call: AttentionCall, rounds: int = 3, compared: str = "", **functions: Any) -> Any:
        used = replace(quick, rounds=rounds, errors_against=compared)
        return rows_of(call, workload, used, *(kernels(*each) for each in functions.items()))

    return run


@pytest.mark.parametrize("changed", ["query", "key", "value", "attn_mask"])
def test_changed_inputs_are_flagged(make_call: MakeCall, replay: Replayed, changed: str) -> None:
    """The inputs' strides are like those in models; the mask is expanded over heads."""
    call = make_call(kv_heads=1, attn_mask=torch.zeros(1, 1, 9, 13).expand(1, 2, 9, 13))
    before = {name: tensor.clone() for name, tensor in call.tensors().items()}
    seen: list[bool] = []

    def mutating(**arguments: Any) -> Tensor:
        output = sdpa(**arguments)
        tensor = arguments[changed]
        (tensor[:, :1] if changed == "attn_mask" else tensor).add_(1.0)
        return output

    def watching(**arguments: Any) -> Tensor:
        # A block changes signs of queries, and values.
        names = before.keys() - {"value"}
        seen.append(all(torch.equal(arguments[name].abs(), before[name].abs()) for name in names))
        return sdpa(**arguments)

    def raising(**arguments: Any) -> Tensor:
        mutating(**arguments)
        raise RuntimeError("too late")

    functions = {"mutating": mutating, "raising": raising, "watching": watching}
    rows = replay(call, rounds=10, **functions)
    assert [(rows[each].status, rows[each].changed_inputs) for each in functions] == [
        ("ok", (changed,)), ("error", (changed,)), ("ok", ()),
    ]  # fmt: skip
    assert len(seen) > 10
    assert all(seen)
    assert all(torch.equal(getattr(call, name), before[name]) for name in before)


@pytest.mark.usefixtures("known_calls")
def test_restoring_every_second_call_is_flagged(make_call: MakeCall, replay: Replayed) -> None:
    """A sample of short calls ends with the original inputs, which hides the change."""
    calls = 0

    def toggling(**arguments: Any) -> Tensor:
        nonlocal calls
        calls += 1
        if calls > CALLS_TO_CHECK + CALLS_TO_WARM_UP:
            arguments["key"].view(torch.int32)[0, 0, 0, 0] ^= 1
        return sdpa(**arguments)

    assert replay(make_call(), toggling=toggling)["toggling"].changed_inputs == ("key",)


@pytest.mark.parametrize(
    "change", [lambda key: key.resize_(0), lambda key: key.transpose_(1, 2), lambda key: key.t_()]
)
def test_change_of_sizes_stays_with_its_kernel(
    make_call: MakeCall, replay: Replayed, change: Callable[[Tensor], Tensor]
) -> None:
    def changing(**arguments: Any) -> Tensor:
        output = sdpa(**arguments)
        change(arguments["key"])
        return output

    rows = replay(make_call(), compared="changing", changing=changing, mine=sdpa)
    assert rows["changing"].status == "error"  # flagged when the kernel is called again
    assert (rows["mine"].status, rows["mine"].changed_inputs) == ("ok", ())
    assert rows["mine"].speedup is not None


def test_output_that_is_an_input_is_judged(make_call: MakeCall, replay: Replayed) -> None:
    def into_value(**arguments: Any) -> Tensor:
        return arguments["value"].copy_(sdpa(**arguments))

    row = replay(make_call(q_len=13), mine=into_value)["mine"]
    assert row.changed_inputs == ("value",)
    assert row.status == "ok", row.reason
