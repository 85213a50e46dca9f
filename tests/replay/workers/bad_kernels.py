"""Kernels with one fault each, in a user's file, for `test_workers.py` and `test_process.py`."""

from __future__ import annotations

import contextlib
import ctypes
import gc
import os
import signal
import sys
import time
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention

calls_of: dict[str, int] = {}
kept: list[Tensor] = []


def good(query: Tensor, key: Tensor, value: Tensor, *others: Any, **options: Any) -> Tensor:
    return scaled_dot_product_attention(query, key, value, *others, **options)


def segfault(*arguments: Any, **options: Any) -> Tensor:
    print("the last words of segfault")
    ctypes.string_at(0)
    raise AssertionError("still here")


def interrupt(*arguments: Any, **options: Any) -> Tensor:
    raise KeyboardInterrupt


def fork_and_die(*arguments: Any, **options: Any) -> Tensor:
    """Die, but leave a forked process that keeps both pipes open."""
    if os.fork() == 0:
        time.sleep(3600)
    os.kill(os.getpid(), signal.SIGKILL)
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


def close_pipes(*arguments: Any, **options: Any) -> Tensor:
    os.closerange(3, 64)
    return good(*arguments, **options)


def _when_timed(name: str, then: Callable[[], Any]) -> None:
    """Run `then` in the kernel's sixth call, which is in the warm-up: checks make four calls."""
    calls_of[name] = calls_of.get(name, 0) + 1
    if calls_of[name] == 6:
        then()


def segfault_when_timed(*arguments: Any, **options: Any) -> Tensor:
    _when_timed("segfault", lambda: ctypes.string_at(0))
    return good(*arguments, **options)


def hang_when_timed(*arguments: Any, **options: Any) -> Tensor:
    _when_timed("hang", lambda: time.sleep(3600))
    return good(*arguments, **options)


def _memory(size: int) -> Tensor:
    """Allocate memory that counts as used but costs nothing, because it is never touched."""
    return torch.empty(size, dtype=torch.uint8)


def take_memory(*arguments: Any, **options: Any) -> Tensor:
    taken = []
    while True:
        taken.append(_memory(2**30))


def keep_memory(*arguments: Any, **options: Any) -> Tensor:
    """Allocate all available memory and keep it."""
    size = 2**30
    while size > 2**10:
        try:
            kept.append(_memory(size))
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


def print_a_megabyte(*arguments: Any, **options: Any) -> Tensor:
    print("x" * 2**20)
    sys.stderr.write("y" * 2**20)
    left = b"z" * 2**20
    while left:
        left = left[os.write(1, left) :]
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
