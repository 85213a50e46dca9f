"""The probe that notices GPU work of a worker that is stopped.

SIGSTOP stops every thread of a worker's family (`processes.supervise`), but a GPU goes on with what
they have enqueued. Only another process can see that, so the judge, which uses the GPU anyway,
times copies there. CPU work needs no probe: a stopped process cannot go on with any.
"""

from __future__ import annotations

import functools
import math
import time
from collections.abc import Callable
from typing import Literal

import torch
from torch import Tensor

SLOW = 1.2
"""Ratio to the fastest probe above which a probe is slow. Processes share a GPU in time slices, so
work of another process at least doubles the time; clocks alone change it by several per cent."""
TRIES = 5
"""Number of probes in a row that must all be slow."""
COPIES, BYTES = 16, 2**25
"""Number of copies in a probe, which take about half a millisecond, and the size of each."""

Finding = Literal["quiet", "busy machine", "disturbed"]


class Probe:
    """Decides whether work of the previous worker goes on.

    Args:
        measure: returns the milliseconds of a probe; infinity if it fails.
    """

    def __init__(self, measure: Callable[[], float]) -> None:
        self._measure = measure
        self._fastest = math.inf
        self._is_over = False

    def is_slow(self) -> bool:
        """Return whether several probes are slower than the fastest probe so far."""
        for _ in range(TRIES):
            ms = self._measure()
            self._fastest = min(self._fastest, ms)
            if ms <= SLOW * self._fastest:
                return False
        return True

    def find(self, end_worker: Callable[[], None]) -> Finding:
        """Return who disturbs the GPU; the previous worker is ended to find that out.

        If the probe is slow even then, other programs use the GPU, and no worker is suspected any
        more.
        """
        if self._is_over or not self.is_slow():
            return "quiet"
        end_worker()
        self._is_over = self.is_slow()
        return "busy machine" if self._is_over else "disturbed"


@functools.cache
def _buffers(device: torch.device) -> Tensor:
    return torch.zeros(2, BYTES, dtype=torch.uint8, device=device)


def gpu_probe_ms(device: torch.device) -> float:
    """Return the milliseconds in which a GPU begins and ends some copies."""
    target, source = _buffers(device)
    torch.cuda.synchronize(device)
    began = time.perf_counter()
    for _ in range(COPIES):
        target.copy_(source)
    torch.cuda.synchronize(device)
    return (time.perf_counter() - began) * 1000
