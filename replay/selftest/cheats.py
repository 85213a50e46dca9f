"""Kernels that cheat, and the check that all of them are caught."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention as sdpa

from replay.bench.runner import replay_here
from replay.bench.settings import Settings, WorkerOptions
from replay.kernels.registry import Kernel
from replay.rows.row import DEFAULT_BASELINE, Row
from replay.selftest.result import Result
from replay.workloads.random_calls import Spec
from replay.workloads.workload import random_workload

Attention = Callable[..., Tensor]

CALL = Spec(1, 4, 2, 128, 128, 64, 64, dtype=torch.float32)
ROUNDS = 10
SECONDS = 0.1
LATE_SECONDS = 0.001
HONEST_CALLS = 12
"""Number of honest calls before a cheat begins; more than the calls before timing starts."""


def cached(key_of: Callable[[Tensor, Tensor, Tensor], object]) -> Attention:
    """Return a cheat that keeps its result until a property of the inputs changes."""
    kept: dict[object, Tensor] = {}

    def attention(query: Tensor, key: Tensor, value: Tensor, **options: Any) -> Tensor:
        place = key_of(query, key, value)
        if place not in kept:
            kept.clear()
            kept[place] = sdpa(query, key, value, **options)
        return kept[place].clone()

    return attention


def honest_at_first(cheat: Attention) -> Attention:
    """Return a kernel that cheats only after a few honest calls."""
    calls = 0

    def attention(query: Tensor, key: Tensor, value: Tensor, **options: Any) -> Tensor:
        nonlocal calls
        calls += 1
        return (sdpa if calls <= HONEST_CALLS else cheat)(query, key, value, **options)

    return attention


def half_of_the_keys(query: Tensor, key: Tensor, value: Tensor, **options: Any) -> Tensor:
    """Attend to only half of the keys."""
    half = key.shape[2] // 2
    return sdpa(query, key[:, :, :half], value[:, :, :half], **options)


def lower_precision(query: Tensor, key: Tensor, value: Tensor, **options: Any) -> Tensor:
    """Compute attention on float32 inputs in 16 bits."""
    output = sdpa(query.bfloat16(), key.bfloat16(), value.bfloat16(), **options)
    return output.to(query.dtype)


def unwritten(query: Tensor, key: Tensor, value: Tensor, **options: Any) -> Tensor:
    """Return unwritten memory."""
    return torch.empty_like(query)


class _Later(Tensor):
    """Tensor that is computed only when it is read."""

    inputs: tuple[Tensor, Tensor, Tensor]
    options: dict[str, Any]

    @classmethod
    def __torch_function__(
        cls, function: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        def now(value: Any) -> Any:
            return sdpa(*value.inputs, **value.options) if isinstance(value, _Later) else value

        return function(*map(now, args), **(kwargs or {}))


def lazy(query: Tensor, key: Tensor, value: Tensor, **options: Any) -> Tensor:
    """Return a tensor that is computed only when it is read."""
    output = torch.empty_like(query).as_subclass(_Later)
    output.inputs, output.options = (query, key, value), options
    return output


def in_the_background(query: Tensor, key: Tensor, value: Tensor, **options: Any) -> Tensor:
    """Return immediately, and compute in a thread."""
    output = torch.empty_like(query)
    inputs = (query.clone(), key.clone(), value.clone())

    def compute() -> None:
        time.sleep(LATE_SECONDS)
        output.copy_(sdpa(*inputs, **options))

    threading.Thread(target=compute).start()
    return output


def on_another_stream() -> Attention:
    """Return a cheat that returns early and computes on a stream that no event waits for."""
    streams: list[torch.cuda.Stream] = []

    def attention(query: Tensor, key: Tensor, value: Tensor, **options: Any) -> Tensor:
        if not streams:
            streams.append(torch.cuda.Stream(query.device))
        streams[0].wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(streams[0]):
            return sdpa(query, key, value, **options)

    return attention


CHEATS: dict[str, Callable[[], Attention]] = {
    "result cached by pointer": lambda: cached(
        lambda *tensors: tuple(map(Tensor.data_ptr, tensors))
    ),
    "result cached by shape": lambda: cached(lambda query, key, value: query.shape),
    "result cached by checksum": lambda: cached(lambda query, key, value: float(query.abs().sum())),
    "half of the keys": lambda: honest_at_first(half_of_the_keys),
    "unwritten output": lambda: honest_at_first(unwritten),
    "lower precision": lambda: lower_precision,
    "lower precision later": lambda: honest_at_first(lower_precision),
    "lazy tensor": lambda: lazy,
    "background thread": lambda: in_the_background,
}
"""Functions that return a new cheat without earlier state, by name of the cheat."""

GPU_CHEATS: dict[str, Callable[[], Attention]] = {"another stream": on_another_stream}
"""Cheats that are possible only on a GPU."""


def planted_cheats(device: torch.device) -> Result:
    """Replay every cheat and one honest kernel, and check the verdicts."""
    cheats = {**CHEATS, **(GPU_CHEATS if device.type == "cuda" else {})}
    rows = {name: outcome(name, make(), device) for name, make in cheats.items()}
    missed = [name for name, row in rows.items() if row.status == "ok"]
    accused = outcome("honest", sdpa, device).status != "ok"
    text = f"{len(cheats) - len(missed)} of {len(cheats)} found"
    if missed:
        text += f"; not found: {', '.join(missed)}"
    if accused:
        text += "; an honest kernel is called wrong"
    return Result(
        "planted cheats",
        not missed and not accused,
        text,
        "do not rely on times of kernels whose code you did not read",
        {"planted": len(cheats), "missed": missed, "honest_is_ok": int(not accused)},
    )


def outcome(name: str, attention: Attention, device: torch.device) -> Row:
    """Replay one kernel in this process and return its row."""
    settings = Settings(
        device, "cold" if device.type == "cuda" else "warm", rounds=ROUNDS, max_seconds=SECONDS
    )
    call = random_workload("selftest", "selftest", CALL, seed=0)
    alone = WorkerOptions(excluded=(DEFAULT_BASELINE,))
    return next(replay_here([call], [Kernel(name, attention)], settings, options=alone))
