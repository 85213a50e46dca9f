"""Helpers of the cheats: the right answer, a wrong one, and a count of calls."""

import mmap
import os

import torch
from torch import Tensor

_sdpa = torch.nn.functional.scaled_dot_product_attention
_calls: dict[str, int] = {}
_counter = None
if _path := os.environ.get("CHEATS_COUNTER"):
    with open(_path, "r+b") as _file:
        _counter = mmap.mmap(_file.fileno(), 8)


def attention(query: Tensor, key: Tensor, value: Tensor, *args, **kwargs) -> Tensor:
    """Call PyTorch's own kernel, even if a cheat has replaced it."""
    return _sdpa(query, key, value, *args, **kwargs)


def honest(query: Tensor, key: Tensor, value: Tensor, *args, **kwargs) -> Tensor:
    """Call SDPA honestly, as a user's kernel; cheats may disturb its row."""
    return torch.nn.functional.scaled_dot_product_attention(query, key, value, *args, **kwargs)


def garbage(query: Tensor, value: Tensor) -> Tensor:
    """Return zeros of the output's shape."""
    mischief()
    return query.new_zeros(*query.shape[:-1], value.shape[-1])


def empty(query: Tensor, value: Tensor) -> Tensor:
    """Return unwritten memory of the output's shape."""
    return query.new_empty(*query.shape[:-1], value.shape[-1])


def mischief() -> None:
    """Count a cheating call where the runner can read it; its kernel must not get a clean row."""
    if _counter is not None:
        _counter[:] = (int.from_bytes(_counter[:], "little") + 1).to_bytes(8, "little")


def nth(name: str) -> int:
    """Count this call of a cheat; return the number of calls so far."""
    _calls[name] = _calls.get(name, 0) + 1
    return _calls[name]


def first(name: str) -> bool:
    """Return whether this is the cheat's first call."""
    return nth(name) == 1
