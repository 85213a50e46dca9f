"""Emulator of the Hopper backward kernels: their own functions run as Python, on the CPU.

Each partition of a program is a thread, and one thread runs at a time. Loads, matrix products and
additions to memory happen at a random moment between their start and the end of the wait for them,
and the threads take turns at random. A buffer is NaN from the start of a load on. If the barriers
allow a wrong order, gradients are thus wrong for some seed, and a deadlock raises an error. The
warps of a partition are one thread here, so fences and meetings of warps are not checked.
"""

from __future__ import annotations

import functools
import itertools
import math
import random
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import SimpleNamespace
from typing import Any
from unittest import mock

import torch
from triton.experimental.gluon import language as gl
from triton.runtime.jit import JITFunction

from attention_kernels.hopper import (
    backward_tiles,
    hopper_backward,
    hopper_backward_kernel,
    hopper_backward_wide_kernel,
    key_ranges,
    pipeline,
    query_gradients,
    scores,
)
from attention_kernels.launch.launcher import Launch

MODULES = (
    *(backward_tiles, hopper_backward_kernel, hopper_backward_wide_kernel, key_ranges),
    *(pipeline, query_gradients, scores),
)
KERNELS = (
    hopper_backward_kernel.backward_kernel,
    hopper_backward_wide_kernel.wide_backward_kernel,
)
THREADS = 128


class Type:
    """Type of elements, as the kernel sees it."""

    def __init__(self, dtype: torch.dtype) -> None:
        self.torch = dtype
        self.primitive_bitwidth = dtype.itemsize * 8


class Registers(torch.Tensor):
    """Tensor in registers; a number is a tensor without dimensions."""

    @property
    def type(self) -> Any:
        return SimpleNamespace(layout=None)

    def to(self, dtype: Any) -> Any:  # type: ignore[override]
        names = {gl.int64: torch.int64, gl.int32: torch.int32, gl.float32: torch.float32}
        kind = dtype.torch if isinstance(dtype, Type) else names[dtype]
        return torch.Tensor.to(self, kind).as_subclass(Registers)

    def __iadd__(self, other: Any) -> Any:  # a name is bound to a new value, as in Gluon
        return self + other


def number(value: int) -> Registers:
    return torch.tensor(value).as_subclass(Registers)


class Shared:
    """Block of shared memory."""

    def __init__(self, memory: torch.Tensor) -> None:
        self.memory = memory
        self.shape, self.dtype = list(memory.shape), Type(memory.dtype)

    def index(self, place: Any) -> Shared:
        return Shared(self.memory[int(place)])

    def slice(self, start: int, length: int, dim: int = 0) -> Shared:
        return Shared(self.memory.narrow(dim, start, length))

    def reshape(self, shape: Any) -> Shared:
        return Shared(self.memory.view(shape))

    def permute(self, order: Any) -> Shared:
        return Shared(self.memory.permute(order))

    def load(self, layout: Any) -> Registers:
        return self.memory.clone().as_subclass(Registers)

    def store(self, values: Registers) -> None:
        assert values.dtype == self.memory.dtype
        self.memory.copy_(values)


class Barrier:
    """Barrier in shared memory; phase number `ended` has not ended yet."""

    def __init__(self, arrivals: int) -> None:
        self.arrivals = self.missing = arrivals
        self.bytes, self.ended = 0, 0

    def count(self, arrivals: int, size: int) -> None:
        self.missing -= arrivals
        self.bytes += size
        assert self.missing >= 0
        if self.missing == self.bytes == 0:
            self.missing = self.arrivals
            self.ended += 1


