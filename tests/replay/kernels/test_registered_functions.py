"""Worker processes import the functions that the user registered as kernels."""

import functools
import importlib
import json
import sys
import types
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

import attention_replay as ar
from replay.api.chosen_device import ChoiceError
from replay.kernels import registered_functions, registry
from replay.kernels.registered_functions import VARIABLE, address_of, source_of, sources
from replay.kernels.registry import find, register_kernel
from replay.workers.process import IN_A_WORKER, Process
from tests.factories import random_call

MINE = """
import attention_replay as ar
from torch.nn.functional import scaled_dot_product_attention

@ar.register_kernel("own", unsupported=lambda call: "causal" if call.is_causal else None)
def attend(query, key, value, *others, **options):
    return scaled_dot_product_attention(query, key, value, *others, **options)

def bare(query, key, value, *others, **options): ...
"""
QUICK: dict[str, Any] = {"device": "cpu", "rounds": 3, "progress": False}


@pytest.fixture
def mine(kernels: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> types.ModuleType:
    """Return a user's module, whose kernel `own` is registered until the test ends."""
    (tmp_path / "module_of_user.py").write_text(MINE)
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.setattr(registered_functions, "functions", {})
    monkeypatch.setattr("replay.kernels.registry.functions", registered_functions.functions)
    monkeypatch.delitem(sys.modules, "module_of_user", raising=False)
    return importlib.import_module("module_of_user")


def test_address_imports_the_same(mine: types.ModuleType, monkeypatch: pytest.MonkeyPatch) -> None:
    assert address_of(mine.attend) == "module_of_user:attend"
    script = types.ModuleType("__main__")
    script.__file__ = mine.__file__
    monkeypatch.setitem(sys.modules, "__main__", script)
    exec(MINE.replace('"own"', '"script"'), vars(script))
    assert address_of(script.attend) == f"{mine.__file__}:attend"
    del script.__file__  # a notebook
    assert (address_of(script.attend), source_of(script.attend)) == ("", "__main__")


@pytest.mark.parametrize(
    "function",
    [
        lambda query, key, value: query,
        torch.nn.Identity().__call__,
        functools.partial(random_call),
        functools.wraps(random_call)(lambda *others, **named: None),
        torch.nn.functional.scaled_dot_product_attention,
    ],
)
def test_function_needs_address(kernels: Any, recorded: Path, function: Callable[..., Any]) -> None:
    assert address_of(function) == ""
    register_kernel("own")(function)
    for choice in ({"kernels": "own"}, {"kernels": "torch-math", "baseline": "own"}):
        with pytest.raises(ChoiceError, match=r"cannot import .* own: define it at the top level"):
            ar.replay(recorded, **QUICK, **choice)
    with pytest.raises(ChoiceError, match="cannot import"):
        ar.doctor(recorded, "own", device="cpu", progress=False)


def test_function_without_a_name_is_refused(recorded: Path) -> None:
    with pytest.raises(ChoiceError, match="kernels have names: register random_call with"):
        ar.replay(recorded, kernels=["torch-math", random_call], **QUICK)


def test_worker_imports_a_registered_function(mine: types.ModuleType) -> None:
    """The worker also applies the limits that the registration states."""
    assert sources("torch-math,own") == [mine.__file__]
    calls = [random_call(), random_call(is_causal=True)]
    rows = ar.replay(calls, kernels="own", **QUICK)
    of_user = {row.status: row for row in rows if row.kernel == "own"}
    assert [*of_user] == ["ok", "unsupported"]
    assert {row.process for row in of_user.values()} == {mine.__file__}
    assert not any("process that timed" in flag for flag in of_user["ok"].flags)


def test_limits_that_an_import_does_not_register_are_an_error(
    mine: types.ModuleType, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Without the limits, a worker would judge another kernel than the user registered."""
    register_kernel("plain")(mine.bare)
    register_kernel("limited", accuracy_class="quantised")(mine.bare)
    given = registered_functions.variables(sys.executable)
    assert json.loads(registered_functions.variables("other")[VARIABLE])["folders"] == []
    monkeypatch.setenv(VARIABLE, given[VARIABLE])
    for name in ("plain", "limited"):  # as in a worker, which has not imported the module
        monkeypatch.delitem(registry._kernels, name)
    assert find("plain").loaded().attention is mine.bare
    with pytest.raises(ar.Error, match="module_of_user does not register bare as limited"):
        find("limited").loaded()


def test_file_that_a_worker_imports_starts_no_replay(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(IN_A_WORKER, "1")
    with pytest.raises(ar.Error, match="put what starts a replay under `if __name__"):
        Process(sys.executable, 10).start()
