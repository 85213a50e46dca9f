"""The folder for the Hugging Face Hub is a copy of attention_kernels with a name of its own."""

import importlib.util
import json
import sys
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch

from compatibility.hub import REPOSITORY, VARIANT, build
from tests.test_architecture import import_graph

pytest.importorskip("triton")


@pytest.fixture(scope="module")
def variant(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return build(tmp_path_factory.mktemp("hub"))


@pytest.fixture(params=["importlib", "kernels"])
def copy(request: pytest.FixtureRequest, variant: Path) -> Iterator[ModuleType]:
    """The variant, imported under its id by `kernels`, and in the same way without `kernels`."""
    name = json.loads((variant / "metadata.json").read_text())["id"]
    with pytest.MonkeyPatch.context() as patch:
        if not torch.cuda.is_available():
            patch.setenv("TRITON_INTERPRET", "1")
        if request.param == "kernels":
            yield pytest.importorskip("kernels", minversion="0.17").get_local_kernel(variant)
        else:
            spec: Any = importlib.util.spec_from_file_location(name, variant / "__init__.py")
            module = sys.modules[name] = importlib.util.module_from_spec(spec)
            spec.loader.exec_module(module)
            yield module
    for each in [each for each in sys.modules if each.partition(".")[0] == name]:
        del sys.modules[each]


def test_copy_imports_itself_alone(variant: Path) -> None:
    def graph(package: str, root: Path) -> set[tuple[str, str]]:
        found = import_graph(package, root).items()
        pairs = ((name, other) for name, others in found for other in others)
        return {(a.removeprefix(package), b.removeprefix(package)) for a, b in pairs}

    assert graph(VARIANT, variant.parent) == graph("attention_kernels", REPOSITORY)


def test_copy_runs_beside_the_package(copy: ModuleType) -> None:
    import attention_kernels as ak

    device = "cuda" if torch.cuda.is_available() else "cpu"
    tensors = [torch.randn(1, 2, 20, 32, device=device).half() for _ in range(3)]
    expected = torch.nn.functional.scaled_dot_product_attention(*(each.float() for each in tensors))
    for package in (copy, ak):
        assert all(hasattr(package, name) for name in ak.__all__)  # imports every operator
        compiled = torch.compile(package.attention, fullgraph=True, backend="aot_eager")
        for attend in (package.attention, compiled):
            torch.testing.assert_close(attend(*tensors).float(), expected, rtol=0, atol=3e-3)
    names = [name.split("::") for name in torch._C._dispatch_get_all_op_names()]
    operators = {package: {op for space, op in names if space == package} for package, _ in names}
    assert operators[copy.__name__] == operators["attention_kernels"]
    assert copy.attention is not ak.attention
