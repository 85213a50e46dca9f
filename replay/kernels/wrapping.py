"""How another library's function becomes a kernel.

An adapter is a function of one call's arguments. Here, and nowhere else, it gets SDPA's signature,
and what it cannot do becomes an error instead of another output.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from capture.call.attention_call import AttentionCall
from capture.call.attention_variant import FEATURES, PLAIN, VARIANT_TENSORS, AttentionVariant
from capture.hooks.interceptor import Arguments, bind
from replay.kernels.constraints import ASKED_AT_EVERY_CALL, Constraint, all_of
from replay.kernels.libraries import Library
from replay.kernels.registry import Attention, Kernel
from replay.rows.errors_of_output import AccuracyClass

Attend = Callable[[Arguments], Tensor]
"""Attention of one call."""

Prepare = Callable[[AttentionCall], Callable[[], Tensor]]
"""What `Kernel.prepare` is: all that comes before the core, and the core."""


def drop_in(
    attend: Attend, limits: Sequence[Constraint], features: Collection[str] = ()
) -> Attention:
    """`attend` with SDPA's own signature, and what a call may have beyond it.

    It raises NotImplementedError where an argument has no counterpart, of those limits that can be
    asked at every call (`ASKED_AT_EVERY_CALL`), and for a feature that it does not know.
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
        if (beyond or call.variant is not PLAIN) and not known.issuperset(call.features):
            raise NotImplementedError(f"has no {FEATURES[min(set(call.features) - known)]}")
        for constraint in asked:
            if (reason := constraint(call)) is not None:
                raise NotImplementedError(reason)
        return attend(call)

    return attention


def _extended(call: Arguments, beyond: dict[str, Any]) -> Arguments:
    """The call with arguments beyond SDPA's, as `AttentionCall.arguments` names them.

    They are put in their places: `_replace` takes thrice as long, at every call.
    """
    arguments, options = list(call), {}
    for name, each in beyond.items():
        place = _PLACES.get(name)
        if place is None:
            options[name] = each
        else:
            arguments[place] = each
    if options:  # beside what a `CausalBias` may have said
        is_plain = call.variant is PLAIN
        variant = AttentionVariant(**options) if is_plain else replace(call.variant, **options)
        arguments[_PLACE_OF_VARIANT] = variant
    return Arguments._make(arguments)


_PLACES = {name: Arguments._fields.index(name) for name in VARIANT_TENSORS}
_PLACE_OF_VARIANT = Arguments._fields.index("variant")


def at_once(prepare: Callable[[Arguments], Callable[[], Tensor]]) -> Attend:
    """The drop-in of a kernel that prepares a call and runs the core, and nothing else."""
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
) -> Kernel:
    """A kernel of `library`; what is not said here, `Kernel` says.

    Args:
        limits: what it asks of a call; the first that is not met is its reason.
        unavailable: instead of the library's own.
        prefers_rewritten_mask: always, or only where it refuses the mask.
    """
    return Kernel(
        name,
        drop_in(attend, limits, features),
        accuracy_class,
        unavailable or library.unavailable,
        all_of(*limits),
        prepare,
        default=default and not variant_of,
        about=about,
        library=library.package,
        install=library.install,
        variant_of=variant_of,
        own_process=own_process,
        chosen=chosen,
        options=options,
        features=frozenset(features),
        prefers_rewritten_mask=lambda call: prefers_rewritten_mask,
    )
