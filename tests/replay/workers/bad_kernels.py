"""Kernels with one fault each, in a user's file, for `test_workers.py`."""

from __future__ import annotations

import contextlib
import ctypes
import gc
import os
import sys
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention

from replay import register_kernel

calls_of: dict[str, int] = {}
kept: list[Tensor] = []
weights: list[Tensor] = []


def good(query: Tensor, key: Tensor, value: Tensor, *others: Any, **options: Any) -> Tensor:
    return scaled_dot_product_attention(query, key, value, *others, **options)


def best_keys(call: Any) -> Tensor:
    scores = call.query @ call.key.mT
    return scores >= scores.topk(16).values[..., -1:]


@register_kernel("honest choice", accuracy_class="sparse", chosen=best_keys)
def honest_choice(query: Tensor, key: Tensor, value: Tensor, *_: Any, **options: Any) -> Tensor:
    return good(query, key, value, best_keys(SimpleNamespace(query=query, key=key)))


@register_kernel("kept weights", accuracy_class="sparse", chosen=best_keys)
def kept_weights(query: Tensor, key: Tensor, value: Tensor, *_: Any, **options: Any) -> Tensor:
    """Keep the weights of the first call."""
    if not weights:
        weights.append(honest_choice(query, key, torch.eye(64).expand(1, 2, 64, 64)))
    return weights[0] @ value


def segfault(*arguments: Any, **options: Any) -> Tensor:
    print("the last words of segfault")
    ctypes.string_at(0)
    raise AssertionError("still here")


def fork_and_return(*arguments: Any, **options: Any) -> Tensor:
    """Fork once; both the parent and the child return."""
    calls_of["fork"] = calls_of.get("fork", 0) + 1
    if calls_of["fork"] == 2:
        os.fork()
    return good(*arguments, **options)


def stop_waiting(*arguments: Any, **options: Any) -> Tensor:
    """Make this process's pipes non-blocking, so that reads return no data."""
    for descriptor in range(3, 64):
        with contextlib.suppress(OSError):
            os.set_blocking(descriptor, False)
    return good(*arguments, **options)


def take_memory(*arguments: Any, **options: Any) -> Tensor:
    """Allocate memory that counts as used but costs nothing, because it is never touched."""
    taken = []
    while True:
        taken.append(torch.empty(2**30, dtype=torch.uint8))


def keep_memory(*arguments: Any, **options: Any) -> Tensor:
    """Allocate all available memory and keep it."""
    size = 2**30
    while size > 2**10:
        try:
            kept.append(torch.empty(size, dtype=torch.uint8))
        except RuntimeError:
            size //= 2
    raise MemoryError("all of it is kept")


def one_nan(*arguments: Any, **options: Any) -> Tensor:
    output = good(*arguments, **options)
    output[0, 0, 0, 0] = float("nan")
    return output


def fail_at_length(*arguments: Any, **options: Any) -> Tensor:
    raise ValueError("größer \x1b[31m \udc80 " + "x" * 2**20)


def close_stdout(*arguments: Any, **options: Any) -> Tensor:
    sys.stdout.close()
    return good(*arguments, **options)


def expects_collection(*arguments: Any, **options: Any) -> Tensor:
    """Check that garbage collection is on after PyTorch's import, and ignores PyTorch's objects."""
    assert gc.isenabled()
    assert gc.get_freeze_count() > 100_000
    return good(*arguments, **options)


def never_the_same(*arguments: Any, **options: Any) -> Tensor:
    output = good(*arguments, **options)
    calls_of["never_the_same"] = calls_of.get("never_the_same", 0) + 1
    output[0, 0, 0, 0] *= 1 + 1e-6 * (calls_of["never_the_same"] % 3)
    return output
