"""Host memory for recorded calls that wait to be written: its limit and its buffers."""

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
"""Divisor of the free memory that gives the default limit."""

_LARGE = 1 << 20
_CGROUPS = (
    ("/sys/fs/cgroup/memory.max", "/sys/fs/cgroup/memory.current"),
    ("/sys/fs/cgroup/memory/memory.limit_in_bytes", "/sys/fs/cgroup/memory/memory.usage_in_bytes"),
)


def default_buffer_bytes() -> int:
    """Return a quarter of the free memory of this machine or container."""
    return max(available_bytes() // SHARE, 64 << 20)


def available_bytes() -> int:
    """Return the memory that the machine or the container's limit still allows to allocate."""
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
        except (OSError, ValueError):  # without such a control group, or without a limit
            continue
    return max(min(found), 0)


@dataclass(eq=False)
class HostBuffer:
    """Host memory for the tensors of one call."""

    memory: Tensor
    """uint8, (bytes,)."""
    pinned: bool
    for_pinned: bool = False
    """True if the buffer is pinned, or stands in for one that could not be pinned."""
    filled: torch.cuda.Event | None = None
    """End of a GPU's latest copy into the buffer."""

    @property
    def nbytes(self) -> int:
        return self.memory.numel()


@dataclass
class BufferPool:
    """Buffers that are used again, because pinning memory takes longer than copying to it."""

    counts: RecordingCounts = field(default_factory=RecordingCounts)
    """Counts the time that allocating and pinning takes."""
    nbytes: int = 0
    """Size of all buffers, in use or free."""
    _taken: set[HostBuffer] = field(default_factory=set)
    _free: dict[tuple[int, bool], list[HostBuffer]] = field(
        default_factory=lambda: defaultdict(list)
    )

    def take(self, nbytes: int, *, pinned: bool, limit: int) -> HostBuffer:
        """Return a free buffer of exactly this size, or allocate one.

        If all buffers would exceed `limit` bytes, free buffers of other sizes are released. Memory
        that cannot be pinned is used unpinned, which makes copies slower.
        """
        if free := self._free[nbytes, pinned]:
            buffer = free.pop()
            self._taken.add(buffer)
            return buffer
        if self.nbytes + nbytes > limit:
            self.trim()
        began = time.perf_counter()
        with torch.inference_mode(False):  # otherwise only code in inference mode could write to it
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
        """Release all memory, also of buffers that were not given back."""
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
                    buffer.filled.synchronize()  # a dropped call's copy may still be arriving
                if buffer.pinned:
                    torch.cuda.cudart().cudaHostUnregister(buffer.memory.data_ptr())


def _allocate(nbytes: int, *, pinned: bool) -> Tensor:
    if not pinned:
        return torch.empty(nbytes, dtype=torch.uint8, device="cpu")
    if nbytes < _LARGE:
        return torch.empty(nbytes, dtype=torch.uint8, device="cpu", pin_memory=True)
    # PyTorch's own pinned memory comes in powers of two, which would waste up to half of it.
    pages = mmap.mmap(-1, nbytes)
    with contextlib.suppress(AttributeError, OSError):  # not every system has huge pages
        pages.madvise(mmap.MADV_HUGEPAGE)  # fewer pages are pinned much faster
    # Zeroed to map the pages with all threads; pinning would do it with one.
    memory = torch.frombuffer(pages, dtype=torch.uint8).zero_()
    portable = 1  # pinned for every GPU
    torch.cuda.check_error(
        torch.cuda.cudart().cudaHostRegister(memory.data_ptr(), nbytes, portable)
    )
    return memory
