"""Every kernel gets the original inputs of a call, even if another kernel changes them."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

from tests.factories import random_call
from tests.replay.bench.small_kernels import Register, Replayed, sdpa
from tests.replay.conftest import CALLS_TO_CHECK, CALLS_TO_WARM_UP


@pytest.mark.parametrize("changed", ["query", "key", "value", "attn_mask"])
def test_changed_inputs_are_flagged(replayed: Replayed, kernels: Register, changed: str) -> None:
    """The inputs' strides are like those in models; the mask is expanded over heads."""
    call = random_call(kv_heads=1, attn_mask=torch.zeros(1, 1, 9, 13).expand(1, 2, 9, 13))
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
    rows = replayed(call, *(kernels(*each) for each in functions.items()), rounds=10)
    assert [(rows[each].status, rows[each].changed_inputs) for each in functions] == [
        ("ok", (changed,)), ("error", (changed,)), ("ok", ()),
    ]  # fmt: skip
    assert len(seen) > 10
    assert all(seen)
    assert all(torch.equal(getattr(call, name), before[name]) for name in before)


@pytest.mark.usefixtures("known_calls")
def test_restoring_every_second_call_is_flagged(replayed: Replayed, kernels: Register) -> None:
    """A sample of short calls ends with the original inputs, which hides the change."""
    calls = 0

    def toggling(**arguments: Any) -> Tensor:
        nonlocal calls
        calls += 1
        if calls > CALLS_TO_CHECK + CALLS_TO_WARM_UP:
            arguments["key"].view(torch.int32)[0, 0, 0, 0] ^= 1
        return sdpa(**arguments)

    assert replayed(random_call(), kernels("toggling", toggling))["toggling"].changed_inputs == (
        "key",
    )


@pytest.mark.parametrize(
    "change", [lambda key: key.resize_(0), lambda key: key.transpose_(1, 2), lambda key: key.t_()]
)
def test_change_of_sizes_stays_with_its_kernel(
    replayed: Replayed, kernels: Register, change: Callable[[Tensor], Tensor]
) -> None:
    def changing(**arguments: Any) -> Tensor:
        output = sdpa(**arguments)
        change(arguments["key"])
        return output

    chosen = kernels("changing", changing), kernels("mine", sdpa)
    rows = replayed(random_call(), *chosen, errors_against="changing")
    assert rows["changing"].status == "error"  # flagged when the kernel is called again
    assert (rows["mine"].status, rows["mine"].changed_inputs) == ("ok", ())
    assert rows["mine"].speedup is not None


def test_output_that_is_an_input_is_judged(replayed: Replayed, kernels: Register) -> None:
    def into_value(**arguments: Any) -> Tensor:
        return arguments["value"].copy_(sdpa(**arguments))

    row = replayed(random_call(q_len=13), kernels("mine", into_value))["mine"]
    assert row.changed_inputs == ("value",)
    assert row.status == "ok", row.reason
