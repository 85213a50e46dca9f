"""Denoisers that keep no activations for backward passes, but compute them again."""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable, Iterator, Mapping
from typing import Any

from torch import nn
from torch.utils.checkpoint import checkpoint

from capture.hooks.phases import stepping


@contextlib.contextmanager
def recomputed(roots: Mapping[str, nn.Module]) -> Iterator[None]:
    """Keep the inputs alone of each forward pass of a denoiser in the block.

    Where a model of diffusers supports it, a recomputed pass keeps the inputs of its blocks alone.
    Language models are left as they are, because a pass may change their cache.
    """
    with contextlib.ExitStack() as stack:
        for root in roots.values():
            for module, role in stepping(root).items():
                if role.time_steps:
                    stack.enter_context(_by_block(module))
                    stack.enter_context(_whole(module))
        yield


@contextlib.contextmanager
def _by_block(module: Any) -> Iterator[None]:
    if not getattr(module, "_supports_gradient_checkpointing", False):
        yield
        return
    before = module.is_gradient_checkpointing
    module.enable_gradient_checkpointing()
    try:
        yield
    finally:
        if not before:
            module.disable_gradient_checkpointing()


@contextlib.contextmanager
def _whole(module: nn.Module) -> Iterator[None]:
    before = vars(module).get("forward")
    forward: Callable[..., Any] = module.forward

    @functools.wraps(forward)
    def again(*args: Any, **kwargs: Any) -> Any:
        return checkpoint(functools.partial(forward, **kwargs), *args, use_reentrant=False)

    module.forward = again
    try:
        yield
    finally:
        if before is None:
            del module.forward
        else:
            module.forward = before
