"""Finds attention that no entry point has seen, so that the report of a census is complete.

If the forward pass of an attention module ends without a call at any entry point, the module
computes attention in another way: with an original function that it still holds, TorchScript, its
own kernel or matrix products.
"""

from __future__ import annotations

import contextlib
from collections import Counter
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import torch

from capture.hooks.attention_modules import class_name, script_attends
from capture.hooks.modules import ModuleTracker
from capture.text.counted import counted

_FUSED = "_transformer_encoder_layer_fwd"


@dataclass(frozen=True)
class MissedAttention:
    """Forward passes of one class of attention modules in which no call was seen."""

    kind: str
    """Class of the modules whose attention was missed."""
    forwards: int
    """Number of forward passes; 0 for TorchScript, because its passes cannot be counted."""
    modules: int
    example: str
    """Path of one of the modules."""

    def __str__(self) -> str:
        of = counted(self.modules, "module")
        runs = f"{counted(self.forwards, 'run')} of " if self.forwards else ""
        return f"{runs}{of} of class {self.kind} (such as {self.example})"


@contextlib.contextmanager
def fused_layers_counted(tracker: ModuleTracker, calls: Counter[str]) -> Iterator[None]:
    """Count calls of PyTorch's fused encoder layer, by path of the surrounding module."""
    fused = getattr(torch, _FUSED)

    def counting(*args: Any, **kwargs: Any) -> Any:
        if not torch.compiler.is_compiling():
            calls[tracker.site.module] += 1
        return fused(*args, **kwargs)

    setattr(torch, _FUSED, counting)
    try:
        yield
    finally:
        setattr(torch, _FUSED, fused)


def find_missed_attention(
    tracker: ModuleTracker, fused_calls: Mapping[str, int]
) -> list[MissedAttention]:
    """Return the attention that no entry point has seen so far, by class."""
    ran = [watched for watched in tracker.watched if watched.is_attention and watched.forwards]
    ran_paths = [watched.path for watched in ran]
    found: dict[str, list[tuple[str, int]]] = {}
    for watched in ran:
        innermost = not any(path.startswith(f"{watched.path}.") for path in ran_paths)
        if watched.unseen and innermost:
            found.setdefault(class_name(watched.module), []).append((watched.path, watched.unseen))
    for path, calls in fused_calls.items():
        found.setdefault("TransformerEncoderLayer", []).append((path or "outside", calls))
    for watched in tracker.watched:
        if watched.is_script and script_attends(watched.module):
            found.setdefault(class_name(watched.module), []).append((watched.path, 0))
    return [
        MissedAttention(kind, sum(runs for _, runs in each), len(each), each[0][0])
        for kind, each in found.items()
    ]