class Descriptor:
    """Descriptor of a tensor for TMA."""

    def __init__(self, given: Any) -> None:
        self.whole = given.base.as_strided(given.shape, given.strides)
        assert self.whole.data_ptr() % 16 == 0
        self.dtype, self.layout = Type(self.whole.dtype), None
        size = math.prod(given.block_shape) * self.whole.element_size()
        self.block_type = SimpleNamespace(shape=list(given.block_shape), nbytes=size)

    def inside(self, place: Any) -> tuple[tuple[slice, ...], tuple[slice, ...]]:
        """Return the part of the tensor that a block covers, and that part of the block."""
        ranges = list(zip(map(int, place), self.block_type.shape, self.whole.shape, strict=True))
        assert all(start >= 0 for start, _, _ in ranges)
        of_tensor = tuple(slice(at, min(at + length, most)) for at, length, most in ranges)
        return of_tensor, tuple(slice(0, max(0, most - at)) for at, _, most in ranges)


class Product:
    """Matrix product that is not finished."""

    def __init__(self, left: Any, right: Shared, addend: Registers | Product | None) -> None:
        self.result: Registers | None = None
        self.operands = left, right, addend

    def finish(self) -> None:
        left, right, addend = self.operands
        left = left.memory if isinstance(left, Shared) else left
        assert left.dtype == right.memory.dtype != torch.float32
        total = left.as_subclass(torch.Tensor).float() @ right.memory.float()
        if isinstance(addend, Product):
            addend = addend.result
        if addend is not None:
            total += addend
        self.result = total.as_subclass(Registers)


class Machine:
    """A running program."""

    def __init__(self, seed: int) -> None:
        self.random = random.Random(seed)
        self.others: list[list[Callable[[], None]]] = []
        """Loads, each alone in a queue, because they arrive in any order."""
        self.own: dict[Any, list[Product]] = {}
        self.added: dict[Any, list[Callable[[], None]]] = {}
        self.named: dict[int, list[int]] = {}
        self.ready: dict[Any, Callable[[], bool]] = {}
        self.resumed: dict[Any, threading.Semaphore] = {}
        self.paused = threading.Semaphore(0)
        self.speeds: dict[int, float] = {}
        self.errors: list[BaseException] = []

    def pause(self, ready: Callable[[], bool] = lambda: True) -> None:
        """Let others run, and continue some time after `ready` holds."""
        me = threading.current_thread()
        self.ready[me] = ready
        self.paused.release()
        self.resumed[me].acquire()
        if self.errors:
            raise SystemExit

    def run(self, functions: list[Callable[[], None]]) -> None:
        def body(function: Callable[[], None]) -> None:
            me = threading.current_thread()
            self.resumed[me].acquire()
            try:
                if not self.errors:
                    function()
            except SystemExit:
                pass
            except BaseException as error:
                self.errors.append(error)
            del self.ready[me]
            self.paused.release()

        threads = [threading.Thread(target=body, args=(each,), daemon=True) for each in functions]
        for each in threads:
            self.ready[each] = lambda: True
            self.resumed[each] = threading.Semaphore(0)
            self.own[each], self.added[each] = [], []
            each.start()
        while self.ready:
            self._continue_one()
        if self.errors:
            raise self.errors[0]

    def _continue_one(self) -> None:
        able: list[Any] = [each for each, ready in self.ready.items() if self.errors or ready()]
        waiting = (*self.others, *self.own.values(), *self.added.values())
        able += [queue for queue in waiting if queue]
        if not able:
            self.errors.append(RuntimeError("deadlock: no partition can continue"))
            return
        speeds = [self.speeds.setdefault(id(each), self._speed()) for each in able]
        (chosen,) = self.random.choices(able, speeds)
        if isinstance(chosen, threading.Thread):
            self.resumed[chosen].release()
            self.paused.acquire()
        else:
            first = chosen.pop(0)
            first.finish() if isinstance(first, Product) else first()

    def _speed(self) -> float:
        """Return how often a thread or queue continues: some are much slower than others."""
        return 10.0 ** -self.random.choice([0, 0, 1, 3])

    # What the kernel calls

    def tma_load(self, desc: Descriptor, place: Any, barrier: Barrier, block: Shared) -> None:
        assert block.memory.shape == torch.Size(desc.block_type.shape)
        of_tensor, of_block = desc.inside(place)
        block.memory.fill_(math.nan)

        def arrive() -> None:
            block.memory.zero_()
            block.memory[of_block] = desc.whole[of_tensor]
            barrier.count(0, -desc.block_type.nbytes)

        self.others.append([arrive])
        self.pause()

    def reduce_add(self, desc: Descriptor, place: Any, block: Shared) -> None:
        of_tensor, of_block = desc.inside(place)
        assert block.memory[of_block].shape == block.memory.shape

        def add() -> None:
            desc.whole[of_tensor] += block.memory

        self.added[threading.current_thread()].append(add)
        self.pause()

    def store_wait(self, count: int) -> None:
        mine = self.added[threading.current_thread()]
        self.pause(lambda: len(mine) <= count)

    def mma(
        self, left: Any, right: Shared, addend: Any, *, use_acc: bool = True, is_async: bool
    ) -> Product:
        product = Product(left, right, addend if use_acc else None)
        self.own[threading.current_thread()].append(product)
        self.pause()
        return product

    def mma_wait(self, count: int, deps: list[Any]) -> Any:
        mine = self.own[threading.current_thread()]
        self.pause(lambda: len(mine) <= count)
        found = [each.result if isinstance(each, Product) else each for each in deps]
        assert all(each is not None for each in found), "the wait is not for this product"
        return found[0] if len(found) == 1 else found

    def wait(self, barrier: Barrier, phase: Any) -> None:
        self.pause(lambda: barrier.ended & 1 != int(phase))

    def expect(self, barrier: Barrier, size: int) -> None:
        barrier.count(1, size)
        self.pause()

    def arrive(self, barrier: Barrier, count: int) -> None:
        assert not self.own[threading.current_thread()], "products may still read the buffer"
        barrier.count(count, 0)
        self.pause()

    def meet_at(self, operation: str, which: int, threads: int) -> None:
        counts = self.named.setdefault(which, [0, 0])  # threads that have arrived, meetings
        counts[0] += THREADS
        assert counts[0] <= threads
        meeting = counts[1]
        if counts[0] == threads:
            counts[:] = 0, meeting + 1
        self.pause(lambda: operation == "bar.arrive" or counts[1] > meeting)


