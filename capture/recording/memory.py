"""Limit and pool of the host memory for recorded calls that are not written yet."""

from __future__ import annotations

import os
import threading
from collections import defaultdict
from pathlib import Path

import torch
from torch import Tensor

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


class BufferPool:
    """Pool of reusable memory, because mapping new memory takes longer than copying to it.

    Args:
        limit: size of all memory in bytes above which free memory is released.
    """

    def __init__(self, limit: int) -> None:
        self.nbytes = 0
        """Size of all memory, in use or free."""
        self._limit = limit
        self._is_closed = False
        self._lock = threading.Lock()
        self._free: dict[int, list[Tensor]] = defaultdict(list)

    def allocate(self, nbytes: int) -> Tensor:
        """Return free memory of exactly this size, or new memory.

        If new memory would exceed the limit, all free memory is released first.

        Returns:
            Tensor (nbytes,) of dtype uint8.
        """
        with self._lock:
            if self._free[nbytes]:
                return self._free[nbytes].pop()
            if self.nbytes + nbytes > self._limit:
                self._trim()
        with torch.inference_mode(False):  # so that code outside inference mode can write to it
            memory = torch.empty(nbytes, dtype=torch.uint8, device="cpu")
        with self._lock:
            self.nbytes += nbytes
        return memory

    def give_back(self, memory: Tensor) -> None:
        """Make memory free again, or release it if it is small or the pool is closed."""
        with self._lock:
            if self._is_closed or memory.nbytes < _LARGE:
                self.nbytes -= memory.nbytes
            else:
                self._free[memory.nbytes].append(memory)

    def close(self) -> None:
        """Release all free memory now, and other memory when it is given back."""
        with self._lock:
            self._is_closed = True
            self._trim()

    def _trim(self) -> None:
        self.nbytes -= sum(size * len(free) for size, free in self._free.items())
        self._free.clear()
