"""Puts a kernel into a running model: `with use_kernel("sage1"): pipe(...)`."""

from __future__ import annotations

import contextlib
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field

import torch
from torch import Tensor

from capture.call import AttentionCall
from capture.interceptor import Arguments, intercept
from replay.registry import Kernel, KernelNameError, find


@dataclass
class Swap:
    """What happened while a kernel was in place."""

    kernel: str
    hits: int = 0
    """Calls that the kernel answered."""
    fallbacks: Counter[str] = field(default_factory=Counter)
    """Calls that the model's own attention answered, by the reason."""

    def __str__(self) -> str:
        """`sage1: 90 calls, 48 fell back (48 × takes no mask)`."""
        if not self.fallbacks:
            return f"{self.kernel}: {self.hits} calls"
        reasons = ", ".join(f"{count} × {reason}" for reason, count in self.fallbacks.items())
        return f"{self.kernel}: {self.hits} calls, {self.fallbacks.total()} fell back ({reasons})"


@contextlib.contextmanager
def use_kernel(name: str) -> Iterator[Swap]:
    """Answer every SDPA call of this process with a kernel, as long as the `with` block lasts.

    A call that the kernel does not support goes to the model's own attention, and is counted with
    the reason: read the result before believing a timing. Compiled models run eagerly meanwhile.

    Args:
        name: a registered kernel, or `file.py:function`.

    Yields:
        A `Swap`, whose counts are live.

    Raises:
        KernelNameError: no kernel has that name, or it cannot run on this machine.

    Example:
        >>> with use_kernel("sage1") as swap:
        ...     pipe("a panda playing guitar")
        >>> print(swap)
    """
    kernel = find(name).loaded()
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    reason = kernel.unavailable(device)
    if reason:
        raise KernelNameError(f"{name} cannot run on {device}: {reason}")
    swap = Swap(name)
    unsupported = _remembering(kernel)

    def handle(
        arguments: Arguments, proceed: Callable[[], Tensor], sdpa: Callable[..., Tensor]
    ) -> Tensor:
        reason = unsupported(arguments)
        if reason:
            swap.fallbacks[reason] += 1
            return proceed()
        swap.hits += 1
        given = arguments._asdict()
        if not arguments.enable_gqa:
            del given["enable_gqa"]
        return kernel.attention(**given)

    with intercept(handle):
        yield swap


def _remembering(kernel: Kernel) -> Callable[[Arguments], str | None]:
    """The kernel's `unsupported`, asked once for calls that differ in values only.

    A mask's values can decide (padding), so calls with a mask are asked every time.
    """
    known: dict[object, str | None] = {}

    def unsupported(arguments: Arguments) -> str | None:
        query, key, value, mask, *options = arguments
        if query.ndim != 4 or (query.requires_grad and torch.is_grad_enabled()):
            return "not four-dimensional" if query.ndim != 4 else "gradients are needed"
        if mask is not None:
            return kernel.unsupported(AttentionCall(**arguments._asdict()))
        facts = tuple((each.shape, each.stride(), each.dtype) for each in (query, key, value))
        signature = (facts, *options)
        if signature not in known:
            known[signature] = kernel.unsupported(AttentionCall(**arguments._asdict()))
        return known[signature]

    return unsupported
