"""Entry in the table of foreign models: how to build and run a model, and its expected calls."""

from collections import Counter
from collections.abc import Callable
from typing import Any, NamedTuple

Calls = Counter[tuple[str, int]]
"""Number of a run's attention calls, by phase and step."""

Run = Callable[[], Any]
"""Function that runs the model and returns tensors in any nesting."""


class Foreign(NamedTuple):
    """Model of another project, built from a tiny configuration with random weights."""

    name: str
    build: Callable[[], tuple[Any, Run]]
    """Function that returns the model to record and a function that runs it, both deterministic."""
    calls: Calls
    """Expected calls, derived by hand from the configuration."""
    entry_points: frozenset[str] = frozenset({"sdpa"})
    unseen: dict[str, int] = {}  # noqa: RUF012
    """Expected number of attention computations outside all entry points, by class of module."""


def generated(prefill: int, decode: int | None = None, *, steps: int = 3) -> Calls:
    """Return the calls of a language model that reads a prompt and decodes `steps` tokens."""
    later = prefill if decode is None else decode
    return Counter({("prefill", 0): prefill, **{("decode", i): later for i in range(1, steps)}})


def encoded(calls: int) -> Calls:
    """Return the calls of one forward pass of an encoder."""
    return Counter({("encode", 0): calls})


def denoised(calls: int, *, steps: int = 2) -> Calls:
    """Return the calls of a denoiser whose forward passes all make the same number of calls."""
    return Counter({("denoise", step): calls for step in range(steps)})


NONE: Calls = Counter()
