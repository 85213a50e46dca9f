"""Functions are compiled once per kind of call, beyond the limit of `torch.compile`."""

from collections.abc import Iterator

import pytest
import torch
from torch import Tensor

from replay.kernels.compiled_functions import CompiledPerSignature

MORE_THAN_THE_LIMIT = 12


def add_one(tensor: Tensor, *, twice: bool = False) -> Tensor:
    return tensor + (2 if twice else 1)


@pytest.fixture
def graphs(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[dict[str, object]]]:
    """Options and threads of every compilation. Traced graphs run uncompiled, which is cheap."""
    from torch._inductor import config

    compiled: list[dict[str, object]] = []
    compile_ = torch.compile

    def compile_without_codegen(function: object, **options: object) -> object:
        def backend(graph: torch.fx.GraphModule, inputs: list[Tensor]) -> object:
            compiled.append({**options, "threads": config.compile_threads})
            return graph.forward

        # Past the limit of recompilations, fullgraph raises instead of running eagerly.
        return compile_(function, backend=backend, fullgraph=True, dynamic=False)  # type: ignore[call-overload]

    monkeypatch.setattr(torch, "compile", compile_without_codegen)
    with config.patch(compile_threads=7):
        yield compiled


@pytest.mark.parametrize(("mode", "threads"), [("default", 1), ("max-autotune", 7)])
def test_each_shape_compiles_once(graphs: list[dict[str, object]], mode: str, threads: int) -> None:
    """A single program is compiled without a pool of processes, which would import PyTorch again
    while other kernels are timed."""
    assert torch._dynamo.config.recompile_limit < MORE_THAN_THE_LIMIT
    compiled = CompiledPerSignature(add_one, mode)
    for length in [*range(1, MORE_THAN_THE_LIMIT + 1), 3]:
        assert torch.equal(compiled(torch.zeros(length)), torch.ones(length))
    assert torch._inductor.config.compile_threads == 7
    expected = {"mode": mode, "fullgraph": True, "dynamic": False, "threads": threads}
    assert graphs == [expected] * MORE_THAN_THE_LIMIT


def test_strides_dtypes_and_options_are_kinds_of_their_own(graphs: list[dict[str, object]]) -> None:
    compiled = CompiledPerSignature(add_one)
    square = torch.zeros(4, 4)
    for tensor in (square, square.T[:, :], square.half()):
        compiled(tensor)
    assert torch.equal(compiled(square, twice=True), square + 2)
    compiled(tensor=square)
    assert len(graphs) == 4
    assert compiled.__name__ == "add_one"  # type: ignore[attr-defined]


def test_failure_compiles_the_other_autotuned_functions_again(
    graphs: list[dict[str, object]],
) -> None:
    """CUDA graphs of all functions share a memory pool, which a failure resets."""

    def fail(tensor: Tensor) -> Tensor:
        raise MemoryError

    healthy, failing = (CompiledPerSignature(each, "max-autotune") for each in (add_one, fail))
    healthy(torch.zeros(4))
    with pytest.raises(Exception, match=r"MemoryError|Unsupported|Observed"):
        failing(torch.zeros(4))
    healthy(torch.zeros(4))
    assert len(graphs) == 2
