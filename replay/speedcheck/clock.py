"""How long a model's run takes, and each forward of its main module, phase by phase.

Only the watched roots carry hooks, two a forward, so that what is measured is the model and not the
measuring. On CUDA a forward's time is that between two events on its stream, waits for the host
included; on a CPU it is wall time.
"""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import asdict, dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

from capture.modules import phase_of


@dataclass
class RunTimes:
    """The times of one run, in seconds."""

    run: float = 0.0
    """From start to the last result, wall time."""
    forwards: dict[str, list[float]] = field(default_factory=dict)
    """Of each forward, in order, by phase: `denoise`, `prefill`, `decode`, `encode`."""
    tokens: dict[str, int] = field(default_factory=dict)
    """Tokens that a forward reads (prefill) or makes (decode), over the batch."""

    def to_json(self) -> dict[str, Any]:
        return asdict(self)


@contextlib.contextmanager
def clocked(
    roots: Mapping[str, nn.Module],
    device: torch.device,
    alive: Callable[[], None] = lambda: None,
) -> Iterator[RunTimes]:
    """Time what happens inside the `with` block; the times are complete when it ends.

    Args:
        alive: called at each forward.
    """
    times = RunTimes()
    on_gpu = device.type == "cuda"
    marks: list[tuple[str, Any, Any]] = []
    begun: list[tuple[str, Any]] = []
    counts = dict.fromkeys(roots.values(), 0)

    def now() -> Any:
        if not on_gpu:
            return time.perf_counter()
        event = torch.cuda.Event(enable_timing=True)
        event.record()
        return event

    def enter(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        alive()
        phase = phase_of(module, args, kwargs, counts[module])
        counts[module] += 1
        tokens = kwargs.get("input_ids")
        if phase in ("prefill", "decode") and isinstance(tokens, Tensor):
            times.tokens[phase] = tokens.numel()
        begun.append((phase, now()))

    def leave(module: nn.Module, args: tuple[Any, ...], output: Any) -> None:
        phase, start = begun.pop()
        marks.append((phase, start, now()))

    with contextlib.ExitStack() as hooks:
        for root in roots.values():
            hooks.callback(root.register_forward_pre_hook(enter, with_kwargs=True).remove)
            hooks.callback(root.register_forward_hook(leave, always_call=True).remove)
        if on_gpu:
            torch.cuda.synchronize(device)
        start = time.perf_counter()
        yield times
        if on_gpu:
            torch.cuda.synchronize(device)
        times.run = time.perf_counter() - start
    for phase, begin, end in marks:
        seconds = begin.elapsed_time(end) / 1000 if on_gpu else end - begin
        times.forwards.setdefault(phase, []).append(seconds)
