"""Kernels with one fault each, in a user's file, for `test_workers.py`."""

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
chain: Any = None
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


def disturb(*arguments: Any, **options: Any) -> Tensor:
    """Close stdout, make pipes non-blocking, so that reads return no data, and fork once.

    Garbage collection must be on after PyTorch's import, and ignore PyTorch's objects.
    """
    assert gc.isenabled()
    assert gc.get_freeze_count() > 100_000
    sys.stdout.close()
    print("stdout must stay open")
    for descriptor in range(3, 64):
        with contextlib.suppress(OSError):
            os.set_blocking(descriptor, False)
    calls_of["disturb"] = calls_of.get("disturb", 0) + 1
    if calls_of["disturb"] == 2:
        os.fork()  # both processes return
    return good(*arguments, **options)


def keep_memory(*arguments: Any, **options: Any) -> Tensor:
    """Allocate nearly all available memory and keep it."""
    size = 2**30
    while size > 2**24:
        try:
            kept.append(torch.empty(size, dtype=torch.uint8))
        except RuntimeError:
            size //= 2
    raise MemoryError("all of it is kept")


def keep_every_byte(*arguments: Any, **options: Any) -> Tensor:
    """Take what `keep_memory` leaves, down to the last small object."""
    global chain
    with contextlib.suppress(MemoryError):
        keep_memory()
    while True:
        chain = (chain, bytes(40))


def never_the_same(*arguments: Any, **options: Any) -> Tensor:
    output = good(*arguments, **options)
    calls_of["never_the_same"] = calls_of.get("never_the_same", 0) + 1
    output[0, 0, 0, 0] *= 1 + 1e-6 * (calls_of["never_the_same"] % 3)
    return output


def dies_in_compiled_code(*tensors, **options):
    if torch.compiler.is_compiling():
        os._exit(3)
    return torch.nn.functional.scaled_dot_product_attention(*tensors, **options)
