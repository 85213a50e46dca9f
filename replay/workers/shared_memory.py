"""Tensors handed to another process, in a file that both map into their memory.

The file stays: each output overwrites the last, in pages that are there already.
"""

from __future__ import annotations

import contextlib
import math
import mmap
import os
import tempfile
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from capture.storage.header import dtype_name

ALIGNMENT = 64
"""Bytes; of every tensor's start."""
CHUNK_BYTES = 2**20


class SharedFile:
    """An empty file that only grows, in memory where the system has such files.

    Those of Linux are gone with the last process that has them open, however it ended.
    """

    def __init__(self) -> None:
        self._on_disk = not hasattr(os, "memfd_create")
        if self._on_disk:
            self._descriptor, self.path = tempfile.mkstemp(prefix="attention-replay-")
        else:
            self._descriptor = os.memfd_create("attention-replay")
            self.path = f"/proc/{os.getpid()}/fd/{self._descriptor}"

    def close(self) -> None:
        """Give up the memory, or the disk, once nobody has it mapped."""
        os.close(self._descriptor)
        if self._on_disk:
            Path(self.path).unlink(missing_ok=True)


class Outbox:
    """Where tensors are put for another process, which has read them before the next are put.

    Args:
        path: of a `SharedFile`, which several processes may use in turns.
        device: of the tensors.
    """

    def __init__(self, path: str, device: torch.device) -> None:
        self._file = _MappedFile(path, device)

    def put(self, tensors: dict[str, Tensor]) -> dict[str, Any]:
        """Copy tensors there, of any strides; the plain data that `Inbox.take` wants.

        Raises:
            OSError: there is no room for them.
        """
        described: dict[str, list[Any]] = {}
        end = 0
        for name, tensor in tensors.items():
            described[name] = [dtype_name(tensor.dtype), list(tensor.shape), end]
            end += -(-tensor.nbytes // ALIGNMENT) * ALIGNMENT
        self._file.grow(end)
        for name, tensor in tensors.items():
            self._file.tensor(*described[name]).copy_(tensor)
        return {"path": self._file.path, "bytes": end, "tensors": described}


class Inbox:
    """Reads what another process has put into its `Outbox`.

    Args:
        device: where tensors are wanted.
    """

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._file: _MappedFile | None = None

    def take(self, message: dict[str, Any]) -> dict[str, Tensor]:
        """Copies of the tensors, given what `Outbox.put` returned.

        Raises:
            OSError, ValueError: they are not there.
        """
        if self._file is None or self._file.path != message["path"]:
            self._file = _MappedFile(message["path"], self._device)
        self._file.map(message["bytes"])
        return {
            name: self._file.tensor(*entry).to(self._device, copy=True)
            for name, entry in message["tensors"].items()
        }


class _MappedFile:
    """A `SharedFile` as one process sees it; for a GPU its pages are locked.

    A GPU reads and writes locked pages itself, several times as fast as others. Where the system
    does not let them be locked, copies are as right.
    """

    def __init__(self, path: str, device: torch.device) -> None:
        self.path = path
        self._device = device
        self._is_locked = False
        self._bytes: Tensor | None = None

    def grow(self, size: int) -> None:
        """Make it at least that long, and map it.

        With zeros: a hole would end the process that fills it where there is no room.
        """
        if self._size() >= size:
            return
        with open(self.path, "ab") as file:
            while file.tell() < size:
                file.write(bytes(CHUNK_BYTES))
        self.map(size)

    def map(self, size: int) -> None:
        """Map the whole of it, unless so many bytes are mapped already."""
        if self._size() >= size:
            return
        if self._bytes is not None and self._is_locked:
            torch.cuda.cudart().cudaHostUnregister(self._bytes.data_ptr())
        with open(self.path, "r+b") as file:
            self._bytes = torch.frombuffer(mmap.mmap(file.fileno(), 0), dtype=torch.uint8)
        self._is_locked = self._device.type == "cuda" and _locked(self._bytes, self._device)

    def _size(self) -> int:
        return 0 if self._bytes is None else self._bytes.numel()

    def tensor(self, dtype: str, shape: list[int], offset: int) -> Tensor:
        """The tensor there, not a copy.

        Raises:
            ValueError: it would not lie in the file.
        """
        kind: torch.dtype = getattr(torch, dtype)
        size = math.prod(shape) * kind.itemsize
        if offset + size > self._size():
            raise ValueError(f"{offset + size} bytes in a file of {self._size()}")
        if self._bytes is None:
            return torch.empty(shape, dtype=kind)
        return self._bytes[offset : offset + size].view(kind).view(shape)


def _locked(memory: Tensor, device: torch.device) -> bool:
    """Lock the pages of host memory for a GPU; whether that was possible."""
    if torch.cuda.cudart().cudaHostRegister(memory.data_ptr(), memory.nbytes, 0).value == 0:
        return True
    with contextlib.suppress(RuntimeError):  # CUDA reports the failure again at the next launch
        torch.zeros(1, device=device)
    return False
