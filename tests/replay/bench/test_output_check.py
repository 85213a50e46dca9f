"""Small fake kernels that are wrong, broken or unfair get rows that state the fault."""

import json
import math
import re
import sys
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

from replay.isolation.inputs import POISON, Inputs
from replay.kernels.registry import catalogue
from replay.rows.row_files import row_to_json
from tests.factories import random_call
from tests.replay.bench.small_kernels import Register, Replayed, raising, sdpa
from tests.replay.conftest import CALLS_TO_CHECK, CALLS_TO_WARM_UP

FULL = torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2 GiB")
THIRD = torch.tensor([3])
OUTCOMES: dict[str, tuple[Callable[..., Any], str, str]] = {
    "right": (sdpa, "ok", ".* max abs error .* is within"),
    "wrong-shape": (lambda **a: sdpa(**a).mT, "error", r"shape \(1, 2, 32, 9\), expected"),
    "wrong-dtype": (lambda **a: sdpa(**a).double(), "error", "returned float64, expected float32"),
    "a-tuple": (lambda **a: (sdpa(**a), None), "error", "returned tuple, not a tensor"),
    "raises": (raising(ValueError("no tile\nlong story")), "error", "ValueError: no tile"),
    "exits": (raising(SystemExit(0)), "error", "SystemExit: 0"),
    "out-of-memory": (raising(FULL), "out-of-memory", "needed 2 GiB"),
    "requires-grad": (lambda **a: sdpa(**a).requires_grad_(), "error", "requires a gradient"),
    "negated-view": (lambda **a: torch._neg_view(-sdpa(**a)), "error", "lazily negated"),
    "one-nan": (
        lambda **a: sdpa(**a).index_fill(2, THIRD, math.nan),
        "inaccurate",
        "64 elements are NaN or infinite",
    ),
    "zeros": (lambda **a: torch.zeros_like(a["query"]), "inaccurate", "exceeds"),
    "slightly-wrong": (lambda **a: sdpa(**a) * 1.001, "inaccurate", ".* max abs error .* exceeds"),
    "ignores-scale": (lambda **a: sdpa(**{**a, "scale": None}), "inaccurate", "error .* exceeds"),
}


def test_each_outcome_has_its_status(replayed: Replayed, kernels: Register) -> None:
    call = random_call(scale=0.3)
    chosen = [kernels(name, attention) for name, (attention, _, _) in OUTCOMES.items()]
    rows = replayed(call, *chosen)
    assert list(rows) == [*OUTCOMES, "torch-default"]
    for name, (_, status, reason) in OUTCOMES.items():
        row = rows[name]
        assert row.status == status, (name, row.reason)
        assert re.search(reason, row.reason), (name, row.reason)
        assert "\n" not in row.reason
        assert row.flop_per_byte == pytest.approx(rows["right"].flop_per_byte)
        assert (row.speedup is not None) == (name == "right"), name
        assert (row.time_ms is not None) == (status in ("ok", "inaccurate")), name
        assert row.machine.torch == torch.__version__
        json.dumps(row_to_json(row), allow_nan=False)


def test_unsuitable_kernels_are_not_called(replayed: Replayed, kernels: Register) -> None:
    never = raising(AssertionError("called"))
    rows = replayed(
        random_call(),
        kernels("absent", never, unavailable=lambda device: f"not installed on {device}"),
        kernels("picky", never, unsupported=lambda call: f"head_dim {call.shape.head_dim}"),
        kernels("bad-check", never, unsupported=lambda call: f"{call.no_such_fact}"),
        kernels("leaves", never, unsupported=lambda call: sys.exit(0)),
    )
    assert (rows["absent"].status, rows["absent"].reason) == ("unavailable", "not installed on cpu")
    assert (rows["picky"].status, rows["picky"].reason) == ("unsupported", "head_dim 32")
    assert rows["bad-check"].status == "error"
    assert "no_such_fact" in rows["bad-check"].reason
    assert (rows["leaves"].status, rows["leaves"].reason) == ("error", "SystemExit: 0")
    assert rows["torch-default"].status == "ok"
    for name in ("absent", "picky", "bad-check"):
        assert rows[name].flop_per_byte is not None
        assert (rows[name].time_ms, rows[name].accuracy) == (None, None)


def test_no_gradients_and_no_inference_mode(replayed: Replayed, kernels: Register) -> None:
    """Models run without inference mode, in which launches would be cheaper."""
    modes: set[tuple[bool, bool]] = set()

    def watching(**arguments: Any) -> Tensor:
        modes.add((torch.is_grad_enabled(), torch.is_inference_mode_enabled()))
        return sdpa(**arguments)

    replayed(random_call(), kernels("watching", watching))
    assert modes == {(False, False)}


