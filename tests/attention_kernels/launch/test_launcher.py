"""Kernels are launched on a stand-in for Triton's compiled kernels."""

from types import SimpleNamespace
from typing import Any

import pytest
import torch
import triton
from torch import Tensor
from triton.runtime.errors import OutOfResources

from attention_kernels.launch import launcher as launch_module
from attention_kernels.launch import workspace
from attention_kernels.launch.descriptors import at, described, nowhere
from attention_kernels.launch.launcher import Launch, layout

DEVICE = torch.device("cpu")
GRID = (3, 2, 1)
STREAM = 17


@pytest.fixture(autouse=True)
def _current_stream(monkeypatch: pytest.MonkeyPatch) -> None:
    """Replace the current stream, because Triton has no driver without a GPU."""
    active = SimpleNamespace(get_current_stream=lambda device: STREAM + device)
    monkeypatch.setattr(launch_module, "driver", SimpleNamespace(active=active))


class Kernel:
    """Stand-in for a `triton.jit` function, which compiles for its arguments and launches."""

    arg_names = ("query", "mask", "output", "length", "BLOCK")

    def __init__(self) -> None:
        self.compiled: list[tuple[Any, ...]] = []
        self.launched: list[tuple[Any, ...]] = []
        self.told: list[tuple[Any, ...]] = []
        """Launches by Triton itself, which calls its hooks."""

    def __getitem__(self, grid: tuple[int, int, int]) -> Any:
        assert grid == GRID

        def run(*arguments: Any, **options: Any) -> Any:
            assert options == {"num_warps": 4}
            self.compiled.append(arguments)
            return _Compiled(self)

        return run


class _Compiled:
    function, packed_metadata = object(), object()

    def __init__(self, kernel: Kernel) -> None:
        self._kernel = kernel

    def __getitem__(self, grid: tuple[int, int, int]) -> Any:
        assert grid == GRID
        return lambda *arguments: self._kernel.told.append(arguments)

    def run(self, *arguments: Any) -> None:
        """Take the arguments of Triton's launcher: grid, stream, program, hooks and arguments."""
        assert arguments[:3] == GRID
        assert arguments[3:9] == (STREAM, self.function, self.packed_metadata, None, None, None)
        self._kernel.launched.append(arguments[9:])


def launch_of(kernel: Any) -> Launch:
    return Launch(kernel, GRID, DEVICE, {"BLOCK": 64, "length": 7}, num_warps=4)


def aligned() -> Tensor:
    return torch.zeros(64)[:8]


def test_later_launches_pass_addresses_to_what_the_first_compiled() -> None:
    kernel = Kernel()
    launch = launch_of(kernel)
    for query, output in ((aligned(), aligned()), (aligned(), aligned())):
        launch(query, None, output)
    assert len(kernel.compiled) == 1
    assert kernel.compiled[0][1:2] + kernel.compiled[0][3:] == (None, 7, 64)
    assert isinstance(kernel.compiled[0][0], Tensor)
    launch.repeat(query.data_ptr(), None, output.data_ptr())
    assert kernel.launched == [(query.data_ptr(), None, output.data_ptr(), 7, 64)] * 2


def test_unaligned_addresses_get_separate_programs() -> None:
    kernel = Kernel()
    launch = launch_of(kernel)
    even, odd = aligned(), aligned()[1:]
    for query, output in ((odd, even), (even, odd), (odd, odd), (even, even)):
        assert not launch.is_compiled
        for _ in range(2):
            launch(query, None, output)
    assert launch.is_compiled
    assert len(kernel.compiled) == len(kernel.launched) == 4


def test_hooks_are_called_for_every_launch() -> None:
    """Hooks are installed by a profiler, or by `replay profile`."""
    hooks = triton.knobs.runtime.launch_enter_hook
    kernel = Kernel()
    launch = launch_of(kernel)
    launch(aligned(), None, aligned())

    def listener(metadata: Any) -> None:
        pass

    hooks.add(listener)
    try:
        launch(aligned(), None, aligned())
    finally:
        hooks.remove(listener)
    assert (len(kernel.told), len(kernel.launched)) == (1, 0)
    launch(aligned(), None, aligned())
    assert (len(kernel.told), len(kernel.launched)) == (1, 1)


