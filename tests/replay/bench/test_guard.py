"""What a kernel changes for others is put back, and named."""

from __future__ import annotations

import os
import sys
import time
from collections.abc import Callable
from typing import Any

import pytest
import torch

from replay.bench.guard import Guard


def slower() -> float:
    return 0.0


CHANGES: dict[str, Callable[[], Any]] = {
    "torch.backends.cuda.flash_sdp": lambda: torch.backends.cuda.enable_flash_sdp(
        not torch.backends.cuda.flash_sdp_enabled()
    ),
    "torch.get_default_dtype": lambda: torch.set_default_dtype(torch.float64),
    "torch.get_num_threads": lambda: torch.set_num_threads(torch.get_num_threads() + 1),
    "torch.set_flush_denormal": lambda: torch.set_flush_denormal(True),
    "os.environ": lambda: os.environ.update(ATTENTION_REPLAY_TEST="1"),
    "os.getcwd": lambda: os.chdir("/"),
}


@pytest.mark.parametrize("name", CHANGES)
def test_a_setting_is_put_back_and_flagged(name: str) -> None:
    if name == "torch.set_flush_denormal" and not torch.set_flush_denormal(False):
        pytest.skip("this processor cannot flush denormals")
    guard = Guard()
    CHANGES[name]()
    guard.settle("mine")
    assert guard.flags("mine") == (f"changes {name}",)
    assert guard.replaced("mine") == ""
    guard.settle("other")
    assert guard.flags("other") == ()
    assert "ATTENTION_REPLAY_TEST" not in os.environ


@pytest.mark.parametrize(
    ("owner", "name"),
    [(time, "perf_counter"), (torch.nn.functional, "scaled_dot_product_attention")],
)
def test_a_function_is_put_back_and_costs_the_row(
    owner: Any, name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    guard, real = Guard(), getattr(owner, name)
    monkeypatch.setattr(owner, name, slower)
    guard.settle("mine", thoroughly=False)
    assert guard.replaced("mine") == ""
    guard.settle("mine")
    assert guard.replaced("mine").startswith(f"replaces {owner.__name__}.{name}, which")
    assert getattr(owner, name) is real


def test_a_method_that_a_class_inherits_is_put_back(monkeypatch: pytest.MonkeyPatch) -> None:
    guard = Guard()
    torch.Tensor.clone = lambda self: self  # type: ignore[assignment, method-assign]
    guard.settle("mine")
    assert ".Tensor.clone" in guard.replaced("mine")
    assert torch.ones(2).clone().sum() == 2


def test_a_hook_that_runs_after_the_kernel_is_found_at_once() -> None:
    guard, before = Guard(), sys.getprofile()
    sys.setprofile(lambda frame, event, argument: None)
    guard.settle("mine", thoroughly=False)
    assert guard.replaced("mine").startswith("replaces sys.getprofile, which")
    assert sys.getprofile() is before
