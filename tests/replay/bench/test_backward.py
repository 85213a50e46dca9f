"""Kernels are differentiated on a call, their gradients are judged, and their backward is timed."""

import math
import re
from collections.abc import Callable
from dataclasses import replace
from itertools import count
from typing import Any

import pytest
import torch
from torch import Tensor

from replay.bench.shared_inputs import TimedPart
from replay.kernels.registry import find
from replay.timing.rounds import Samples, measure
from tests.factories import normal, random_call
from tests.replay.bench.small_kernels import Register, Replayed, raising, sdpa

Gradients = tuple[Tensor | None, ...]


class _Own(torch.autograd.Function):
    """SDPA with a backward of its own, whose gradients a function changes."""

    @staticmethod
    def forward(ctx: Any, change: Any, query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        ctx.save_for_backward(query, key, value)
        ctx.change = change
        return sdpa(query, key, value)

    @staticmethod
    def backward(ctx: Any, *upper: Tensor) -> Any:
        leaves = [each.detach().requires_grad_() for each in ctx.saved_tensors]
        with torch.enable_grad():
            output = sdpa(*leaves)
        return None, *ctx.change(*torch.autograd.grad(output, leaves, upper), upper[0])


class _ForwardAlone(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, *tensors: Tensor) -> Tensor:
        return sdpa(*tensors)


def own(change: Callable[..., Gradients] = lambda *found: found[:3]) -> Callable[..., Tensor]:
    def attention(query: Tensor, key: Tensor, value: Tensor, **_: Any) -> Tensor:
        output: Tensor = _Own.apply(change, query, key, value)
        return output

    return attention


def other_forward(query: Tensor, key: Tensor, value: Tensor, **_: Any) -> Tensor:
    return sdpa(query, key, value) * (1.01 if query.requires_grad else 1.0)


def spoiling(query: Tensor, key: Tensor, value: Tensor, upper: Tensor) -> Gradients:
    found = (query.clone(), key.clone(), value.clone())
    upper.zero_()
    return found


RUNS_TO_CHECK = 3
"""Number of backward passes before a kernel is timed."""
NONE = "has no backward"
OUTCOMES: dict[str, tuple[Callable[..., Any], str, str]] = {
    "right": (own(), "ok", ".* is within .*"),
    "double dK": (
        own(lambda q, k, v, _: (q, 2 * k, v)),
        "inaccurate",
        "grad_key is wrong: .*; cause: grad_key is 2 × the right one",
    ),
    "swapped": (
        own(lambda q, k, v, _: (q, v, k)),
        "inaccurate",
        "grad_key is .*; grad_value is .*",
    ),
    "no dK": (
        own(lambda q, k, v, _: (q, None, v)),
        "inaccurate",
        "its backward returns no grad_key",
    ),
    "other forward": (
        other_forward,
        "inaccurate",
        "right without gradients, wrong when they are .*",
    ),
    "fails": (
        own(lambda *_: raising(ValueError("no tile"))(*_[:3])),
        "error",
        "ValueError: no tile",
    ),
    "spoils": (own(spoiling), "ok", ".* is within .*"),
    "detached": (lambda **a: sdpa(**a).detach(), "unsupported", NONE),
    "refuses": (
        raising(NotImplementedError("head_dim 64 only")),
        "unsupported",
        "head_dim 64 only",
    ),
    "forward alone": (
        lambda query, key, value, **_: _ForwardAlone.apply(query, key, value),
        "unsupported",
        "You must implement .*",
    ),
}


def test_gradients_are_judged_and_backward_is_timed(replayed: Replayed, kernels: Register) -> None:
    chosen = [
        kernels(name, attention, differentiable=None)
        for name, (attention, _, _) in OUTCOMES.items()
    ]
    runs = count(1)

    def late(*found: Tensor) -> Gradients:
        return found[:3] if next(runs) <= RUNS_TO_CHECK else raising(ValueError("late"))(*found[:3])

    failing = kernels("late", own(late), differentiable=True)
    never = kernels("declared without", raising(AssertionError("called")))
    rows = replayed(random_call(), *chosen, failing, never, find("torch-math"), backward=True)
    for name, (_, status, reason) in OUTCOMES.items():
        row = rows[name]
        assert (row.status, bool(re.fullmatch(reason, row.reason))) == (status, True), row.reason
        is_judged = row.gradients is not None
        assert is_judged == (name in ("right", "double dK", "swapped", "spoils")), name
        assert (row.backward_ms is None, row.both_ms is None) == (not is_judged, not is_judged)
        assert row.call.grad_output == "drawn"
        assert (row.both_speedup is not None) == (status == "ok")
    assert rows["double dK"].gradients.key.tolerance_ratio > 1
    assert rows["double dK"].gradients.query.tolerance_ratio <= 1
    assert (rows["spoils"].changed_inputs, rows["spoils"].flags) == (("grad_output",), ())
    assert rows["torch-math"].backward_speedup.vs == "torch-default"
    assert (rows["late"].status, rows["late"].reason) == ("error", "ValueError: late")
    assert (rows["late"].backward_ms, rows["late"].both_ms) == (None, None)
    for name in ("detached", "forward alone", "declared without"):
        assert (rows[name].time_ms, rows[name].accuracy) == (None, None)
    assert rows["declared without"].reason == NONE


def test_backward_starts_from_the_recorded_gradient(replayed: Replayed, kernels: Register) -> None:
    seen: list[Tensor] = []

    def noting(query: Tensor, key: Tensor, value: Tensor, upper: Tensor) -> Gradients:
        seen.append(upper.clone())
        query[0, 0, 0, 0] += len(seen) * 1e-7
        return query, key, value

    upper = normal(1, 2, 9, 32, seed=3)
    call = replace(random_call(), grad_output=upper, grad_query=upper)
    kernel = kernels("noting", own(noting), differentiable=True)
    row = replayed(call, kernel, backward=True)["noting"]
    assert row.call.grad_output == "recorded"
    assert all(torch.equal(each, upper) for each in seen)
    assert any(each.startswith("grad_query not deterministic: ") for each in row.flags)
    del seen[:]
    assert replayed(call, kernel)["noting"].call.grad_output == ""
    assert not seen


@pytest.mark.parametrize(
    ("fields", "reason"),
    [
        ({"dropout_p": 0.5}, "gradients with dropout 0.5 .*"),
        (dict.fromkeys(("key", "value"), normal(1, 2, 0, 32)), "a call without keys .*"),
        (
            {"value": normal(1, 2, 13, 32).index_fill(3, torch.tensor(3), math.nan)},
            "gradients of a call with .* cannot .*",
        ),
    ],
)
def test_calls_without_right_gradients_are_refused(
    replayed: Replayed, kernels: Register, fields: dict[str, Any], reason: str
) -> None:
    row = replayed(
        replace(random_call(), **fields), kernels("own", own(), differentiable=True), backward=True
    )["own"]
    assert (row.status, row.time_ms, row.accuracy) == ("unsupported", None, None)
    assert re.fullmatch(reason, row.reason), row.reason


def test_backward_runs_its_forward_before_the_clock_starts(
    replayed: Replayed, kernels: Register, monkeypatch: pytest.MonkeyPatch
) -> None:
    events: list[str] = []

    def counted(**arguments: Any) -> Tensor:
        events.append("forward")
        return sdpa(**arguments)

    def spied(functions: Any, *arguments: Any, observer: Any, **options: Any) -> dict[str, Samples]:
        part = TimedPart("counted", "backward")
        del events[:]
        observer.before(part)
        events.append("clock")
        functions[part]()
        assert events == ["forward", "clock"]
        functions[part]()  # a warm-up
        assert events == ["forward", "clock", "forward"]
        return measure(functions, *arguments, observer=observer, **options)

    monkeypatch.setattr("replay.bench.runner.measure", spied)
    kernel = kernels("counted", counted, differentiable=True)
    assert replayed(random_call(), kernel, backward=True)["counted"].backward_ms.n == 3
