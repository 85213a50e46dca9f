"""A kernel's changes to the process are restored, and the row names them."""

import gc
import os
import random
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy
import pytest
import torch

from replay.isolation.process_state import ProcessState
from replay.isolation.state_snapshot import SETTINGS, _cores


def _contradictory_precisions() -> None:
    """Set contradictory precisions, so that PyTorch raises an error when one of them is read."""
    torch.set_float32_matmul_precision("medium")
    torch.backends.cuda.matmul.allow_tf32 = True


CHANGES: dict[str, Callable[[], Any]] = {
    "torch.backends.cuda.flash_sdp": lambda: torch.backends.cuda.enable_flash_sdp(
        not torch.backends.cuda.flash_sdp_enabled()
    ),
    "torch.get_default_dtype": lambda: torch.set_default_dtype(torch.float64),
    "torch.get_num_threads": lambda: torch.set_num_threads(torch.get_num_threads() + 1),
    "torch.set_flush_denormal": lambda: torch.set_flush_denormal(True),
    "torch.get_float32_matmul_precision": _contradictory_precisions,
    "torch.get_default_device": lambda: torch.set_default_device("meta"),
    "torch.is_grad_enabled": lambda: torch.set_grad_enabled(True),
    "torch.backends.cudnn.benchmark": lambda: setattr(torch.backends.cudnn, "benchmark", True),
    "gc.get_threshold": lambda: gc.set_threshold(1, 1, 1),
    "gc.isenabled": gc.disable,
    "os.environ": lambda: os.environ.update(ATTENTION_REPLAY_TEST="1"),
    "os.getcwd": lambda: os.chdir("/"),
    "os.sched_getaffinity": lambda: os.sched_setaffinity(0, {min(os.sched_getaffinity(0))}),
    "torch.manual_seed": lambda: torch.manual_seed(torch.initial_seed() + 1),
}


@pytest.mark.parametrize("name", CHANGES)
def test_setting_is_restored_and_flagged(name: str) -> None:
    if name == "torch.set_flush_denormal" and not torch.set_flush_denormal(False):
        pytest.skip("this processor cannot flush denormals")
    if name == "os.sched_getaffinity" and not (_cores() and len(os.sched_getaffinity(0)) > 1):
        pytest.skip("no cores can be chosen")

    @torch.no_grad()
    def flags() -> tuple[tuple[str, ...], tuple[str, ...]]:
        process_state, before = ProcessState(), SETTINGS[name].read()
        CHANGES[name]()
        process_state.restore("mine")
        process_state.restore("other")
        assert SETTINGS[name].read() == before
        return process_state.flags("mine"), process_state.flags("other")

    with ThreadPoolExecutor(1) as thread:  # cores belong to a thread on Linux
        assert thread.submit(flags).result() == ((f"changes {name}",), ())


@torch.no_grad()
def test_backend_order_of_pytorch_is_kept() -> None:
    process_state, before = ProcessState(), torch._C._get_sdp_priority_order()
    cudnn_first = [3, *(backend for backend in before if backend != 3)]
    try:
        for order, flags in ((cudnn_first, 0), (before[::-1], 1)):
            torch._C._set_sdp_priority_order(order)
            process_state.restore("mine")
            assert len(process_state.flags("mine")) == flags
            assert torch._C._get_sdp_priority_order() == cudnn_first
    finally:
        torch._C._set_sdp_priority_order(before)


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


def test_permanent_change_is_blamed_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
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


def test_settings_of_torch_compile_are_not_flagged(monkeypatch: pytest.MonkeyPatch) -> None:
    process_state = ProcessState()
    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", "/tmp/inductor")
    monkeypatch.setenv("TRITON_INTERPRET", "1")
    process_state.restore("compiled")
    assert process_state.flags("compiled") == ("changes os.environ",)
    assert os.environ["TORCHINDUCTOR_CACHE_DIR"] == "/tmp/inductor"
    assert "TRITON_INTERPRET" not in os.environ
