"""The transfer of tensors to another process, in a file that both processes map into memory.

Each output overwrites the previous output, so that no new pages are needed.
"""

from __future__ import annotations

import base64
import contextlib
import math
import mmap
import os
from typing import Any

import torch
from torch import Tensor

from capture.call.strides import copy_with_strides, narrow_expanded
from capture.storage.header import dtype_name

ALIGNMENT = 64
"""Alignment of every tensor in the file, in bytes."""
CHUNK_BYTES = 2**20


class Outbox:
    """Writer of tensors for another process, which reads them before the next tensors are written.

    Args:
        file: descriptor of a `SharedFile`; processes may use the file one after another.
        device: device of the tensors.
    """

    def __init__(self, file: int, device: torch.device) -> None:
        self._file = _MappedFile(file, device)

    def put(self, tensors: dict[str, Tensor]) -> dict[str, Any]:
        """Copy tensors of any strides to the file; return the message for `Inbox.take`.

        Expanded (stride 0) dimensions are stored once, and expanded by the reader.
        """
        return self.reserve({}, tensors)[0]

    def reserve(
        self, wanted: dict[str, tuple[torch.dtype, list[int]]], tensors: dict[str, Tensor]
    ) -> tuple[dict[str, Any], dict[str, Tensor]]:
        """Reserve space for tensors that are written later, and copy others.

        Args:
            wanted: dtype and shape of each tensor to reserve.
            tensors: tensors of any strides to copy.

        Returns:
            The message for `Inbox.take`, and the reserved tensors, which share the file's memory.
        """
        stored = {name: narrow_expanded(each) for name, each in tensors.items()}
        all_wanted = wanted | {name: (each.dtype, [*each.shape]) for name, each in stored.items()}
        described: dict[str, list[Any]] = {}
        end = 0
        for name, (dtype, shape) in all_wanted.items():
            described[name] = [dtype_name(dtype), shape, end]
            end += -(-math.prod(shape) * dtype.itemsize // ALIGNMENT) * ALIGNMENT
        self._file.grow(end)
        for name, tensor in stored.items():
            self._file.tensor(*described[name]).copy_(tensor)
        sizes = {name: [*each.shape] for name, each in tensors.items()}
        message = {"bytes": end, "tensors": described, "sizes": sizes}
        return message, {name: self._file.tensor(*described[name]) for name in wanted}


class Inbox:
    """Reader of tensors that another process wrote with its `Outbox`.

    Args:
        file: descriptor of the same `SharedFile`.
        device: device to copy the tensors to.
    """

    def __init__(self, file: int, device: torch.device) -> None:
        self._device = device
        self._file = _MappedFile(file, device)

    def take(self, message: dict[str, Any]) -> dict[str, Tensor]:
        """Return copies of the tensors that `Outbox.put` described."""
        views = self.view(message)
        return {name: copy_with_strides(view, self._device) for name, view in views.items()}

    def view(self, message: dict[str, Any]) -> dict[str, Tensor]:
        """Return the tensors that `Outbox.put` described, which share the file's memory."""
        self._file.map(message["bytes"])
        stored = {name: self._file.tensor(*entry) for name, entry in message["tensors"].items()}
        sizes = message["sizes"]
        return {name: each.expand(sizes.get(name, each.shape)) for name, each in stored.items()}


class _MappedFile:
    """A `SharedFile` mapped into one process, with locked pages for a GPU.

    A GPU accesses locked pages directly, which is several times as fast. If the system refuses to
    lock the pages, copies are slower.
    """

    def __init__(self, file: int, device: torch.device) -> None:
        self._file = file
        self._device = device
        self._is_locked = False
        self._bytes: Tensor | None = None

    def grow(self, size: int) -> None:
        """Extend the file to a size, and map it.

        This writes zeros. If it left a hole, the system would end a process that fills the hole
        when the disk is full.
        """
        if self._size() >= size:
            return
        while (end := os.fstat(self._file).st_size) < size:
            os.pwrite(self._file, bytes(CHUNK_BYTES), end)
        self.map(size)

    def map(self, size: int) -> None:
        """Map the whole file, unless enough bytes are mapped already."""
        if self._size() >= size:
            return
        if self._bytes is not None and self._is_locked:
            torch.cuda.cudart().cudaHostUnregister(self._bytes.data_ptr())
        memory = mmap.mmap(self._file, 0)
        if hasattr(mmap, "MADV_DONTFORK"):
            # A kernel's fork goes on where the kernel returns, and would write outputs too.
            memory.madvise(mmap.MADV_DONTFORK)
        self._bytes = torch.frombuffer(memory, dtype=torch.uint8)
        self._is_locked = self._device.type == "cuda" and _locked(self._bytes, self._device)

    def _size(self) -> int:
        return 0 if self._bytes is None else self._bytes.numel()

    def tensor(self, dtype: str, shape: list[int], offset: int) -> Tensor:
        """Return a tensor that shares the file's memory."""
        kind: torch.dtype = getattr(torch, dtype)
        size = math.prod(shape) * kind.itemsize
        if offset + size > self._size():
            raise ValueError(f"a tensor ends at byte {offset + size} of {self._size()}")
        if self._bytes is None:
            return torch.empty(shape, dtype=kind)
        return self._bytes[offset : offset + size].view(kind).view(shape)


def _locked(memory: Tensor, device: torch.device) -> bool:
    if torch.cuda.cudart().cudaHostRegister(memory.data_ptr(), memory.nbytes, 0).value == 0:
        return True
    with contextlib.suppress(RuntimeError):  # CUDA repeats the failure at the next launch
        torch.zeros(1, device=device)
    return False


def shared_on_gpu(memory: Tensor) -> list[Any]:
    """Return a message from which another process can open the GPU memory of a tensor."""
    parts = memory.untyped_storage()._share_cuda_()
    return [
        {"bytes": base64.b64encode(part).decode()} if isinstance(part, bytes) else part
        for part in parts
    ]


def opened_on_gpu(message: list[Any], dtype: torch.dtype, shape: list[int]) -> Tensor:
    """Open the GPU memory of another process that has the same version of PyTorch.

    Raises:
        RuntimeError: the memory cannot be opened.
    """
    parts = [
        base64.b64decode(part["bytes"]) if isinstance(part, dict) else part for part in message
    ]
    storage = torch.UntypedStorage._new_shared_cuda(*parts)
    memory = torch.empty(0, dtype=torch.uint8, device=storage.device).set_(storage)
    return memory[: math.prod(shape) * dtype.itemsize].view(dtype).view(shape)
