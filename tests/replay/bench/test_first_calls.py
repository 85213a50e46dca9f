"""Each kernel is first called once so that it compiles; the results are discarded."""

import time
from typing import Any

import torch
from torch import Tensor

from replay.bench.first_calls import first_calls
from replay.bench.settings import Settings
from replay.isolation.process_state import ProcessState
from tests.factories import random_call
from tests.replay.bench.small_kernels import Register, sdpa


def test_first_calls_are_timed(kernels: Register, quick: Settings) -> None:
    called = []

    def compiles(*arguments: Any, **options: Any) -> Tensor:
        called.append("compiles")
        time.sleep(0.02)
        options["query"].zero_()
        return sdpa(*arguments, **options)

    def breaks(*arguments: Any, **options: Any) -> Tensor:
        raise RuntimeError("broken")

    some = [
        kernels("breaks", breaks),
        kernels("refuses", sdpa, unsupported=lambda call: "not today"),
        kernels("compiles", compiles),
        kernels("next", sdpa),
    ]
    call, reported = random_call(), []
    before = call.query.clone()
    process_state = ProcessState()
    torch.set_grad_enabled(torch.is_grad_enabled())
    found = dict(first_calls(call, some, quick, process_state, reported.append))
    assert reported == ["breaks", "breaks", "refuses", "compiles", "compiles", "next", "next"]
    assert list(found) == ["compiles", "next"]
    assert found["compiles"] >= 20
    assert called == ["compiles"]
    assert torch.equal(call.query, before)
