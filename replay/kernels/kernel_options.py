"""Conversion of a recorded call's options to the options of our kernels."""

from __future__ import annotations

from typing import TYPE_CHECKING

from capture.call.attention_variant import AttentionVariant

if TYPE_CHECKING:
    from attention_kernels.options import AttentionOptions

MOST_KEPT = 1024


def kernel_options(variant: AttentionVariant) -> AttentionOptions:
    """Return a variant as options of our kernels; the object `PLAIN` if the variant has no options.

    Kernels recognise `PLAIN` without hashing it. Conversions are cached by identity, because
    hashing a variant would take longer than the rest of a launch on the host.
    """
    found = _converted.get(id(variant))
    if found is None:
        if len(_converted) >= MOST_KEPT:
            _converted.clear()
        # Cache the variant too, so that no other object can get its identity.
        found = _converted[id(variant)] = variant, _convert(variant)
    return found[1]


_converted: dict[int, tuple[AttentionVariant, AttentionOptions]] = {}


def _convert(variant: AttentionVariant) -> AttentionOptions:
    from attention_kernels.options import PLAIN, AttentionOptions

    options = AttentionOptions(variant.bottom_right, variant.window, variant.softcap)
    return PLAIN if options == PLAIN else options
