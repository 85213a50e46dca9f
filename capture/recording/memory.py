"""Limit and buffers of the host memory for recorded calls that are not written yet."""

from __future__ import annotations

import contextlib
import mmap
import os
import time
from collections import defaultdict
from dataclasses import dataclass, field
from pathlib import Path

import torch
from torch import Tensor

from capture.recording.counts import RecordingCounts

SHARE = 4
"""Divisor: the default limit is the free memory divided by this number."""

_LARGE = 1 << 20
_CGROUPS = (
    ("/sys/fs/cgroup/memory.max", "/sys/fs/cgroup/memory.current"),
    ("/sys/fs/cgroup/memory/memory.limit_in_bytes", "/sys/fs/cgroup/memory/memory.usage_in_bytes"),
)


def default_buffer_bytes() -> int:
    """Return a quarter of the free memory of this machine or container."""
    return max(available_bytes() // SHARE, 64 << 20)


def available_bytes() -> int:
    """Return the bytes that can still be allocated within the limits of machine and container."""
    found = []
    try:
        with Path("/proc/meminfo").open() as file:
            fields = dict(line.split(":", 1) for line in file)
        found.append(int(fields["MemAvailable"].split()[0]) * 1024)
    except (OSError, KeyError, ValueError):
        found.append(os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE") // 2)
    for limit, used in _CGROUPS:
        try:
            found.append(int(Path(limit).read_text()) - int(Path(used).read_text()))
        except (OSError, ValueError):  # no such control group, or no limit
            continue
    return max(min(found), 0)


@dataclass(eq=False)
class HostBuffer:
    """Host memory for the tensors of one call."""

    memory: Tensor
    """Tensor (bytes,) of dtype uint8."""
    pinned: bool
    for_pinned: bool = False
    """True if pinned memory was requested, even if pinning failed."""
    filled: torch.cuda.Event | None = None
    """Event at the end of the latest copy from a GPU into the buffer."""

    @property
    def nbytes(self) -> int:
        return self.memory.numel()


@dataclass
class BufferPool:
    """Pool of reusable buffers, because pinning memory takes longer than copying to it."""

    counts: RecordingCounts = field(default_factory=RecordingCounts)
    """Counts that receive the time for allocating and pinning."""
    nbytes: int = 0
    """Size of all buffers, in use or free."""
    _taken: set[HostBuffer] = field(default_factory=set)
    _free: dict[tuple[int, bool], list[HostBuffer]] = field(
        default_factory=lambda: defaultdict(list)
    )

    def take(self, nbytes: int, *, pinned: bool, limit: int) -> HostBuffer:
        """Return a free buffer of exactly this size, or allocate one.

        If a new buffer would exceed the `limit` in bytes, all free buffers are released first. If
        memory cannot be pinned, the buffer is not pinned, which makes copies slower.
        """
        if free := self._free[nbytes, pinned]:
            buffer = free.pop()
            self._taken.add(buffer)
            return buffer
        if self.nbytes + nbytes > limit:
            self.trim()
        began = time.perf_counter()
        with torch.inference_mode(False):  # so that code outside inference mode can write to it
            try:
                buffer = HostBuffer(_allocate(nbytes, pinned=pinned), pinned, pinned)
            except (RuntimeError, OSError):
                if not pinned:
                    raise
                buffer = HostBuffer(_allocate(nbytes, pinned=False), False, for_pinned=True)
        self.counts.allocation_seconds += time.perf_counter() - began
        self.nbytes += nbytes
        self._taken.add(buffer)
        return buffer

    def give_back(self, buffer: HostBuffer) -> None:
        """Make a buffer free again, or release it if it is small."""
        self._taken.discard(buffer)
        if buffer.nbytes >= _LARGE:
            self._free[buffer.nbytes, buffer.for_pinned].append(buffer)
        else:
            self.nbytes -= buffer.nbytes

    def close(self) -> None:
        """Release all memory, including buffers that were not given back."""
        for buffer in list(self._taken):
            self.give_back(buffer)
        self.trim()

    def trim(self) -> None:
        """Release the memory of all free buffers."""
        for buffers in self._free.values():
            while buffers:
                buffer = buffers.pop()
                self.nbytes -= buffer.nbytes
                if buffer.filled is not None:
                    buffer.filled.synchronize()  # the copy of a dropped call may be in progress
                if buffer.pinned:
                    torch.cuda.cudart().cudaHostUnregister(buffer.memory.data_ptr())


def _allocate(nbytes: int, *, pinned: bool) -> Tensor:
    if not pinned:
        return torch.empty(nbytes, dtype=torch.uint8, device="cpu")
    if nbytes < _LARGE:
        return torch.empty(nbytes, dtype=torch.uint8, device="cpu", pin_memory=True)
    # PyTorch rounds pinned memory up to powers of two, which would waste up to half of the memory.
    pages = mmap.mmap(-1, nbytes)
    with contextlib.suppress(AttributeError, OSError):  # not every system has huge pages
        pages.madvise(mmap.MADV_HUGEPAGE)  # fewer pages are pinned much faster
    # Zeroing maps the pages with all threads. Without it, pinning would map them with one thread.
    memory = torch.frombuffer(pages, dtype=torch.uint8).zero_()
    portable = 1  # pinned for every GPU
    torch.cuda.check_error(
        torch.cuda.cudart().cudaHostRegister(memory.data_ptr(), nbytes, portable)
    )
    return memory
