"""Fixtures of the tests of our kernels; `tests/conftest.py` sets up how the kernels run."""

from __future__ import annotations

import importlib.util
from collections.abc import Callable, Iterator
from dataclasses import replace

import pytest
import torch
from torch import Tensor

from capture.call.attention_call import AttentionCall
from replay.accuracy.verdict import Expected, judge
from replay.rows.errors_of_output import AccuracyClass

collect_ignore_glob = [] if importlib.util.find_spec("triton") else ["*/test_*.py", "test_[!i]*.py"]


@pytest.fixture
def device() -> torch.device:
    """A GPU, where kernels run compiled, or the CPU, where they are interpreted."""
    return torch.device("cuda" if torch.cuda.is_available() else "cpu")


@pytest.fixture
def assert_right() -> Callable[..., None]:
    """Return `assert_right(output, reference, call, "exact")`, which applies the replay's own
    verdict."""

    def check(
        output: Tensor,
        reference: Tensor,
        call: AttentionCall,
        accuracy_class: AccuracyClass = "exact",
    ) -> None:
        assert output.dtype == call.dtype
        verdict = judge(output, replace(Expected.of(call), reference=reference), accuracy_class)
        assert verdict.passed, verdict.sentence

    return check


@pytest.fixture(scope="module", params=["as small", "as large"])
def size(request: pytest.FixtureRequest) -> Iterator[None]:
    """Run tests with the loads of small calls, through pointers, and with those of larger ones."""
    from attention_kernels.launch.launcher import PlanCache
    from attention_kernels.portable import forward

    with pytest.MonkeyPatch.context() as patched:
        if request.param == "as large":
            patched.setattr(forward, "is_small", lambda *tensors: False)
            patched.setattr(forward, "_calls", PlanCache())
        yield
