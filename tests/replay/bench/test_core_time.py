"""A kernel's core is timed in addition to its drop-in call, and judged in the same way."""

import re
from collections.abc import Callable
from functools import partial

import pytest
import torch
from torch import Tensor

from capture.call.attention_call import AttentionCall
from replay.kernels.registry import ScaledCore
from tests.factories import random_call
from tests.replay.bench.small_kernels import Register, Replayed, raising, sdpa


def test_core_is_timed_and_costs_no_row_when_it_fails(
    replayed: Replayed, kernels: Register
) -> None:
    def prepare(call: AttentionCall) -> Callable[[], Tensor]:
        arguments = call.arguments()
        return lambda: sdpa(**arguments)

    def failing(call: AttentionCall) -> Callable[[], Tensor]:
        raise RuntimeError("no core")

    bad = raising(RuntimeError("bad core"))
    rows = replayed(
        random_call(),
        kernels("with-core", sdpa, prepare=prepare),
        kernels("no-core", sdpa, prepare=failing),
        kernels("bad-core", sdpa, prepare=lambda call: partial(bad, *[call.query] * 3)),
    )
    core = rows["with-core"].core_time_ms
    assert core.n == 3
    assert rows["with-core"].time_ms is not None
    for name, reason in (("no-core", "no core"), ("bad-core", "bad core")):
        assert rows[name].status == "ok"
        assert rows[name].time_ms is not None
        assert rows[name].core_time_ms is None
        assert rows[name].flags == (f"no core time: RuntimeError: {reason}",)


def test_core_that_changes_inputs_spoils_no_row(replayed: Replayed, kernels: Register) -> None:
    def prepare(call: AttentionCall, changes: bool) -> Callable[[], Tensor]:
        def core() -> Tensor:
            output = sdpa(**call.arguments())
            if changes:
                call.value.add_(1.0)
            return output

        return core

    rows = replayed(
        random_call(),
        kernels("changing", sdpa, prepare=partial(prepare, changes=True)),
        kernels("clean", sdpa, prepare=partial(prepare, changes=False)),
    )
    for name in ("changing", "clean"):
        assert rows[name].flags == ()
        assert rows[name].core_time_ms is not None


def test_core_is_judged_by_its_scaled_product(replayed: Replayed, kernels: Register) -> None:
    def prepare(call: AttentionCall, scale: float) -> Callable[[], Tensor]:
        return ScaledCore(lambda: sdpa(**call.arguments()) / 4, torch.tensor(scale))

    rows = replayed(
        random_call(),
        kernels("right", sdpa, prepare=partial(prepare, scale=4.0)),
        kernels("wrong", sdpa, prepare=partial(prepare, scale=1.0)),
    )
    assert rows["right"].core_time_ms is not None
    assert rows["right"].flags == ()
    assert rows["wrong"].core_time_ms is None
    assert rows["wrong"].flags[0].startswith("no core time: it is wrong")


@pytest.mark.parametrize(
    ("change", "fault"),
    [
        (lambda output: output.double(), None),
        (lambda output: output * 1.01, "it is wrong: .* max abs error .* exceeds"),
        (lambda output: output * torch.nan, "it is wrong: .* are NaN or infinite"),
        (lambda output: output.transpose(1, 2), r"returned shape \(1, 9, 2, 32\), expected"),
        (lambda output: (output, None), "returned tuple, not a tensor"),
    ],
)
def test_core_that_returns_something_else_has_no_time(
    replayed: Replayed, kernels: Register, change: Callable[[Tensor], Tensor], fault: str | None
) -> None:
    def prepare(call: AttentionCall) -> Callable[[], Tensor]:
        arguments = call.arguments()
        return lambda: change(sdpa(**arguments))

    rows = replayed(random_call(), kernels("cored", sdpa, prepare=prepare))
    row = rows["cored"]
    assert row.status == "ok"
    assert (row.core_time_ms is None) == bool(row.flags) == (fault is not None)
    if fault is not None:
        assert re.match(f"no core time: {fault}", row.flags[0]), row.flags
