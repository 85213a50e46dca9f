"""Makes an inference quiet and reproducible, without gradients."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from importlib import import_module
from typing import Any

import torch


def repeatable(infer: Callable[[], Any], *, seed: int, device: torch.device) -> Callable[[], Any]:
    """Wrap ``infer`` so that each call draws the same random numbers and tracks no gradients."""

    def run() -> Any:
        with torch.no_grad(), quiet(), seeded(seed, device):
            return infer()

    return run


@contextmanager
def seeded(seed: int, device: torch.device) -> Iterator[None]:
    """Seed torch's random numbers with ``seed``, and restore the global generators on exit.

    Weights that are drawn on the CPU are the same for every device.
    """
    with torch.random.fork_rng(devices=[device] if device.type == "cuda" else []):
        torch.manual_seed(seed)
        yield


@contextmanager
def quiet() -> Iterator[None]:
    """Silence the logs and progress bars of diffusers and transformers, and restore them on exit.

    Libraries that are not installed or cannot be imported are skipped.
    """
    libraries: list[Any] = []
    for name in ("diffusers", "transformers", "huggingface_hub"):
        with suppress(ImportError, RuntimeError):
            libraries.append(import_module(f"{name}.utils.logging"))
    verbosities = [library.get_verbosity() for library in libraries]
    with_bars = [
        library
        for library in libraries
        if getattr(library, "is_progress_bar_enabled", lambda: False)()
    ]
    try:
        for library in libraries:
            library.set_verbosity_error()
        for library in with_bars:
            library.disable_progress_bar()
        yield
    finally:
        for library, verbosity in zip(libraries, verbosities, strict=True):
            library.set_verbosity(verbosity)
        for library in with_bars:
            library.enable_progress_bar()
