"""A replay with more shapes than `torch.compile`'s limit of recompilations."""

from __future__ import annotations

import subprocess
import sys

import pytest
import torch
from torch import Tensor

from replay.kernels.compiled_functions import CompiledPerSignature

MORE_THAN_THE_LIMIT = 12


@pytest.fixture
def graphs(monkeypatch: pytest.MonkeyPatch) -> list[dict[str, object]]:
    """Options of every compilation; graphs run as traced, which is cheap."""
    asked: list[dict[str, object]] = []
    compile_ = torch.compile

    def compile_without_codegen(function: object, **options: object) -> object:
        asked.append(options)
        return compile_(function, backend="eager", fullgraph=True, dynamic=False)  # type: ignore[call-overload]

    monkeypatch.setattr(torch, "compile", compile_without_codegen)
    return asked


def test_more_shapes_than_the_recompile_limit(graphs: list[dict[str, object]]) -> None:
    from torch._dynamo import config

    assert config.recompile_limit < MORE_THAN_THE_LIMIT

    def add_one(tensor: Tensor, *, twice: bool = False) -> Tensor:
        # fullgraph: past the limit this would raise instead of silently running eagerly
        return tensor + (2 if twice else 1)

    compiled = CompiledPerSignature(add_one, "max-autotune")
    for length in range(1, MORE_THAN_THE_LIMIT + 1):
        assert torch.equal(compiled(torch.zeros(length)), torch.ones(length))
    assert len(graphs) == MORE_THAN_THE_LIMIT
    assert {option["mode"] for option in graphs} == {"max-autotune"}
    assert all(option["fullgraph"] and option["dynamic"] is False for option in graphs)

    assert torch.equal(compiled(torch.zeros(3), twice=True), torch.full((3,), 2.0))
    assert len(graphs) == MORE_THAN_THE_LIMIT + 1
    compiled(torch.zeros(3))
    compiled(tensor=torch.zeros(3))
    assert len(graphs) == MORE_THAN_THE_LIMIT + 1


def test_strides_and_dtypes_are_kinds_of_their_own(graphs: list[dict[str, object]]) -> None:
    def double(tensor: Tensor) -> Tensor:
        return tensor * 2

    compiled = CompiledPerSignature(double)
    compiled(torch.ones(4, 4))
    compiled(torch.ones(4, 4).T[:, :])
    compiled(torch.ones(4, 4, dtype=torch.float16))
    assert len(graphs) == 3
    assert compiled.__name__ == "double"  # type: ignore[attr-defined]


@pytest.mark.parametrize(("mode", "threads"), [("default", 1), ("max-autotune", 7)])
def test_no_pool_of_processes_compiles_a_single_program(
    monkeypatch: pytest.MonkeyPatch, mode: str, threads: int
) -> None:
    """Compiling processes would import PyTorch again while other kernels are timed."""
    from torch._inductor import config

    seen: list[int | None] = []
    compile_ = torch.compile

    def compile_without_codegen(function: object, **options: object) -> object:
        def backend(graph: torch.fx.GraphModule, inputs: list[Tensor]) -> object:
            seen.append(config.compile_threads)
            return graph.forward

        return compile_(function, backend=backend, fullgraph=True, dynamic=False)  # type: ignore[call-overload]

    def double(tensor: Tensor) -> Tensor:
        return tensor * 2

    monkeypatch.setattr(torch, "compile", compile_without_codegen)
    with config.patch(compile_threads=7):
        compiled = CompiledPerSignature(double, mode)
        for _ in range(2):
            assert torch.equal(compiled(torch.ones(3)), torch.full((3,), 2.0))
        assert seen == [threads]
        assert config.compile_threads == 7


@pytest.mark.slow
def test_the_compiler_is_imported_without_looking_for_garbage() -> None:
    code = (
        "import gc, sys; from replay.kernels.compiled_functions import import_compiler;"
        "found = []; gc.callbacks.append(lambda *each: found.append(each));"
        "import_compiler(); assert 'torch._dynamo' in sys.modules; assert gc.isenabled();"
        "assert len(found) < 10, len(found)"  # kernels right after it; each counts twice
    )
    subprocess.run([sys.executable, "-c", code], check=True)
