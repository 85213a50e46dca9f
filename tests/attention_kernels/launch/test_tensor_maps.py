"""Tensor maps are kept by address and work with the launchers of the installed Triton.

Without a GPU, no map is encoded. A tuple of the map's contents stands in for the map.
"""

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor
from triton.backends.nvidia import driver as nvidia

from attention_kernels.launch import tensor_maps
from attention_kernels.launch.descriptors import at, described, nowhere
from attention_kernels.launch.tensor_maps import with_maps

SIGNATURE = {0: "*fp16", 1: "tensordesc<fp16[1,1,8,32]>", 2: "i32", 3: "tensordesc<fp16[1,1,8,32]>"}
METADATA = {"swizzle": 2, "elem_size": 2, "elem_type": 6, "block_size": [1, 8], "fp4_padded": False}


class Launcher:
    """Stand-in for Triton's `CudaLauncher`, whose `launch` comes from the driver's function."""

    def __init__(self, signature: dict[int, str], metadata: list[Any]) -> None:
        self.launched: list[list[Any]] = []
        self.launch = nvidia.wrap_handle_tensordesc(self._launch, signature, metadata)

    def _launch(self, *arguments: Any) -> None:
        self.launched.append(list(arguments))


@pytest.fixture
def encoded(monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    addresses: list[Any] = []

    def fill(address: int, *of_map: Any) -> tuple[Any, ...]:
        addresses.append(address)
        return ("map", address, *(tuple(e) if isinstance(e, list) else e for e in of_map))

    utils = SimpleNamespace(fill_tma_descriptor=fill, fill_tma_descriptor_tiled=fill)
    active = SimpleNamespace(utils=utils)
    monkeypatch.setattr(nvidia.triton.runtime, "driver", SimpleNamespace(active=active))
    return addresses


def tensor() -> Tensor:
    return torch.zeros(2, 3, 16, 32, dtype=torch.float16)


def test_the_installed_triton_is_put_together_as_we_think(encoded: list[Any]) -> None:
    """If this check fails, Triton launches every kernel, which is correct but slower."""
    run = Launcher(SIGNATURE, [METADATA] * 2)
    kept = nowhere(described(tensor(), 8, 32))
    unwrapped, maps = with_maps(run, [(1, kept), (3, kept)])
    assert unwrapped.launch == run._launch  # type: ignore[attr-defined]
    for first, second in ((tensor(), tensor()), (tensor(), tensor())):
        arguments: list[Any] = [11, first.data_ptr(), 5, second.data_ptr()]
        maps.replace(arguments)
        launched = len(run.launched)
        launch_by_triton(run, [11, at(kept, first), 5, at(kept, second)])
        assert kernel_arguments(run.launched[launched]) == arguments


def launch_by_triton(run: Launcher, arguments: list[Any]) -> None:
    """Launch as the installed version of Triton does."""
    base = getattr(nvidia, "_BASE_ARGS_FORMAT_LEN", None)
    if base is None:
        run.launch(arguments)
    else:
        run.launch(*range(base), *arguments)


def kernel_arguments(launched: list[Any]) -> list[Any]:
    base = getattr(nvidia, "_BASE_ARGS_FORMAT_LEN", None)
    return list(launched[0]) if base is None else launched[base:]


def test_an_address_has_one_map(encoded: list[Any], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tensor_maps, "MOST_KEPT", 2)
    kept = nowhere(described(tensor(), 8, 32))
    _, maps = with_maps(Launcher({0: SIGNATURE[1]}, [METADATA]), [(0, kept)])
    for address in (16, 32, 16, 32, 48, 48, 16):
        arguments: list[Any] = [address, 7]
        maps.replace(arguments)
        assert arguments[0][:2] == ("map", address)
        assert arguments[1:] == [2, 3, 16, 32, *kept.strides, 7]
    assert encoded == [16, 32, 48, 16]  # only two maps are kept


def test_other_launchers_are_left_alone() -> None:
    kept = nowhere(described(tensor(), 8, 32))
    for run, descriptors in (
        (lambda *arguments: None, [(0, kept)]),  # a function instead of a launcher
        (Launcher({0: "*fp16"}, []), []),  # without descriptors
        (Launcher(SIGNATURE, [METADATA] * 2), [(1, kept)]),  # descriptors at other places
        (SimpleNamespace(launch=lambda *arguments: None), [(0, kept)]),  # an unknown wrapper
    ):
        assert with_maps(run, descriptors) == (run, None)