def language(machine: Machine, program: int) -> Any:
    """Return what the kernel uses of Gluon's language."""

    def shared(dtype: Any, shape: list[int], layout: Any) -> Shared:
        kind = dtype.torch if isinstance(dtype, Type) else torch.float32
        return Shared(torch.full([int(each) for each in shape], math.nan, dtype=kind))

    def specialise(parts: list[Any], warps: list[int], registers: list[int]) -> None:
        assert len(warps) == len(registers) == len(parts) - 1
        machine.run([functools.partial(function, *given) for function, given in parts])

    def store(pointer: Any, values: Registers, mask: Registers) -> None:
        memory, places = pointer
        places, mask = torch.broadcast_tensors(places, mask)
        memory.view(-1)[places[mask]] = values[mask]

    def add(pointer: Any, values: Registers, sem: str) -> None:
        memory, places = pointer
        memory.view(-1)[places] += values
        machine.pause()

    def load(pointer: Any) -> Registers:
        memory, place = pointer
        return number(int(memory[int(place)]))

    def either(which: Any, one: Any, other: Any) -> Registers:
        found = torch.where(torch.as_tensor(which), torch.as_tensor(one), torch.as_tensor(other))
        return found.as_subclass(Registers)

    def pair(function: Callable[..., torch.Tensor]) -> Callable[..., Registers]:
        return lambda one, other: function(
            torch.as_tensor(one), torch.as_tensor(other)
        ).as_subclass(Registers)

    return SimpleNamespace(
        constexpr=gl.constexpr,
        int64=gl.int64,
        int8=gl.int8,
        int32=gl.int32,
        float32=gl.float32,
        allocate_shared_memory=shared,
        warp_specialize=specialise,
        program_id=lambda axis: number(program),
        to_tensor=lambda value: value,
        load=load,
        static_range=range,
        store=store,
        atomic_add=add,
        where=either,
        maximum=pair(torch.maximum),
        minimum=pair(torch.minimum),
        broadcast=torch.broadcast_tensors,
        exp2=torch.exp2,
        arange=lambda start, end, layout: torch.arange(start, end).as_subclass(Registers),
        zeros=lambda shape, *_: torch.zeros([int(s) for s in shape]).as_subclass(Registers),
        convert_layout=lambda value, layout, **_: value,
        NVMMASharedLayout=lambda **_: None,
        BlockedLayout=lambda *_: None,
        NVMMADistributedLayout=lambda *_: None,
        DotOperandLayout=lambda *_: None,
        SliceLayout=lambda *_: None,
    )


