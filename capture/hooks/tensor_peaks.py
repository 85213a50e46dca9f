"""Computes the largest magnitudes of a model's tensors on a GPU without making the model wait.

A decoding step has many tiny tensors. They are held, and reduced together by one operation. The
results are copied to pinned memory, and read once they have arrived.
"""

from __future__ import annotations

import contextlib
import math
from collections import deque
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor

from capture.hooks.autocast import is_any_enabled
from capture.hooks.modes import outside_of_modes

LARGE = 2**19
"""Smallest size in bytes of a tensor that is reduced immediately."""

MOST_WAITING = 128
"""Number of tensors after which their peaks are copied to the host."""


class PeakQueue:
    """Queue of tensors whose largest magnitudes are wanted.

    Args:
        receive: function of a tensor's label and peak (its largest magnitude, or NaN if an element
            is NaN). It is called in the order in which tensors were added.
    """

    def __init__(self, receive: Callable[[Any, float], None]) -> None:
        self._receive = receive
        self._items: list[tuple[Any, Tensor, int | None]] = []
        """Label, held tensor and its version; or label, peak and None."""
        self._sent: deque[_Sent] = deque()

    def add(self, label: Any, tensor: Tensor) -> None:
        """Add a tensor; it is left out if the model changes it in place before it is reduced."""
        # A change of an inference tensor would go unnoticed, because it has no version.
        if tensor.is_inference() or tensor.nbytes >= LARGE:
            with undisturbed(tensor):
                peak = torch.linalg.vector_norm(tensor, math.inf)
            self._items.append((label, peak, None))
        else:
            self._items.append((label, tensor, tensor._version))
        if len(self._items) >= MOST_WAITING:
            self._send()
            self._read()

    def finish(self) -> None:
        """Wait for all results."""
        self._send()
        self._read(wait=True)

    def _send(self) -> None:
        """Reduce the held tensors, and start copying all peaks to the host."""
        items, self._items = self._items, []
        peaks: list[tuple[Any, Tensor | None]] = []
        held: list[Tensor] = []
        for label, tensor, version in items:
            if version is None:
                peaks.append((label, tensor))
            elif tensor._version == version:
                held.append(tensor)
                peaks.append((label, None))
        if peaks:
            norms = iter(_norms(held))
            self._sent.append(
                _Sent([(label, next(norms) if peak is None else peak) for label, peak in peaks])
            )

    def _read(self, *, wait: bool = False) -> None:
        while self._sent and self._sent[0].has_arrived(wait=wait):
            for label, peak in self._sent.popleft().peaks():
                self._receive(label, peak)


class _Sent:
    """Peaks that are being copied to the host.

    Args:
        peaks: label and peak of each tensor; a peak is on the tensor's device.
    """

    def __init__(self, peaks: list[tuple[Any, Tensor]]) -> None:
        self._labels = [label for label, _ in peaks]
        self._copies: list[tuple[list[int], Tensor]] = []
        self._events = []
        tensors = [peak for _, peak in peaks]
        for indices in _alike(tensors):
            first = tensors[indices[0]]
            with undisturbed(first):
                stacked = torch.stack([tensors[index] for index in indices])
                self._copies.append((indices, stacked.to("cpu", non_blocking=True)))
            if first.is_cuda:
                self._events.append(torch.cuda.Event())
                self._events[-1].record(torch.cuda.current_stream(first.device))

    def has_arrived(self, *, wait: bool) -> bool:
        for event in self._events if wait else ():
            event.synchronize()
        return all(event.query() for event in self._events)

    def peaks(self) -> list[tuple[Any, float]]:
        """Return the label and peak of each tensor, in order."""
        found = [0.0] * len(self._labels)
        for indices, copy in self._copies:
            for index, peak in zip(indices, copy.tolist(), strict=True):
                found[index] = peak
        return [*zip(self._labels, found, strict=True)]


def _norms(tensors: list[Tensor]) -> list[Tensor]:
    """Return the peak of each tensor."""
    found = [*tensors]
    for indices in _alike(tensors):
        group = [tensors[index] for index in indices]
        with undisturbed(group[0]):
            for index, norm in zip(indices, torch._foreach_norm(group, math.inf), strict=True):
                found[index] = norm
    return found


def _alike(tensors: list[Tensor]) -> list[list[int]]:
    """Return the indices of tensors in groups of the same dtype and device."""
    groups: dict[tuple[torch.dtype, torch.device], list[int]] = {}
    for index, each in enumerate(tensors):
        groups.setdefault((each.dtype, each.device), []).append(index)
    return [*groups.values()]


def undisturbed(tensor: Tensor) -> contextlib.AbstractContextManager[None]:
    """Switch off the program's modes, and autocast, which would change dtypes."""
    has_modes = torch._C._len_torch_dispatch_stack() or torch._C._len_torch_function_stack()
    if has_modes or is_any_enabled():
        return _without_modes(tensor.device.type)
    return _NOTHING


_NOTHING = contextlib.nullcontext()


@contextlib.contextmanager
def _without_modes(device_type: str) -> Iterator[None]:
    with outside_of_modes(), torch.autocast(device_type, enabled=False):
        yield
