"""Copies the current values of a call's tensors to host memory while the model continues.

Tensors on a GPU are first copied on the GPU, on the model's own stream, so that later changes by
the model do not matter. A thread then allocates host memory and moves the copies there. If the GPU
has no room for the copies, the thread moves the model's own tensors, and the model waits.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Mapping
from concurrent.futures import Future
from dataclasses import dataclass
from functools import partial

import torch
from torch import Tensor

from capture.call.strides import Layout, as_stored, narrow_expanded
from capture.recording.counts import RecordingCounts
from capture.recording.memory import BufferPool
from capture.recording.mover import Mover

_ALIGNMENT = 64
_ROOM = 2
"""Number of copies that must fit in the GPU's free memory before one copy is made there."""
_SHARE = 4
"""Several copies that wait on a GPU take at most its free memory divided by this number."""


@dataclass(frozen=True)
class HostValues:
    """Tensors of a call in host memory."""

    memory: Tensor
    """Memory that all tensors share, (bytes,) of dtype uint8."""
    tensors: dict[str, Tensor]
    """Views of the memory, with the values in stored form (`capture.call.strides`)."""


@dataclass(frozen=True)
class HostCopy:
    """Tensors of a call on their way to host memory."""

    layouts: dict[str, Layout]
    arrival: Future[HostValues]
    """The values, or the exception that stopped them."""
    nbytes: int
    """Size of the host memory that the copy needs."""


def stored_bytes(tensors: Mapping[str, Tensor]) -> int:
    """Return the bytes of the tensors in a file, without expanded dimensions."""
    return sum(narrow_expanded(tensor).nbytes for tensor in tensors.values())


def buffer_size(tensors: Mapping[str, Tensor]) -> int:
    """Return the bytes of host memory for a copy, with each tensor at an aligned address."""
    return sum(_aligned(narrow_expanded(tensor).nbytes) for tensor in tensors.values())


class HostCopier:
    """A copier of tensors to host memory.

    Args:
        limit: bytes of host memory above which free memory is released.
        counts: receives the time that the model waits.
    """

    def __init__(self, limit: int, counts: RecordingCounts) -> None:
        self.pool = BufferPool(limit)
        self._counts = counts
        self._mover = Mover()
        self._staged: dict[torch.device, int] = {}
        """Bytes of the copies that wait on each GPU."""
        self._lock = threading.Lock()

    def copy(self, tensors: Mapping[str, Tensor]) -> HostCopy:
        """Start copying tensors; the caller may change them as soon as this method returns.

        Args:
            tensors: tensors of any shape, strides and device, by name.

        Raises:
            CaptureError: the thread that moves tensors cannot be started.
            MemoryError, RuntimeError: memory for tensors on the CPU cannot be allocated.
        """
        stored = {name: as_stored(tensor) for name, tensor in tensors.items()}
        layouts = {name: layout for name, (_, layout) in stored.items()}
        sources = {name: source for name, (source, _) in stored.items()}
        gpu = next((s.device for s in sources.values() if is_on_gpu(s)), None)
        if gpu is None:
            arrival: Future[HostValues] = Future()
            arrival.set_result(self._moved(sources))
            return HostCopy(layouts, arrival, buffer_size(tensors))
        own = {name: source for name, source in sources.items() if source.device == gpu}
        others = {name: sources[name].to("cpu", copy=True) for name in sources.keys() - own.keys()}
        staged = self._staged_on(gpu, own)
        with torch.cuda.device(gpu):
            ready = torch.cuda.Event()
            ready.record()
        arrival = self._mover.start(partial(self._moved, (staged or own) | others, gpu, ready))
        copy = HostCopy(layouts, arrival, buffer_size(tensors))
        if staged is None:
            self._wait(copy)
        else:
            nbytes = copy.nbytes
            self._add_staged(gpu, nbytes)
            arrival.add_done_callback(lambda _: self._add_staged(gpu, -nbytes))
        return copy

    def free(self, copy: HostCopy) -> None:
        """Give back the memory of a copy that has arrived or failed."""
        if not copy.arrival.cancelled() and copy.arrival.exception() is None:
            self.pool.give_back(copy.arrival.result().memory)

    def close(self) -> None:
        """Finish the moves, and end their thread."""
        self._mover.close()

    def _moved(
        self,
        sources: dict[str, Tensor],
        gpu: torch.device | None = None,
        ready: torch.cuda.Event | None = None,
    ) -> HostValues:
        memory = self.pool.allocate(sum(_aligned(source.nbytes) for source in sources.values()))
        try:
            values = _places(memory, sources)
            pairs = [(sources[name], value) for name, value in values.items()]
            for source, value in pairs:
                if source.device != gpu:
                    value.copy_(source)
            if gpu is not None and ready is not None:
                self._mover.bring(gpu, [pair for pair in pairs if pair[0].device == gpu], ready)
        except BaseException:
            self.pool.give_back(memory)
            raise
        return HostValues(memory, values)

    def _staged_on(self, gpu: torch.device, sources: dict[str, Tensor]) -> dict[str, Tensor] | None:
        """Return copies on the GPU, which the model cannot change; None if there is no room."""
        needed = sum(source.nbytes for source in sources.values())
        unused = torch.cuda.memory_reserved(gpu) - torch.cuda.memory_allocated(gpu)
        room, waiting = max(unused, torch.cuda.mem_get_info(gpu)[0]), self._staged.get(gpu, 0)
        if _ROOM * needed > room or (waiting and _SHARE * (waiting + needed) > room + waiting):
            return None
        try:
            return {
                name: source.clone(memory_format=torch.contiguous_format)
                for name, source in sources.items()
            }
        except torch.OutOfMemoryError:  # the free memory is fragmented
            return None

    def _add_staged(self, gpu: torch.device, nbytes: int) -> None:
        with self._lock:
            self._staged[gpu] = self._staged.get(gpu, 0) + nbytes

    def _wait(self, copy: HostCopy) -> None:
        """Make the model wait while the thread moves the model's own tensors."""
        began = time.perf_counter()
        try:
            copy.arrival.exception()
        except BaseException:  # the wait was interrupted
            copy.arrival.cancel()
            copy.arrival.add_done_callback(lambda _: self.free(copy))
            raise
        finally:
            self._counts.waited_seconds += time.perf_counter() - began


def is_on_gpu(tensor: Tensor) -> bool:
    """Return True for a tensor on an NVIDIA GPU."""
    return tensor.device.type == "cuda"


def _places(memory: Tensor, tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Return a contiguous view of memory for each tensor, with the tensor's shape and dtype."""
    places, offset = {}, 0
    for name, tensor in tensors.items():
        place = memory[offset : offset + tensor.nbytes]
        places[name] = place.view(tensor.dtype).view(tensor.shape)
        offset += _aligned(tensor.nbytes)
    return places


def _aligned(nbytes: int) -> int:
    return -(-nbytes // _ALIGNMENT) * _ALIGNMENT
