"""Moves tensors from GPUs to host memory in a thread of its own, so that the model does not wait.

The tensors pass through two small pieces of pinned memory on their way to ordinary memory. Pinning
memory for whole calls would take longer, and would delay the model's own calls of CUDA.
"""

from __future__ import annotations

import contextlib
import ctypes
import threading
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import Future
from queue import SimpleQueue
from typing import TypeVar

import torch
from torch import Tensor

from capture.recording.termination import Job, started

PIECE = 8 << 20
"""Bytes of each piece of pinned memory."""

_PIECES = 2
_RELAXED = 2
"""CU_STREAM_CAPTURE_MODE_RELAXED of the CUDA driver."""

Result = TypeVar("Result")


class Mover:
    """Thread that performs moves, one after another."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._moves: SimpleQueue[Callable[[], None] | None] = SimpleQueue()
        self._job: Job | None = None
        self._pieces: list[Tensor] = []
        self._streams: dict[torch.device, torch.cuda.Stream] = {}

    def start(self, move: Callable[[], Result]) -> Future[Result]:
        """Queue a move and return its future; cancelling it before it begins releases `move`.

        Raises:
            CaptureError: the thread cannot be started.
        """
        with self._lock:
            if self._job is None:
                self._job = started(self._work)
        future: Future[Result] = Future()
        pending = [move]
        future.add_done_callback(lambda _: pending.clear())

        def perform() -> None:
            if future.set_running_or_notify_cancel():
                try:
                    result = pending[0]()
                except BaseException as error:  # its traceback would hold the tensors on the GPU
                    future.set_exception(error.with_traceback(None))
                else:
                    future.set_result(result)

        self._moves.put(perform)
        return future

    def bring(
        self, gpu: torch.device, pairs: Iterable[tuple[Tensor, Tensor]], ready: torch.cuda.Event
    ) -> None:
        """Copy tensors from a GPU to the host, and wait for them. Call it only inside a move.

        Args:
            pairs: source on the GPU, and contiguous target of the same shape and dtype.
            ready: event after which the sources have their values.
        """
        if not self._pieces:
            self._pieces = [_pinned(PIECE) for _ in range(_PIECES)]
        on_the_way: deque[tuple[torch.cuda.Event, Tensor, Tensor]] = deque()
        with torch.cuda.device(gpu):
            if gpu not in self._streams:
                self._streams[gpu] = torch.cuda.Stream()
            with torch.cuda.stream(self._streams[gpu]):
                self._streams[gpu].wait_event(ready)
                for index, (part, place) in enumerate(_parts(pairs)):
                    if index >= _PIECES:
                        _arrive(*on_the_way.popleft())
                    piece = self._pieces[index % _PIECES][: part.nbytes]
                    piece = piece.view(part.dtype).view(part.shape)
                    piece.copy_(part, non_blocking=True)
                    arrived = torch.cuda.Event()
                    arrived.record()
                    on_the_way.append((arrived, piece, place))
                for each in on_the_way:
                    _arrive(*each)

    def close(self) -> None:
        """Finish the moves, and end the thread."""
        self._moves.put(None)
        if self._job is not None:
            self._job.join()

    def _work(self) -> None:
        _permit_graph_captures()
        while (perform := self._moves.get()) is not None:
            perform()
            del perform  # it may hold tensors on a GPU while this thread waits


def _arrive(arrived: torch.cuda.Event, piece: Tensor, place: Tensor) -> None:
    arrived.synchronize()
    place.copy_(piece)


def _parts(pairs: Iterable[tuple[Tensor, Tensor]]) -> Iterator[tuple[Tensor, Tensor]]:
    """Divide pairs of tensors into parts of at most `PIECE` bytes."""
    for source, target in pairs:
        if source.nbytes <= PIECE:
            yield source, target
        elif source[0].nbytes > PIECE:
            yield from _parts(zip(source, target, strict=True))
        else:
            rows = PIECE // source[0].nbytes
            yield from zip(source.split(rows), target.split(rows), strict=True)


def _pinned(nbytes: int) -> Tensor:
    """Return pinned memory, or ordinary memory if none can be pinned, which is slower."""
    try:
        return torch.empty(nbytes, dtype=torch.uint8, device="cpu", pin_memory=True)
    except RuntimeError:
        return torch.empty(nbytes, dtype=torch.uint8, device="cpu")


def _permit_graph_captures() -> None:
    """Let other threads capture CUDA graphs while this thread allocates memory and waits.

    Otherwise CUDA ends a capture in another thread with an error. PyTorch offers no such call.
    """
    with contextlib.suppress(OSError, AttributeError):  # not an NVIDIA GPU
        exchange = ctypes.CDLL("libcuda.so.1").cuThreadExchangeStreamCaptureMode
        exchange(ctypes.byref(ctypes.c_int(_RELAXED)))
