"""Kernels that replace a function on which the measurement relies."""

from __future__ import annotations

import ast
import builtins
import importlib.util
import inspect
import secrets
import textwrap
from collections.abc import Callable, Container
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor

from replay.bench.settings import Settings
from replay.isolation import input_perturbation
from replay.isolation.input_perturbation import InputPerturbation
from replay.isolation.trusted_functions import BORROWED, MEASURING, OURS, TrustedFunctions
from replay.timing.rounds import run_rounds
from replay.timing.timer import CudaTimer
from tests.replay.bench.small_kernels import MakeCall, MakeWorkload, Register, rows_of, sdpa


@pytest.mark.parametrize("when", [{1}, {2}, {4}, {6}, range(6, 10**9)], ids=str)
def test_kernel_that_replaces_a_function_costs_its_row_only(
    make_call: MakeCall,
    workload: MakeWorkload,
    kernels: Register,
    quick: Settings,
    monkeypatch: pytest.MonkeyPatch,
    when: Container[int],
) -> None:
    """The kernel replaces the function in its check, its second call, or later measurements."""
    many = replace(quick, rounds=30)
    calls = 0
    monkeypatch.setattr(torch, "isnan", torch.isnan)  # undone after the test in any case

    def replacing(**arguments: Any) -> Tensor:
        nonlocal calls
        calls += 1
        if calls in when:
            torch.isnan = lambda tensor: torch.zeros_like(tensor, dtype=torch.bool)
        return sdpa(**arguments)

    chosen = [kernels("replacing", replacing), *(kernels(f"later-{n}", sdpa) for n in range(3))]
    rows = rows_of(make_call(), workload, many, *chosen)
    reasons = {name: row.reason for name, row in rows.items() if row.status != "ok"}
    assert list(reasons) == ["replacing"]
    assert reasons["replacing"].startswith("replaces torch.isnan, which")


def _constant() -> None:
    input_perturbation.VALUE_SHARE = 10**9  # type: ignore[misc]


def _code() -> None:
    InputPerturbation.apply.__code__ = (lambda self: None).__code__


def _draws() -> None:
    secrets.randbelow = lambda below: 0


def _sorted() -> None:
    builtins.sorted = lambda values, **options: list(values)  # type: ignore[assignment]


def _flip() -> None:
    torch.Tensor.flip = lambda self, *dims: self  # type: ignore[assignment]


def _read() -> None:
    torch.Tensor.sum = lambda self, *dims: self  # type: ignore[assignment]


@pytest.mark.parametrize(
    ("change", "name"),
    [
        (_read, "torch.Tensor.sum"),
        (_constant, "replay.isolation.input_perturbation.VALUE_SHARE"),
        (_code, "replay.isolation.input_perturbation.InputPerturbation.apply"),
        (_draws, "secrets.randbelow"),
        (_sorted, "builtins.sorted"),
        (_flip, "torch.Tensor.flip"),
    ],
)
def test_changed_functions_are_restored_and_named(change: Callable[[], None], name: str) -> None:
    functions = TrustedFunctions()
    assert functions.restore() == []
    change()
    assert functions.restore() == [name]
    assert functions.restore() == []


def test_changed_defaults_are_restored() -> None:
    functions = TrustedFunctions()
    before = run_rounds.__kwdefaults__
    run_rounds.__kwdefaults__ = {**before, "synchronous": True}
    assert functions.restore() == ["replay.timing.rounds.run_rounds"]
    assert run_rounds.__kwdefaults__ is before


def test_earlier_replacement_may_lack_a_module(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def equal(one: Tensor, other: Tensor) -> bool:
        return bool((one == other).all())

    equal.__module__ = None  # type: ignore[assignment]
    monkeypatch.setattr(torch, "equal", equal)
    assert TrustedFunctions().restore() == []


def test_functions_of_torch_compile_may_disappear(monkeypatch: pytest.MonkeyPatch) -> None:
    """torch.compile creates functions for a plan, and deletes them when torch.compile is reset."""
    for name in ("__compiled_fn_83_8571608c", "__resume_at_12_4"):
        monkeypatch.setitem(vars(input_perturbation), name, lambda: None)
    functions = TrustedFunctions()
    for name in ("__compiled_fn_83_8571608c", "__resume_at_12_4"):
        monkeypatch.delitem(vars(input_perturbation), name)
    assert functions.restore() == []


def test_everything_that_a_timed_sample_uses_is_trusted() -> None:
    """The functions are read from the GPU timer's source, except functions that could only fail."""
    source = ast.parse(textwrap.dedent(inspect.getsource(CudaTimer)))
    called = {ast.unparse(node.func) for node in ast.walk(source) if isinstance(node, ast.Call)}
    of_torch = {name for name in called if name.startswith("torch.")}
    of_tensors = {
        f"torch.Tensor.{name.removeprefix('self.unrelated.')}"
        for name in called
        if name.startswith("self.unrelated.")
    }
    watched = {
        f"{getattr(owner, '__module__', '') + '.' if isinstance(owner, type) else ''}"
        f"{owner.__name__}.{name}"
        for owner, names in BORROWED
        for name in names
    }
    assert of_tensors
    harmless = {"torch.cuda.device", "torch.cuda.get_device_properties"}
    assert of_torch | of_tensors <= watched | harmless


@pytest.mark.parametrize("package", [*OURS, *MEASURING])
def test_package_that_is_trusted_exists(package: str) -> None:
    assert importlib.util.find_spec(package) is not None