def test_kernel_that_reuses_output_memory_is_flagged(replayed: Replayed, kernels: Register) -> None:
    """Outputs of a replayed CUDA graph share memory, so a model that keeps two would lose one."""
    buffers: dict[torch.Size, Tensor] = {}

    def static(**arguments: Any) -> Tensor:
        output = sdpa(**arguments)
        return buffers.setdefault(output.shape, torch.empty_like(output)).copy_(output)

    chosen = (kernels("static", static), kernels("part", lambda **a: static(**a)[:]))
    rows = replayed(random_call(), *chosen, kernels("fresh", sdpa))
    flag = "returns the same memory again: a later call overwrites an earlier output"
    assert {
        name: (rows[name].status, rows[name].flags) for name in ("static", "part", "fresh")
    } == {"static": ("ok", (flag,)), "part": ("ok", (flag,)), "fresh": ("ok", ())}


def test_unwritten_output_is_flagged(
    replayed: Replayed, kernels: Register, monkeypatch: pytest.MonkeyPatch
) -> None:
    """New memory on a CPU has unpredictable content, so this test fills it with one number."""
    held = [0.0]
    monkeypatch.setattr(Inputs, "poison", lambda self, call, value=POISON: held.append(value))

    def leaves_a_row(**arguments: Any) -> Tensor:
        return sdpa(**arguments).index_fill(2, torch.tensor([8]), held[-1])

    def leaves_all(**arguments: Any) -> Tensor:
        return torch.full_like(arguments["query"], held[-1])

    call = random_call()
    leaving = (kernels("a row", leaves_a_row), kernels("all", leaves_all))
    rows = replayed(call, *leaving, kernels("nothing", sdpa))
    assert call.shape.q_len == 9
    found = {name: (row.status, row.flags) for name, row in rows.items()}
    assert found["a row"] == ("inaccurate", ("leaves 64 output elements unwritten",))
    assert found["all"] == ("inaccurate", ("leaves 576 output elements unwritten",))
    assert found["nothing"] == ("ok", ())


@pytest.mark.usefixtures("known_calls")
@pytest.mark.parametrize(
    "call_number", [1, 2, CALLS_TO_CHECK + 2, CALLS_TO_CHECK + CALLS_TO_WARM_UP + 2]
)
def test_exit_costs_one_row(replayed: Replayed, kernels: Register, call_number: int) -> None:
    """The kernel exits in its first check, its determinism check, its warm-up or its timing."""
    calls = 0

    def leaves(**arguments: Any) -> Tensor:
        nonlocal calls
        calls += 1
        if calls == call_number:
            sys.exit(0)
        return sdpa(**arguments)

    others = {"prepare": lambda call: sys.exit(0)}
    settings = {"errors_against": "leaves"} if call_number == 1 else {}
    rows = replayed(
        random_call(), kernels("leaves", leaves), kernels("core", sdpa, **others), **settings
    )
    assert rows["core"].status == "ok"
    assert rows["core"].flags == ("no core time: SystemExit: 0",)
    if call_number > 1:  # the first call only computes the output to compare with
        left = rows["leaves"]
        assert (left.status, left.reason, left.time_ms) == ("error", "SystemExit: 0", None)
        assert rows["torch-default"].time_ms is not None


def test_errors_are_recorded_against_each_output(replayed: Replayed, kernels: Register) -> None:
    call = random_call(dtype=torch.bfloat16, with_output=True)
    settings = {"errors_against": "torch-flash", "compare_stats": True}
    row = replayed(call, catalogue()["torch-math"], **settings)["torch-math"]
    assert row.accuracy.captured.max_abs == 0  # torch-math produced the recorded output
    assert 0 < row.accuracy.kernel.max_abs < 0.05
    assert row.accuracy.noise_floor == row.accuracy.reference
    assert row.output_summary is not None
    assert row.reference_summary is not None
    assert row.output_summary != row.reference_summary

    without = replayed(random_call(), catalogue()["torch-math"])["torch-math"]
    assert (without.accuracy.captured, without.accuracy.noise_floor) == (None, None)
    assert without.output_summary is None


def test_compared_kernel_may_change_inputs_or_fail(replayed: Replayed, kernels: Register) -> None:
    def mutating(**arguments: Any) -> Tensor:
        arguments["key"].zero_()
        raise RuntimeError("broken")

    kernels("mutating", mutating)
    call = random_call()
    key = call.key.clone()
    rows = replayed(call, catalogue()["torch-math"], errors_against="mutating")
    assert torch.equal(call.key, key)
    assert rows["torch-math"].status == "ok"
    assert rows["torch-math"].accuracy.kernel is None
    assert rows["torch-math"].accuracy.reference.max_abs < 1e-5
    assert rows["torch-math"].changed_inputs == ()
    assert (rows["mutating"].status, rows["mutating"].changed_inputs) == ("error", ("key",))
