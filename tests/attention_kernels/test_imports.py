"""`attention_kernels` imports in the documented order, and explains itself without Triton."""

import re
import subprocess
import sys
from graphlib import TopologicalSorter

import attention_kernels
from tests.gpu.attention_kernels import test_public_functions
from tests.test_architecture import import_graph, imports

WITHOUT_TRITON = """
import importlib.metadata, sys
sys.modules["triton"] = None  # every import of it fails
version = importlib.metadata.version

def hidden(name):
    if name == "triton":
        raise importlib.metadata.PackageNotFoundError(name)
    return version(name)

importlib.metadata.version = hidden
import attention_kernels
for name in attention_kernels.__all__:
    try:
        getattr(attention_kernels, name)
    except ImportError as error:
        print(error)
"""


def test_kernels_import_torch_triton_and_themselves_only() -> None:
    packages = {
        name.partition(".")[0]
        for importing, name in imports("attention_kernels")
        if "integrations" not in importing.parts
    }
    assert packages - sys.stdlib_module_names == {"attention_kernels", "torch", "triton"}


def test_folders_import_from_those_drawn_below() -> None:
    lines = re.findall(r"^    (\w+)(?:/|\.py) ", attention_kernels.__doc__ or "", re.MULTILINE)
    rank = {name: place for place, name in enumerate(lines)}
    graph = import_graph("attention_kernels")
    TopologicalSorter(graph).prepare()  # a CycleError names the cycle
    graph.pop("attention_kernels")  # this module's imports are lazy or for type checkers
    folders = {name.split(".")[1] for name in graph}
    assert folders == set(lines)
    for importing, others in graph.items():
        for imported in others:
            above, below = importing.split(".")[1], imported.split(".")[1]
            assert rank[above] <= rank[below], f"{importing} imports {imported}"
    assert sum(map(len, graph.values())) > 150


def test_public_names_stay_functions() -> None:
    """A module with a function's name would replace the function once it is imported."""
    for name in attention_kernels.__all__:
        first, again = getattr(attention_kernels, name), getattr(attention_kernels, name)
        assert first is again
        assert callable(first) or name == "PLAIN"
    assert set(attention_kernels.__all__) <= set(dir(attention_kernels))
    assert sorted(attention_kernels._MODULES) == sorted(attention_kernels.__all__)


def test_gpu_tests_call_every_public_function() -> None:
    test_public_functions.test_every_public_name_is_called()


def test_each_kernel_is_refused_by_name_without_triton() -> None:
    run = subprocess.run(
        [sys.executable, "-c", WITHOUT_TRITON], capture_output=True, text=True, check=True
    )
    lines = run.stdout.splitlines()
    plain = {"PLAIN", "AttentionOptions", "BlockPolicy", "kept_blocks", "register"}
    names = [name for name in attention_kernels.__all__ if name not in plain]
    assert lines == [f"attention_kernels.{name} needs Triton: pip install triton" for name in names]
