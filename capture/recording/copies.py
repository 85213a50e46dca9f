"""Copies the current values of a call's tensors to host memory while the model continues.

Tensors on a GPU are first copied on the GPU, on the model's own stream, so that later changes by
the model do not matter. A separate stream then moves the copies to pinned memory. If the GPU has no
room for the copies, the model's stream moves the tensors to the host instead, head by head.
"""

from __future__ import annotations

import threading
from collections.abc import Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from capture.call.strides import Layout, as_stored, narrow_expanded
from capture.recording.memory import HostBuffer

_ALIGNMENT = 64
_ROOM = 2
"""Number of copies that must fit in the GPU's free memory before one copy is made there."""


@dataclass(frozen=True)
class HostCopy:
    """Tensors of a call in host memory, complete after `wait`."""

    values: dict[str, Tensor]
    """Views of the buffer with the values in stored form (`capture.call.strides`)."""
    layouts: dict[str, Layout]
    buffer: HostBuffer

    def wait(self) -> None:
        """Wait until the values have arrived."""
        if self.buffer.filled is not None:
            self.buffer.filled.synchronize()


def stored_bytes(tensors: Mapping[str, Tensor]) -> int:
    """Return the bytes of the tensors in a file, without expanded dimensions."""
    return sum(narrow_expanded(tensor).nbytes for tensor in tensors.values())


def buffer_size(tensors: Mapping[str, Tensor]) -> int:
    """Return the bytes that `HostCopier.copy` needs, with each tensor at an aligned address."""
    return sum(_aligned(narrow_expanded(tensor).nbytes) for tensor in tensors.values())


class HostCopier:
    """A copier of tensors into buffers, with one stream per GPU."""

    def __init__(self) -> None:
        self._streams: dict[torch.device, torch.cuda.Stream] = {}
        self._lock = threading.Lock()

    def copy(self, tensors: Mapping[str, Tensor], buffer: HostBuffer) -> HostCopy:
        """Start copying tensors; the caller may change them as soon as this method returns.

        Args:
            tensors: tensors of any shape, strides and device, by name.
            buffer: buffer of at least `buffer_size(tensors)` bytes.
        """
        stored = {name: as_stored(tensor) for name, tensor in tensors.items()}
        sources = {name: source for name, (source, _) in stored.items()}
        values, offset = {}, 0
        for name, source in sources.items():
            place = buffer.memory[offset : offset + source.nbytes]
            values[name] = place.view(source.dtype).view(source.shape)
            offset += _aligned(source.nbytes)
        gpu = next((s.device for s in sources.values() if s.device.type == "cuda"), None)
        at_once = [name for name, source in sources.items() if source.device != gpu]
        if buffer.filled is not None and (at_once or gpu is None):
            buffer.filled.synchronize()  # the copy of a dropped call may still be in progress
        for name in at_once:
            values[name].copy_(sources[name])
        if gpu is not None:
            mine = [name for name in sources if name not in at_once]
            self._from_gpu(gpu, [(values[name], sources[name]) for name in mine], buffer)
        return HostCopy(values, {name: layout for name, (_, layout) in stored.items()}, buffer)

    def _from_gpu(
        self, gpu: torch.device, pairs: list[tuple[Tensor, Tensor]], buffer: HostBuffer
    ) -> None:
        with torch.cuda.device(gpu):
            stream = model = torch.cuda.current_stream()
            staged = _copies_on(gpu, [source for _, source in pairs])
            if staged is not None:
                stream = self._stream(gpu)
                stream.wait_stream(model)
            if buffer.filled is not None:  # an earlier call used the buffer, maybe on another GPU
                stream.wait_event(buffer.filled)
            with torch.cuda.stream(stream):
                if staged is None:
                    for target, source in pairs:
                        _copy_in_parts(target, source)
                else:
                    for (target, _), copy in zip(pairs, staged, strict=True):
                        target.copy_(copy, non_blocking=True)
                        copy.record_stream(stream)
                buffer.filled = torch.cuda.Event()
                buffer.filled.record()

    def _stream(self, device: torch.device) -> torch.cuda.Stream:
        with self._lock:
            if device not in self._streams:
                self._streams[device] = torch.cuda.Stream(device)
            return self._streams[device]


def _copies_on(device: torch.device, sources: list[Tensor]) -> list[Tensor] | None:
    """Return contiguous copies on the GPU, or None if the GPU has no room for them."""
    needed = _ROOM * sum(source.nbytes for source in sources)
    unused = torch.cuda.memory_reserved(device) - torch.cuda.memory_allocated(device)
    if needed > unused and needed > torch.cuda.mem_get_info(device)[0]:
        return None
    try:
        return [source.clone(memory_format=torch.contiguous_format) for source in sources]
    except torch.OutOfMemoryError:  # the free memory is fragmented
        return None


def _copy_in_parts(target: Tensor, source: Tensor) -> None:
    """Copy from the GPU in contiguous parts, which needs little GPU memory."""
    if source.is_contiguous() or source.ndim <= 2:
        target.copy_(source, non_blocking=True)
        return
    for target_part, source_part in zip(target, source, strict=True):
        _copy_in_parts(target_part, source_part)


def _aligned(nbytes: int) -> int:
    return -(-nbytes // _ALIGNMENT) * _ALIGNMENT
