"""Entry points to attention other than `scaled_dot_product_attention`, one per file.

Each file wraps functions that models call or look up, so that their calls pass through a handler,
as `capture.hooks.interceptor.intercept` does for SDPA. Entry points nest: a registry calls a
library, which calls an operator. The outermost call is handled, because it has all the options.
Registry functions that only call SDPA are not wrapped, since SDPA's arguments contain every option.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator

from capture.hooks.entry_points import (
    comfyui,
    diffusers,
    flex_attention,
    libraries,
    transformers,
    vllm,
)
from capture.hooks.interceptor import Handler

ENTRY_POINTS = (transformers, diffusers, comfyui, vllm, flex_attention, libraries)


@contextlib.contextmanager
def follow_entry_points(handler: Handler) -> Iterator[None]:
    """Pass every attention call that does not begin at SDPA to `handler`, until the exit.

    Libraries that are not imported yet are skipped, because importing them takes seconds.
    """
    with contextlib.ExitStack() as stack:
        for entry_point in ENTRY_POINTS:
            stack.enter_context(entry_point.follow(handler))
        yield
