"""Launches of a compiled program with new addresses.

At each call, Triton inspects every argument to find the program that was compiled for its type,
value and alignment. For two calls of one shape, only the addresses of the tensors differ. The
program of the first call is therefore launched again with new addresses, by the driver's own
function (as in PyTorch's Inductor), unless a profiler listens to launches.
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Hashable, Iterable
from typing import Any, Generic, NamedTuple, TypeVar

import torch
from torch import Tensor
from triton.runtime.driver import driver
from triton.runtime.errors import OutOfResources

from attention_kernels.launch.descriptors import Address, at, nowhere
from attention_kernels.launch.direct_launch import DirectLaunch, direct_launch
from attention_kernels.launch.tensor_maps import TensorMaps, with_maps
from attention_kernels.launch.workspace import workspace

try:
    from triton.knobs import runtime as _knobs
except ImportError:  # Triton before 3.4
    _knobs = None

Planned = TypeVar("Planned")

MOST_KEPT = 1024
LARGEST_GRID = (2**31 - 1, 65_535, 65_535)
"""Maximum numbers of programs on the three axes (CUDA C++ Programming Guide, compute
capabilities)."""


class PlanCache(Generic[Planned]):
    """Plans of calls, keyed by shape, so that each shape is planned once."""

    def __init__(self) -> None:
        self._plans: dict[Hashable, Planned] = {}

    def get(self, shape: Hashable) -> Planned | None:
        return self._plans.get(shape)

    def keep(self, shape: Hashable, plan: Planned) -> Planned:
        """Store a plan and return it. Old plans are dropped, because a decoder has a new shape for
        every token."""
        if len(self._plans) >= MOST_KEPT:
            self._plans.clear()
        self._plans[shape] = plan
        return plan


class Launch:
    """A kernel with its grid and all arguments except the tensors of a call, which come first."""

    def __init__(
        self,
        kernel: Any,
        grid: tuple[int, int, int],
        device: torch.device,
        arguments: dict[str, Any],
        **options: int | None,
    ) -> None:
        """Store everything that calls of one shape share.

        Args:
            device: device of the tensors, on which the kernel is launched even if another is
                current.
            arguments: all arguments except the tensors, by the kernel's own names.
            options: `num_warps`, `num_stages`, `maxnreg`.

        Raises:
            NotImplementedError: no GPU can launch so many programs.
        """
        if any(map(operator.gt, grid, LARGEST_GRID)):
            given, most = (" x ".join(map(str, sizes)) for sizes in (grid, LARGEST_GRID))
            raise NotImplementedError(f"the call is too large: {given} programs (at most {most})")
        tensors = len(kernel.arg_names) - len(arguments)
        self._rest = tuple(map(arguments.__getitem__, kernel.arg_names[tensors:]))
        self._kernel, self._grid, self._options = kernel, grid, options
        self._device, self._index = device, device.index or 0
        self._may_be_elsewhere = device.type == "cuda" and torch.cuda.device_count() > 1
        self._kinds: _Kinds | None = None
        self._programs: dict[tuple[bool, ...] | None, _Program] = {}

    def __call__(self, *tensors: Any) -> None:
        """Launch the kernel with tensors, tensor descriptors or None. Each argument must have the
        same kind in every call.

        Shapes, strides and types must be those of the first call; addresses may differ. Once
        `is_compiled` is true, tensors may be passed in place of descriptors.
        """
        if self._may_be_elsewhere and self._index != torch.cuda.current_device():
            with torch.cuda.device(self._index):
                self._launch(tensors)
        else:
            self._launch(tensors)

    @property
    def is_compiled(self) -> bool:
        """Return whether the kernel is compiled for addresses that are multiples of 16; always
        False in the interpreter."""
        return None in self._programs

    def repeat(self, *addresses: int | None) -> None:
        """Launch the compiled program with addresses, all multiples of 16, in place of tensors."""
        program = self._programs[None]
        if self._may_be_elsewhere and self._index != torch.cuda.current_device():
            with torch.cuda.device(self._index):
                self._repeat(program, list(addresses))
        else:
            self._repeat(program, list(addresses))

    def _launch(self, tensors: tuple[Any, ...]) -> None:
        if self._kinds is None:
            self._kinds = _Kinds.of(tensors)
        addresses, together = list(tensors), 0
        for place in self._kinds.tensors:
            addresses[place] = address = tensors[place].data_ptr()
            together |= address
        for place, _ in self._kinds.descriptors:
            given = tensors[place]
            addresses[place] = (given if isinstance(given, Tensor) else given.base).data_ptr()
        # Triton compiles one program for addresses that are multiples of 16 and one for others.
        alignment = None
        if together % 16:
            alignment = tuple([addresses[place] % 16 == 0 for place in self._kinds.tensors])
        program = self._programs.get(alignment)
        if program is not None:
            self._repeat(program, addresses)
        elif (compiled := self._first(tensors)) is not None:  # None in the interpreter
            self._programs[alignment] = _Program.of(compiled, self._grid, self._kinds)

    def _repeat(self, program: _Program, addresses: list[Any]) -> None:
        """Launch a program with the addresses of tensors and of described tensors."""
        is_listened_to = _is_listened_to()
        if program.maps is not None and not is_listened_to:
            program.maps.replace(addresses)
        else:
            for place, descriptor in program.kinds.descriptors:
                addresses[place] = at(descriptor, Address(addresses[place]))
        if is_listened_to:
            program.compiled[self._grid](*addresses, *self._rest)
        else:
            program.launch(program.stream_of(self._index), (*addresses, *self._rest))

    def _first(self, tensors: tuple[Any, ...]) -> Any:
        """Let Triton launch the kernel with the tensors, and return the compiled kernel.

        If a GPU has too little shared memory, the number of stages is reduced.

        Raises:
            ValueError: a tensor is on another device. Later launches pass addresses only and cannot
                detect this.
        """
        assert self._kinds is not None
        for each in tensors:
            memory = getattr(each, "base", each)
            if isinstance(memory, Tensor) and memory.device != self._device:
                raise ValueError(f"tensors on {self._device} and {memory.device}: needs one device")
        given = list(tensors)
        for place, descriptor in self._kinds.descriptors:
            if isinstance(given[place], Tensor):
                given[place] = at(descriptor, given[place])
        while True:
            try:
                return self._kernel[self._grid](*given, *self._rest, **self._options)
            except OutOfResources as error:
                stages = self._options.get("num_stages") or 1
                if error.name != "shared memory" or stages == 1:
                    raise
                self._options["num_stages"] = stages - 1


class _Kinds(NamedTuple):
    """Positions of a launch's arguments, by kind."""

    tensors: tuple[int, ...]
    descriptors: tuple[tuple[int, Any], ...]
    """Positions of descriptors, and copies of the descriptors that hold no memory."""

    @classmethod
    def of(cls, tensors: tuple[Any, ...]) -> _Kinds:
        places, descriptors = [], []
        for place, each in enumerate(tensors):
            if isinstance(each, Tensor):
                places.append(place)
            elif each is not None:
                descriptors.append((place, nowhere(each)))
        return cls(tuple(places), tuple(descriptors))


