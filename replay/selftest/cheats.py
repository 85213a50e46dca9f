"""Kernels that cheat, and the check that all of them are caught."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention as sdpa

from replay.bench.runner import DEFAULT_BASELINE, replay_here
from replay.bench.settings import Settings, WorkerOptions
from replay.kernels.registry import Kernel
from replay.rows.row import Row
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


def cached_by_pointer() -> Attention:
    """Keep the result as long as the inputs have the same addresses."""
    kept: dict[object, Tensor] = {}

    def attention(query: Tensor, key: Tensor, value: Tensor, **options: Any) -> Tensor:
        where = (query.data_ptr(), key.data_ptr(), value.data_ptr())
        if where not in kept:
            kept[where] = sdpa(query, key, value, **options)
        return kept[where].clone()

    return attention


def cached_by_shape() -> Attention:
    """Keep the first result forever."""
    kept: list[Tensor] = []

    def attention(query: Tensor, key: Tensor, value: Tensor, **options: Any) -> Tensor:
        if not kept:
            kept.append(sdpa(query, key, value, **options))
        return kept[0].clone()

    return attention


def cached_by_checksum() -> Attention:
    """Keep the result as long as the query has the same checksum."""
    kept: dict[float, Tensor] = {}

    def attention(query: Tensor, key: Tensor, value: Tensor, **options: Any) -> Tensor:
        checksum = float(query.abs().sum())
        if checksum not in kept:
            kept.clear()
            kept[checksum] = sdpa(query, key, value, **options)
        return kept[checksum].clone()

    return attention


def _honest_at_first(cheat: Attention) -> Attention:
    calls = 0

    def attention(query: Tensor, key: Tensor, value: Tensor, **options: Any) -> Tensor:
        nonlocal calls
        calls += 1
        return (sdpa if calls <= HONEST_CALLS else cheat)(query, key, value, **options)

    return attention


def skips_keys() -> Attention:
    """Attend to only half of the keys, after a few honest calls."""

    def attention(query: Tensor, key: Tensor, value: Tensor, **options: Any) -> Tensor:
        half = key.shape[2] // 2
        return sdpa(query, key[:, :, :half], value[:, :, :half], **options)

    return _honest_at_first(attention)


def skips_a_head() -> Attention:
    """Leave out half of the heads, after a few honest calls."""

    def attention(query: Tensor, key: Tensor, value: Tensor, **options: Any) -> Tensor:
        output = torch.zeros_like(query)
        half = query.shape[1] // 2
        kv_half = key.shape[1] // 2
        output[:, :half] = sdpa(query[:, :half], key[:, :kv_half], value[:, :kv_half], **options)
        return output

    return _honest_at_first(attention)


def returns_nothing_new() -> Attention:
    """Return unwritten memory, after a few honest calls."""
    return _honest_at_first(lambda query, key, value, **options: torch.empty_like(query))


def lower_precision() -> Attention:
    """Compute float32 in 16 bits."""

    def attention(query: Tensor, key: Tensor, value: Tensor, **options: Any) -> Tensor:
        output = sdpa(query.bfloat16(), key.bfloat16(), value.bfloat16(), **options)
        return output.to(query.dtype)

    return attention


def lower_precision_later() -> Attention:
    """Compute float32 in 16 bits, but only after a few honest calls."""
    return _honest_at_first(lower_precision())


def another_dtype() -> Attention:
    """Leave the conversion of the output to the caller."""

    def attention(query: Tensor, key: Tensor, value: Tensor, **options: Any) -> Tensor:
        return sdpa(query.bfloat16(), key.bfloat16(), value.bfloat16(), **options)

    return attention


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


def lazy() -> Attention:
    """Return a tensor that is computed only when it is read."""

    def attention(query: Tensor, key: Tensor, value: Tensor, **options: Any) -> Tensor:
        output = torch.empty_like(query).as_subclass(_Later)
        output.inputs, output.options = (query, key, value), options
        return output

    return attention


def in_the_background() -> Attention:
    """Return immediately, and compute in a thread."""

    def attention(query: Tensor, key: Tensor, value: Tensor, **options: Any) -> Tensor:
        output = torch.empty_like(query)
        inputs = (query.clone(), key.clone(), value.clone())

        def compute() -> None:
            time.sleep(LATE_SECONDS)
            output.copy_(sdpa(*inputs, **options))

        threading.Thread(target=compute).start()
        return output

    return attention


def on_another_stream() -> Attention:
    """Return immediately, and compute on a stream that no event waits for."""
    streams: list[torch.cuda.Stream] = []

    def attention(query: Tensor, key: Tensor, value: Tensor, **options: Any) -> Tensor:
        if not streams:
            streams.append(torch.cuda.Stream(query.device))
        streams[0].wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(streams[0]):
            return sdpa(query, key, value, **options)

    return attention


CHEATS: dict[str, Callable[[], Attention]] = {
    "result cached by pointer": cached_by_pointer,
    "result cached by shape": cached_by_shape,
    "result cached by checksum": cached_by_checksum,
    "half of the keys": skips_keys,
    "half of the heads": skips_a_head,
    "unwritten output": returns_nothing_new,
    "lower precision": lower_precision,
    "lower precision later": lower_precision_later,
    "another dtype": another_dtype,
    "lazy tensor": lazy,
    "background thread": in_the_background,
}
GPU_CHEATS: dict[str, Callable[[], Attention]] = {"another stream": on_another_stream}
"""Cheats that are possible only on a GPU."""

HONEST = "honest"


def planted_cheats(device: torch.device) -> Result:
    """Replay every cheat and one honest kernel, and check the verdicts."""
    cheats = {**CHEATS, **(GPU_CHEATS if device.type == "cuda" else {})}
    rows = {name: outcome(name, make(), device) for name, make in cheats.items()}
    missed = [name for name, row in rows.items() if row.status == "ok"]
    accused = outcome(HONEST, sdpa, device).status != "ok"
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
