"""A kernel's changes to the process are restored, and the row names them."""

from __future__ import annotations

import gc
import os
import random
import re
import signal
import sys
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy
import pytest
import torch
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode

from replay.isolation import state_snapshot
from replay.isolation.process_state import ProcessState


def slower() -> float:
    return 0.0


ENTERED = [torch.inference_mode()]


def _contradictory_precisions() -> None:
    """Set contradictory precisions, so that PyTorch raises an error when one of them is read."""
    torch.set_float32_matmul_precision("medium")
    torch.backends.cuda.matmul.allow_tf32 = True


def _set_grad_enabled() -> None:
    torch.set_grad_enabled(True)


class Twice(TorchFunctionMode):
    def __torch_function__(
        self, function: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        function(*args, **(kwargs or {}))
        return function(*args, **(kwargs or {}))


class TwiceDispatched(TorchDispatchMode):
    def __torch_dispatch__(
        self, function: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        function(*args, **(kwargs or {}))
        return function(*args, **(kwargs or {}))


HAS_ORDER = hasattr(torch._C, "_get_sdp_priority_order")
CHANGES: dict[str, Callable[[], Any]] = {
    "torch.backends.cuda.flash_sdp": lambda: torch.backends.cuda.enable_flash_sdp(
        not torch.backends.cuda.flash_sdp_enabled()
    ),
    "torch.get_default_dtype": lambda: torch.set_default_dtype(torch.float64),
    "torch.get_num_threads": lambda: torch.set_num_threads(torch.get_num_threads() + 1),
    "torch.set_flush_denormal": lambda: torch.set_flush_denormal(True),
    "torch.get_float32_matmul_precision": _contradictory_precisions,
    "torch.get_default_device": lambda: torch.set_default_device("meta"),
    "torch.is_grad_enabled": _set_grad_enabled,
    "torch.is_inference_mode_enabled": lambda: ENTERED[0].__enter__(),
    "gc.get_threshold": lambda: gc.set_threshold(1, 1, 1),
    "signal.getsignal": lambda: signal.signal(signal.SIGALRM, signal.SIG_IGN),
    "signal.getitimer": lambda: signal.setitimer(signal.ITIMER_PROF, 1000),
    "os.environ": lambda: os.environ.update(ATTENTION_REPLAY_TEST="1"),
    "os.getcwd": lambda: os.chdir("/"),
    "torch.manual_seed": lambda: torch.manual_seed(torch.initial_seed() + 1),
}
if HAS_ORDER:
    CHANGES["the order of SDPA's backends"] = lambda: torch._C._set_sdp_priority_order(
        torch._C._get_sdp_priority_order()[::-1]
    )


@pytest.mark.parametrize("name", CHANGES)
@torch.no_grad()
def test_setting_is_restored_and_flagged(name: str) -> None:
    if name == "torch.set_flush_denormal" and not torch.set_flush_denormal(False):
        pytest.skip("this processor cannot flush denormals")
    process_state = ProcessState()
    CHANGES[name]()
    process_state.restore("mine")
    assert process_state.flags("mine") == (f"changes {name}",)
    assert process_state.replaced("mine") == ""
    process_state.restore("other")
    assert process_state.flags("other") == ()
    assert "ATTENTION_REPLAY_TEST" not in os.environ


@pytest.mark.filterwarnings("ignore::UserWarning")
def test_replaced_operator_is_restored_and_flagged() -> None:
    """PyTorch's operators are restored if a package replaces them; its own operators are kept."""
    process_state, numbers = ProcessState(), torch.ones(3)
    ours = torch.library.Library("attention_replay_test", "DEF")
    ours.define("twice(Tensor numbers) -> Tensor")
    ours.impl("twice", lambda numbers: numbers * 2, "CPU")
    process_state.restore("honest")
    assert process_state.flags("honest") == ()
    library = torch.library.Library("aten", "IMPL")
    library.impl("neg_", lambda numbers: numbers, "CPU")
    assert float(numbers.neg_().sum()) == 3
    process_state.restore("mine")
    assert process_state.flags("mine") == (
        "changes torch.library's kernels for PyTorch's operators",
    )
    assert process_state.disturbing() == ["mine"]
    assert float(numbers.neg_().sum()) == -3
    assert float(torch.ops.attention_replay_test.twice(numbers).sum()) == -6


GENERATORS: dict[str, tuple[Callable[[], Any], Callable[[], Any]]] = {
    "python": (random.random, lambda: random.seed(0)),
    "torch": (lambda: float(torch.rand(())), lambda: torch.set_rng_state(torch.get_rng_state())),
    "torch, seeded": (lambda: float(torch.rand(())), lambda: torch.manual_seed(0)),
    "numpy": (numpy.random.random, lambda: numpy.random.seed(0)),
}


@pytest.mark.parametrize("name", GENERATORS)
def test_random_numbers_are_restored(name: str) -> None:
    """Drawing numbers is allowed; seeding is flagged where it can be told apart from drawing."""
    draw, seed = GENERATORS[name]
    process_state = ProcessState()
    draw()
    process_state.restore("draws")
    first, second = draw(), draw()
    seed()
    draw()
    process_state.restore("seeds")
    assert (draw(), draw()) == (first, second)
    assert process_state.flags("draws") == ()
    process_state.restore("other")
    assert process_state.flags("other") == ()


@pytest.mark.skipif(not HAS_ORDER, reason="this PyTorch tries SDPA's backends in one order")
def test_backend_order_of_pytorch_is_kept() -> None:
    before = torch._C._get_sdp_priority_order()
    cudnn_first = [3, 1, 2, 0, *before[4:]]
    process_state = ProcessState()
    try:
        torch._C._set_sdp_priority_order(cudnn_first)
        process_state.restore("torch-default")
        assert process_state.flags("torch-default") == ()
        torch._C._set_sdp_priority_order(before[::-1])
        process_state.restore("mine")
        assert process_state.flags("mine") == ("changes the order of SDPA's backends",)
        assert torch._C._get_sdp_priority_order() == cudnn_first
    finally:
        torch._C._set_sdp_priority_order(before)


def in_a_thread(function: Callable[[], Any]) -> Any:
    """Run a function in a new thread, because cores and niceness belong to a thread on Linux."""
    with ThreadPoolExecutor(1) as thread:
        return thread.submit(function).result()


@pytest.mark.skipif(sys.platform != "linux", reason="no cores can be chosen")
def test_cores_are_restored_and_flagged() -> None:
    if len(os.sched_getaffinity(0)) < 2:
        pytest.skip("one core")

    def flags() -> Any:
        process_state, before = ProcessState(), os.sched_getaffinity(0)
        os.sched_setaffinity(0, {min(before)})
        process_state.restore("mine")
        process_state.restore("other")
        assert os.sched_getaffinity(0) == before
        return process_state.flags("mine"), process_state.flags("other")

    assert in_a_thread(flags) == (("changes os.sched_getaffinity",), ())


@pytest.mark.skipif(sys.platform != "linux", reason="it would last")
def test_niceness_is_flagged_for_one_kernel() -> None:
    """Lowering the niceness again may need privileges."""

    def flags() -> Any:
        process_state = ProcessState()
        os.nice(1)
        process_state.restore("mine")
        process_state.restore("other")
        return process_state.flags("mine"), process_state.flags("other"), process_state.disturbing()

    assert in_a_thread(flags) == (("changes os.getpriority",), (), ["mine"])


@pytest.mark.parametrize(
    ("owner", "name"),
    [(time, "perf_counter"), (torch.nn.functional, "scaled_dot_product_attention")],
)
def test_replaced_function_is_restored_and_costs_the_row(
    owner: Any, name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    process_state, real = ProcessState(), getattr(owner, name)
    monkeypatch.setattr(owner, name, slower)
    process_state.restore("mine")
    assert process_state.replaced("mine").startswith(f"replaces {owner.__name__}.{name}, which")
    assert getattr(owner, name) is real


def test_inherited_method_is_restored(monkeypatch: pytest.MonkeyPatch) -> None:
    process_state = ProcessState()
    torch.Tensor.clone = lambda self: self  # type: ignore[assignment, method-assign]
    process_state.restore("mine")
    assert ".Tensor.clone" in process_state.replaced("mine")
    assert torch.ones(2).clone().sum() == 2


def test_hook_is_found_at_once() -> None:
    process_state, before = ProcessState(), sys.getprofile()
    sys.setprofile(lambda frame, event, argument: None)
    process_state.restore("mine")
    assert process_state.replaced("mine").startswith("replaces sys.getprofile, which")
    assert sys.getprofile() is before


@pytest.mark.parametrize("mode", [Twice(), TwiceDispatched()])
def test_mode_left_behind_is_ended_and_costs_the_row(mode: Any) -> None:
    process_state = ProcessState()
    mode.__enter__()
    process_state.restore("mine")
    assert re.match("replaces the stack of torch .* modes, which", process_state.replaced("mine"))
    process_state.restore("other")
    assert process_state.replaced("other") == ""


def test_permanent_change_is_blamed_on_one_kernel(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    gone = tmp_path / "gone"
    gone.mkdir()
    monkeypatch.chdir(gone)
    process_state = ProcessState()
    os.chdir(tmp_path)
    gone.rmdir()
    process_state.restore("mine")
    process_state.restore("other")
    assert process_state.flags("mine") == ("changes os.getcwd",)
    assert process_state.flags("other") == ()


def test_replaced_function_is_blamed_on_its_kernel(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    process_state = ProcessState()
    for kernel in ("before", "guilty", "after"):
        if kernel == "guilty":
            monkeypatch.setattr(time, "perf_counter", slower)
        process_state.restore(kernel)
    assert process_state.disturbing() == ["guilty"]
    torch.set_default_dtype(torch.float64)
    process_state.restore("another")
    assert process_state.disturbing() == ["another", "guilty"]
    assert process_state.replaced("after") == ""


def test_recursion_limit_may_rise_and_not_fall() -> None:
    process_state, before = ProcessState(), sys.getrecursionlimit()
    try:
        sys.setrecursionlimit(before + 500)
        process_state.restore("compiled")
        assert process_state.flags("compiled") == ()
        sys.setrecursionlimit(min(before, state_snapshot._RECURSION_LIMIT) - 100)
        process_state.restore("mine")
        assert process_state.flags("mine") == ("changes sys.getrecursionlimit",)
        assert sys.getrecursionlimit() >= state_snapshot._RECURSION_LIMIT
    finally:
        sys.setrecursionlimit(before)


def test_settings_of_torch_compile_are_not_flagged(monkeypatch: pytest.MonkeyPatch) -> None:
    process_state = ProcessState()
    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", "/tmp/inductor")
    monkeypatch.setenv("TRITON_INTERPRET", "1")
    process_state.restore("compiled")
    assert process_state.flags("compiled") == ("changes os.environ",)
    assert os.environ["TORCHINDUCTOR_CACHE_DIR"] == "/tmp/inductor"
    assert "TRITON_INTERPRET" not in os.environ
    monkeypatch.setenv("TRITON_CACHE_DIR", "/tmp/triton")
    process_state.restore("compiled too")
    assert process_state.flags("compiled too") == ()
