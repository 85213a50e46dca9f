"""How models reach attention other than by `scaled_dot_product_attention`, one road a file.

A road replaces what models call, or look up, with a wrapper that passes the call to a handler, as
`capture.hooks.interceptor.intercept` does for SDPA. Roads nest: a registry calls a library, which
calls an operator. The outermost call is the one that is handled, because it knows what it asks;
except where a registry merely calls SDPA, whose own arguments then say it all.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator

from capture.hooks.entry_points import comfyui, diffusers, flex_attention, libraries, transformers
from capture.hooks.interceptor import Handler

ENTRY_POINTS = (transformers, diffusers, comfyui, flex_attention, libraries)


@contextlib.contextmanager
def follow_entry_points(handler: Handler) -> Iterator[None]:
    """Pass every attention call that does not begin as one of SDPA to `handler`, until the exit.

    Libraries that are not imported yet are not followed: importing them takes seconds.
    """
    with contextlib.ExitStack() as stack:
        for entry_point in ENTRY_POINTS:
            stack.enter_context(entry_point.follow(handler))
        yield