def described_tensor() -> Tensor:
    return torch.zeros(1, 1, 16, 32, dtype=torch.float16)


def test_descriptors_are_moved_to_their_tensors() -> None:
    first, second, third = (described_tensor() for _ in range(3))
    kept = nowhere(described(first, 8, 32))
    assert kept.base.data_ptr() == 0
    moved = at(kept, first)
    assert (moved.base is first, moved.shape, moved.block_shape) == (
        True,
        kept.shape,
        kept.block_shape,
    )
    kernel = Kernel()
    launch = launch_of(kernel)
    launch(moved, None, aligned())
    assert kernel.compiled[0][0] is moved
    launch(at(kept, second), None, aligned())
    launch(third, None, aligned())
    launch.repeat(first.data_ptr(), None, aligned().data_ptr())
    passed = [arguments[0] for arguments in kernel.launched]
    assert [each.base.data_ptr() for each in passed] == [
        each.data_ptr() for each in (second, third, first)
    ]
    assert all(each.shape == kept.shape and each.strides == kept.strides for each in passed)


def test_tensor_is_described_again_when_another_program_is_compiled() -> None:
    kernel = Kernel()
    launch = launch_of(kernel)
    first, second = described_tensor(), described_tensor()
    kept = nowhere(described(first, 8, 32))
    launch(at(kept, first), None, aligned())
    launch(second, None, aligned()[1:])
    assert kernel.compiled[1][0].base is second
    assert kernel.compiled[1][0].block_shape == kept.block_shape


def test_tensors_elsewhere_are_refused() -> None:
    """A later launch would pass only the address, and the GPU would read from it."""
    launch = launch_of(Kernel())
    elsewhere = torch.zeros(8, device="meta")
    with pytest.raises(ValueError, match="tensors on cpu and meta: needs one device"):
        launch(aligned(), None, elsewhere)
    moved = at(nowhere(described(described_tensor(), 8, 32)), elsewhere)
    with pytest.raises(ValueError, match="tensors on cpu and meta"):
        launch_of(Kernel())(moved, None, aligned())


def test_stages_are_reduced_when_shared_memory_is_small() -> None:
    class Large(Kernel):
        limit = 2

        def __init__(self) -> None:
            super().__init__()
            self.stages: list[int] = []

        def __getitem__(self, grid: tuple[int, int, int]) -> Any:
            def run(*arguments: Any, num_stages: int) -> Any:
                self.stages.append(num_stages)
                if num_stages > self.limit:
                    raise OutOfResources(num_stages, self.limit, "shared memory")
                return _Compiled(self)

            return run

    kernel = Large()
    launch = Launch(kernel, GRID, DEVICE, {"BLOCK": 64, "length": 7}, num_stages=4)
    for _ in range(2):
        launch(aligned(), None, aligned())
    assert kernel.stages == [4, 3, 2]
    assert len(kernel.launched) == 1
    kernel.limit = 0
    launch = Launch(kernel, GRID, DEVICE, {"BLOCK": 64, "length": 7}, num_stages=2)
    with pytest.raises(OutOfResources):
        launch(aligned(), None, aligned())
    assert kernel.stages == [4, 3, 2, 2, 1]


def test_kept_memory_suffices_and_is_rarely_replaced() -> None:
    """As a cache grows, its parts need a little more memory every few tokens."""
    for size in (1, 1000, 1025, 5000, 70_000, 4_392_960, 2**23, 2**23 + 1):
        assert size <= workspace._ample(size) <= max(size * 9 / 8, size + 1024)
    assert len({workspace._ample(size) for size in range(100_000, 200_000)}) < 20


def test_a_layout_is_all_but_the_address() -> None:
    tensor = torch.zeros(2, 4)
    assert layout(tensor) == layout(torch.ones(2, 4))
    assert layout(None) is None
    others = (
        tensor.half(),
        tensor.mT,
        torch.zeros(4, 2).mT,
        torch.zeros(2, 5)[:, :4],
        tensor.to("meta"),
    )
    assert len({layout(each) for each in (tensor, *others)}) == 6
