"""The probe that notices GPU work of a stopped worker.

SIGSTOP stops every thread of a worker's family (`processes.supervise`), but the GPU continues with
the work that they have enqueued. The judge notices such work, because its own copies on the GPU
become slow. CPU work needs no probe, because a stopped process uses no processor.
"""

from __future__ import annotations

import functools
import math
import time
from collections.abc import Callable, Iterator, Sequence

import torch
from torch import Tensor

SLOW = 1.2
"""Ratio to the fastest probe above which a probe is slow. Processes share a GPU in time slices, so
work of another process at least doubles the time. Clocks alone change it by several per cent."""
TRIES = 5
"""Number of consecutive probes; work is suspected only if all are slow."""
COPIES, BYTES = 16, 2**25
"""Number of copies in a probe, and bytes of each copy. All copies take about half a millisecond."""


class Probe:
    """Decides whether a stopped worker still has work on the GPU.

    Args:
        measure: returns the milliseconds of a probe; infinity if it fails.
    """

    def __init__(self, measure: Callable[[], float]) -> None:
        self._measure = measure
        self._fastest = math.inf
        self._is_over = False

    def is_slow(self) -> bool:
        """Return whether several probes are all slower than the fastest probe so far."""
        return all(self._probes())

    def _probes(self) -> Iterator[bool]:
        for _ in range(TRIES):
            ms = self._measure()
            self._fastest = min(self._fastest, ms)
            yield ms > SLOW * self._fastest

    def ended(self, suspects: Sequence[Callable[[], None]]) -> tuple[int, bool]:
        """End suspected workers, one after another, until probes are fast again.

        A worker is to blame only if all probes are fast after its end. If some are still slow when
        all suspects have ended, other programs use the GPU, and suspicion ends for good.

        Returns:
            The number of workers that were ended, and whether the last of these is to blame.
        """
        if self._is_over or not self.is_slow():
            return 0, False
        for number, end in enumerate(suspects, 1):
            end()
            if not any(self._probes()):
                return number, True
        self._is_over = True
        return len(suspects), False


@functools.cache
def _buffers(device: torch.device) -> Tensor:
    return torch.zeros(2, BYTES, dtype=torch.uint8, device=device)


def gpu_probe_ms(device: torch.device) -> float:
    """Return the milliseconds that some copies on a GPU take."""
    target, source = _buffers(device)
    torch.cuda.synchronize(device)
    began = time.perf_counter()
    for _ in range(COPIES):
        target.copy_(source)
    torch.cuda.synchronize(device)
    return (time.perf_counter() - began) * 1000