class Pointer:
    """Pointer to a tensor's memory, to which places are added."""

    def __init__(self, memory: torch.Tensor, places: Any = 0) -> None:
        self.memory, self.places = memory, places

    def __add__(self, places: Any) -> Pointer:
        return Pointer(self.memory, self.places + places)

    def __iter__(self) -> Iterator[Any]:
        size = self.memory.untyped_storage().nbytes() // self.memory.element_size()
        flat = self.memory.as_strided((size,), (1,), 0)
        return iter((flat, self.places))


@contextmanager
def emulated(seed: int) -> Iterator[None]:
    """Run the Hopper kernel's programs in the emulator, in a random order."""

    class Emulated(Launch):
        def __init__(self, kernel: Any, grid: Any, device: Any, arguments: Any, **options: Any):
            super().__init__(kernel, grid, device, arguments, **options)
            self.given = arguments

        def __call__(self, *tensors: Any) -> None:
            if self._kernel not in KERNELS:
                super().__call__(*tensors)
                return
            operands = [
                Pointer(each) if isinstance(each, torch.Tensor) else each and Descriptor(each)
                for each in tensors
            ]
            programs = list(range(self._grid[0]))
            random.Random(seed).shuffle(programs)
            for program in programs:
                run_program(self._kernel.fn, program, operands, self._rest)

    def run_program(kernel: Any, program: int, operands: list[Any], rest: Any) -> None:
        machine = Machine(seed * 1000 + program)
        of_kernel = {
            "gl": language(machine, program),
            "mbarrier": SimpleNamespace(
                wait=machine.wait, expect=machine.expect, arrive=machine.arrive
            ),
            "tma": SimpleNamespace(store_wait=machine.store_wait),
            "tma_load": machine.tma_load,
            "warpgroup_mma": machine.mma,
            "warpgroup_mma_wait": machine.mma_wait,
            "fence_async_shared": lambda: None,
            "approximately": lambda instruction, numbers: torch.tanh(numbers),
            "meet": machine.pause,
            "named_barrier": machine.meet_at,
            "_reduce_add": machine.reduce_add,
            "make_barriers": lambda count, arrivals: SimpleNamespace(
                index=[Barrier(arrivals) for _ in range(count)].__getitem__
            ),
        }
        with contextmanager(patched)(of_kernel):
            kernel(*operands, *rest)

    with (
        mock.patch.object(hopper_backward, "Launch", Emulated),
        mock.patch.object(hopper_backward, "_plans", type(hopper_backward._plans)()),
    ):
        yield


def patched(of_kernel: dict[str, Any]) -> Iterator[None]:
    """Replace, in the kernel's modules, compiled functions by their Python functions, constants by
    their values, and Gluon's functions by `of_kernel`."""
    patches = []
    for module, (name, value) in itertools.chain.from_iterable(
        ((module, item) for item in vars(module).items()) for module in MODULES
    ):
        new = of_kernel.get(name)
        if new is None and isinstance(value, JITFunction):
            new = value.fn
        if new is None and isinstance(value, gl.constexpr):
            new = value.value
        if new is not None:
            patches.append((module, name, value, new))
    for module, name, _, new in patches:
        setattr(module, name, new)
    try:
        yield
    finally:
        for module, name, old, _ in patches:
            setattr(module, name, old)
