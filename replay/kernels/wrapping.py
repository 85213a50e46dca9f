"""Conversion of a library's function to a kernel.

An adapter is a function of one call's arguments. This module gives the adapter SDPA's signature,
and raises an error for unsupported calls instead of returning a wrong output.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from dataclasses import replace
from typing import Any, ParamSpec

import torch
from torch import Tensor

from capture.call.attention_call import AttentionCall
from capture.call.attention_variant import FEATURES, PLAIN, VARIANT_TENSORS, AttentionVariant
from capture.hooks.interceptor import Arguments, bind
from replay.kernels import packed_decode as packing
from replay.kernels.constraints import ASKED_AT_EVERY_CALL, Constraint, all_of
from replay.kernels.libraries import Library
from replay.kernels.registry import Attention, Kernel, register
from replay.rows.errors_of_output import AccuracyClass

Attend = Callable[[Arguments], Tensor]
"""Function that computes the attention of one call."""

Prepare = Callable[[AttentionCall], Callable[[], Tensor]]
"""Function from a call to its core; everything before the core runs in this function."""


def drop_in(
    attend: Attend, limits: Sequence[Constraint], features: Collection[str] = ()
) -> Attention:
    """Give `attend` SDPA's own signature, plus arguments for features beyond SDPA.

    The result raises NotImplementedError for a missing feature, and for unmet limits that can be
    checked at every call (`ASKED_AT_EVERY_CALL`).
    """
    known = frozenset(features)
    asked = sorted((each for each in ASKED_AT_EVERY_CALL if each in limits), key=limits.index)

    def attention(
        query: Tensor,
        key: Tensor,
        value: Tensor,
        attn_mask: Tensor | None = None,
        dropout_p: float = 0.0,
        is_causal: bool = False,
        *,
        scale: float | None = None,
        enable_gqa: bool = False,
        **beyond: Any,
    ) -> Tensor:
        call = bind(
            query, key, value, attn_mask, dropout_p, is_causal, scale=scale, enable_gqa=enable_gqa
        )
        if beyond:
            call = _extended(call, beyond)
        # Skip the comparison of sets for calls without features, which are the common case.
        if (beyond or call.variant is not PLAIN) and not known.issuperset(call.features):
            raise NotImplementedError(f"has no {FEATURES[min(set(call.features) - known)]}")
        for constraint in asked:
            if (reason := constraint(call)) is not None:
                raise NotImplementedError(reason)
        return attend(call)

    return attention


def _extended(call: Arguments, beyond: dict[str, Any]) -> Arguments:
    """Return the call with arguments beyond SDPA's, named as in `AttentionCall.arguments`.

    The function fills a list, because `_replace` would take three times as long at every call.
    """
    arguments, options = list(call), {}
    for name, each in beyond.items():
        place = _PLACES.get(name)
        if place is None:
            options[name] = each
        else:
            arguments[place] = each
    if options:  # a `CausalBias` may already have set some options
        is_plain = call.variant is PLAIN
        variant = AttentionVariant(**options) if is_plain else replace(call.variant, **options)
        arguments[_PLACE_OF_VARIANT] = variant
    return Arguments._make(arguments)


_PLACES = {name: Arguments._fields.index(name) for name in VARIANT_TENSORS}
_PLACE_OF_VARIANT = Arguments._fields.index("variant")


def at_once(prepare: Callable[[Arguments], Callable[[], Tensor]]) -> Attend:
    """Return the drop-in of a kernel, which prepares a call and runs the core."""
    return lambda call: prepare(call)()


def adapt(
    name: str,
    library: Library,
    attend: Attend,
    limits: Sequence[Constraint],
    about: str,
    *,
    prepare: Prepare | None = None,
    accuracy_class: AccuracyClass = "exact",
    unavailable: Callable[[torch.device], str | None] | None = None,
    default: bool = True,
    variant_of: str = "",
    own_process: bool = False,
    chosen: Callable[[AttentionCall], Tensor] | None = None,
    options: Callable[..., Kernel] | None = None,
    features: Collection[str] = (),
    prefers_rewritten_mask: bool = False,
    packed_decode: bool = False,
    differentiable: bool | None = False,
) -> Kernel:
    """Return a kernel of `library`; `Kernel` describes the other arguments.

    Args:
        limits: conditions on a call; the first unmet one is the reason for refusing the call.
        unavailable: replaces the library's own check.
        prefers_rewritten_mask: True to replace every mask by equivalent options, if there are any;
            otherwise only masks that the kernel refuses.
        packed_decode: True to run packed batches of one query per sequence, over pages, as batches.
    """
    unsupported = all_of(*limits)
    if packed_decode:
        features, unsupported = (*features, "packed"), packing.limited(unsupported)
        attend, prepare = packing.attending(attend), prepare and packing.prepared(prepare)
    return Kernel(
        name,
        drop_in(attend, limits, features),
        accuracy_class,
        unavailable or library.unavailable,
        unsupported,
        prepare,
        default=default and not variant_of,
        about=about,
        library=library.package,
        install=library.install,
        variant_of=variant_of,
        own_process=own_process,
        chosen=chosen,
        options=options,
        differentiable=differentiable,
        features=frozenset(features),
        prefers_rewritten_mask=lambda call: prefers_rewritten_mask,
    )


_P = ParamSpec("_P")


def _and_register(make: Callable[_P, Kernel]) -> Callable[_P, Kernel]:
    def registered(*arguments: _P.args, **named: _P.kwargs) -> Kernel:
        return register(make(*arguments, **named))

    return registered


register_adapted = _and_register(adapt)
"""Function with the arguments of `adapt`, which registers the kernel that `adapt` returns."""
