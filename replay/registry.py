"""What a kernel is to the replay, and where kernels are found.

A kernel is one function with SDPA's own arguments, registered under a name:

    from replay import register_kernel

    @register_kernel("mine")
    def mine(query, key, value, attn_mask=None, dropout_p=0.0, is_causal=False,
             *, scale=None, enable_gqa=False):
        ...

Every file in `replay/kernels/` registers its kernels when imported; adding one is adding a file. A
library is imported when its kernel is first asked for, never with the file.
"""

from __future__ import annotations

import difflib
import fnmatch
import importlib
import pkgutil
from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from capture.call import AttentionCall
from replay.accuracy import AccuracyClass

Attention = Callable[..., Tensor]
"""SDPA's signature: (query, key, value, attn_mask, dropout_p, is_causal, *, scale, enable_gqa)."""


class KernelNameError(Exception):
    """A name that no kernel has; the message lists the nearest."""


def _always(_: object) -> None:
    return None


@dataclass(frozen=True)
class Kernel:
    """A kernel as the replay sees it."""

    name: str
    attention: Attention
    """The drop-in call: what a model would run, layout changes and quantisation included."""
    accuracy_class: AccuracyClass = "exact"
    """`exact` (16 or 32 bits throughout) or `quantised`: by which rule its output is judged."""
    unavailable: Callable[[torch.device], str | None] = _always
    """Why it cannot run on a device at all (not installed, wrong architecture), found by trying."""
    unsupported: Callable[[AttentionCall], str | None] = _always
    """Why it cannot run one call (mask, head_dim, dtype …)."""
    prepare: Callable[[AttentionCall], Callable[[], Tensor]] | None = None
    """The core alone: everything before the kernel done once, the returned callable the rest."""
    default: bool = True
    """Whether it runs when no kernel is named."""
    about: str = ""
    """One line for `--list-kernels`."""


_kernels: dict[str, Kernel] = {}


def register(kernel: Kernel) -> Kernel:
    """Add a kernel to the catalogue.

    Raises:
        ValueError: the name is taken.
    """
    if kernel.name in _kernels:
        raise ValueError(f"a kernel named {kernel.name!r} is registered already")
    _kernels[kernel.name] = kernel
    return kernel


def register_kernel(
    name: str,
    *,
    accuracy_class: AccuracyClass = "exact",
    unavailable: Callable[[torch.device], str | None] = _always,
    unsupported: Callable[[AttentionCall], str | None] = _always,
    prepare: Callable[[AttentionCall], Callable[[], Tensor]] | None = None,
    default: bool = True,
    about: str = "",
) -> Callable[[Attention], Attention]:
    """Decorator that registers a function with SDPA's arguments as a kernel; see `Kernel`."""

    def decorate(attention: Attention) -> Attention:
        line = about or (attention.__doc__ or "").strip().partition("\n")[0]
        register(
            Kernel(
                name, attention, accuracy_class, unavailable, unsupported, prepare, default, line
            )
        )
        return attention

    return decorate


def catalogue() -> dict[str, Kernel]:
    """Every registered kernel by name, ours loaded."""
    package = importlib.import_module("replay.kernels")
    for module in pkgutil.iter_modules(package.__path__):
        importlib.import_module(f"{package.__name__}.{module.name}")
    return dict(_kernels)


def select(patterns: str | None) -> tuple[list[Kernel], list[str]]:
    """The kernels that a comma-separated list of names and globs chooses, and which were named.

    None chooses the default ones, `all` every one.

    Raises:
        KernelNameError: a name or glob fits no kernel.
    """
    kernels = catalogue()
    if patterns is None:
        return [kernel for kernel in kernels.values() if kernel.default], []
    chosen: dict[str, Kernel] = {}
    named: list[str] = []
    for pattern in filter(None, (part.strip() for part in patterns.split(","))):
        matches = fnmatch.filter(kernels, "*" if pattern == "all" else pattern)
        if not matches:
            near = difflib.get_close_matches(pattern, kernels, n=3, cutoff=0.4)
            hint = f"did you mean {', '.join(near)}?" if near else "see `replay --list-kernels`"
            raise KernelNameError(f"no kernel {pattern!r}: {hint}")
        if pattern in kernels:
            named.append(pattern)
        chosen.update((name, kernels[name]) for name in matches)
    if not chosen:
        raise KernelNameError("--kernels names no kernel; see `replay --list-kernels`")
    return list(chosen.values()), named
