"""Every kernel gets the original inputs of a call, even if another kernel changes them."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor

from capture.call.attention_call import AttentionCall
from replay.bench.settings import Settings
from replay.isolation.inputs import Inputs
from replay.kernels.registry import catalogue
from tests.replay.bench.small_kernels import MakeCall, MakeWorkload, Register, rows_of, sdpa
from tests.replay.conftest import CALLS_TO_CHECK, CALLS_TO_WARM_UP


@pytest.mark.parametrize("changed", ["query", "key", "value", "attn_mask"])
def test_changed_inputs_are_flagged_and_restored(
    make_call: MakeCall, workload: MakeWorkload, kernels: Register, quick: Settings, changed: str
) -> None:
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
        # Between calls, the perturbation changes only signs and the order of rows.
        pairs = [(arguments[name].abs(), before[name].abs()) for name in before]
        seen.append(all(torch.equal(*(e.flatten().sort().values for e in pair)) for pair in pairs))
        return sdpa(**arguments)

    def mutating_and_raising(**arguments: Any) -> Tensor:
        mutating(**arguments)
        raise RuntimeError("too late")

    rows = rows_of(
        call,
        workload,
        replace(quick, rounds=10),
        kernels("mutating", mutating),
        kernels("raising", mutating_and_raising),
        kernels("watching", watching),
    )
    assert rows["mutating"].changed_inputs == (changed,)
    assert rows["raising"].changed_inputs == (changed,)
    assert rows["raising"].status == "error"
    assert (rows["mutating"].status, rows["watching"].status) == ("ok", "ok")
    assert rows["watching"].changed_inputs == ()
    assert len(seen) > 10
    assert all(seen)
    assert all(torch.equal(getattr(call, name), before[name]) for name in before)


@pytest.mark.usefixtures("known_calls")
def test_inputs_that_every_second_call_restores_are_flagged(
    make_call: MakeCall, workload: MakeWorkload, kernels: Register, quick: Settings
) -> None:
    """A sample of short calls ends with the original inputs, which hides the change."""
    calls = 0

    def toggling(**arguments: Any) -> Tensor:
        nonlocal calls
        calls += 1
        if calls > CALLS_TO_CHECK + CALLS_TO_WARM_UP:
            arguments["key"].view(torch.int32)[0, 0, 0, 0] ^= 1
        return sdpa(**arguments)

    row = rows_of(make_call(), workload, quick, kernels("toggling", toggling))["toggling"]
    assert row.changed_inputs == ("key",)


@pytest.mark.parametrize(
    "change", [lambda key: key.resize_(0), lambda key: key.transpose_(1, 2), lambda key: key.t_()]
)
def test_change_of_sizes_stays_with_its_kernel(
    make_call: MakeCall,
    workload: MakeWorkload,
    kernels: Register,
    quick: Settings,
    change: Callable[[Tensor], Tensor],
) -> None:
    def changing(**arguments: Any) -> Tensor:
        output = sdpa(**arguments)
        change(arguments["key"])
        return output

    rows = rows_of(
        make_call(),
        workload,
        replace(quick, errors_against="changing"),
        kernels("changing", changing),
        kernels("mine", sdpa),
    )
    assert rows["changing"].status == "error"  # flagged when the kernel is called again
    assert (rows["mine"].status, rows["mine"].changed_inputs) == ("ok", ())
    assert rows["mine"].speedup is not None


def test_output_that_is_an_input_is_judged(
    make_call: MakeCall, workload: MakeWorkload, kernels: Register, quick: Settings
) -> None:
    call = make_call(q_len=13)

    def into_value(**arguments: Any) -> Tensor:
        return arguments["value"].copy_(sdpa(**arguments))

    row = rows_of(call, workload, quick, kernels("into-value", into_value))["into-value"]
    assert row.changed_inputs == ("value",)
    assert row.status == "ok", row.reason


def test_output_memory_is_poisoned(
    make_call: MakeCall,
    workload: MakeWorkload,
    kernels: Register,
    quick: Settings,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    order: list[str] = []
    real = Inputs.poison

    def poison(self: Inputs, call: AttentionCall, value: float = float("nan")) -> None:
        assert call.dtype == torch.bfloat16
        order.append("poison")
        real(self, call, value)

    def attention(**arguments: Any) -> Tensor:
        order.append("run")
        return sdpa(**arguments)

    monkeypatch.setattr(Inputs, "poison", poison)
    call = make_call(dtype=torch.bfloat16)
    rows_of(call, workload, quick, kernels("mine", attention), catalogue()["torch-math"])
    assert order[:2] == ["poison", "run"]
    assert order[-5:].count("poison") >= 2  # memory is poisoned again before the last judgement
