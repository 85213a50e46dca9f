"""An honest kernel, whose row cheats may try to change, and helpers of the cheats."""

import itertools
import sys

from torch.nn.functional import scaled_dot_product_attention as attention


def honest(query, key, value, *args, **kwargs):
    """Calls SDPA, as a user's kernel."""
    return attention(query, key, value, *args, **kwargs)


def after(calls):
    """Return a decorator of a cheat, whose first calls are honest."""

    def decorate(cheat):
        count = itertools.count()

        def kernel(*args, **kwargs):
            return (cheat if next(count) >= calls else attention)(*args, **kwargs)

        return kernel

    return decorate


def at(number):
    """Return a decorator of a disturbance, which makes it an honest kernel's call `number`."""

    def decorate(disturb):
        count = itertools.count(1)

        def kernel(*args, **kwargs):
            if next(count) == number:
                disturb()
            return attention(*args, **kwargs)

        return kernel

    return decorate


def local(name: str):
    """Return the nearest caller's local variable of this name; None if there is none."""
    frame = sys._getframe(1)
    while frame is not None:
        if name in frame.f_locals:
            return frame.f_locals[name]
        frame = frame.f_back
    return None