class _Program(NamedTuple):
    """A compiled kernel, and how to launch it without a profiler."""

    compiled: Any
    launch: DirectLaunch
    stream_of: Callable[[int], int]
    """Function that returns the current stream of a device."""
    kinds: _Kinds
    maps: TensorMaps | None
    """Tensor maps that replace descriptors, if `launch` accepts them."""

    @classmethod
    def of(cls, compiled: Any, grid: tuple[int, int, int], kinds: _Kinds) -> _Program:
        run, maps = with_maps(compiled.run, kinds.descriptors)
        launch = direct_launch(run, grid, compiled.function, compiled.packed_metadata)
        return cls(compiled, launch, driver.active.get_current_stream, kinds, maps)


def _is_listened_to() -> bool:
    """Return whether a profiler or another hook listens to launches."""
    if _knobs is None:
        return True  # unknown version of Triton: there may be a listener
    enter, leave = _knobs.launch_enter_hook, _knobs.launch_exit_hook
    return bool(getattr(enter, "calls", enter) or getattr(leave, "calls", leave))


class PlannedCall(NamedTuple):
    """Plan of a call: everything except the addresses of its tensors."""

    launch: Launch
    descriptors: tuple[Any, ...] | None = None
    """Descriptors to be moved to the tensors. An entry, or the whole tuple, is None if pointers are
    passed instead."""
    shared: tuple[int, int] | None = None
    """Number of floats and of counters of `workspace` that the programs share, or None. These
    tensors follow all other tensors of the launch."""

    def room(self, device: torch.device) -> tuple[Tensor, ...]:
        """Return the memory that `shared` specifies, for a launch."""
        return () if self.shared is None else workspace(*self.shared, device)

    def operands(self, *tensors: Tensor | None) -> tuple[Any, ...]:
        """Return the arguments for the launch, with descriptors in place of some tensors."""
        if self.descriptors is None or self.launch.is_compiled:
            return tensors
        return tuple(
            tensor if descriptor is None or tensor is None else at(descriptor, tensor)
            for descriptor, tensor in zip(self.descriptors, tensors, strict=True)
        )


def layout(tensor: Tensor | None) -> Hashable:
    """Return everything that a plan may depend on except the address: shape, strides, type and
    device."""
    return None if tensor is None else (tensor.shape, tensor.stride(), tensor.dtype, tensor.device)


def alignments(*tensors: Tensor) -> Hashable:
    """Return whether each tensor begins at a multiple of 16 bytes, which wide loads and descriptors
    require."""
    addresses = [tensor.data_ptr() for tensor in tensors]
    together = 0
    for address in addresses:
        together |= address
    return together % 16 == 0 or tuple([address % 16 == 0 for address in addresses])


def named(prefix: str, axes: Iterable[str], strides: Iterable[int | None]) -> dict[str, int | None]:
    """Return strides by a kernel's names for them; all are None if there is no tensor."""
    return {f"{prefix}{axis}": stride for axis, stride in zip(axes, strides, strict=True)}
