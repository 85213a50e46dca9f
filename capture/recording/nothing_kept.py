"""Explains, with the remedy, why a recording kept nothing."""

from __future__ import annotations

from typing import Any

from capture.recording.recording import Recording


def no_match(globs: str, paths: list[str]) -> str:
    """Say that no module's path matches the globs, and which modules there are."""
    likely = [path for path in paths if "att" in path.rpartition(".")[2].lower()] or paths
    shown = ", ".join(likely[:3])
    return f"no module matches {globs!r}; available: {shown} … Select some with `modules=`"


def nothing_kept(recording: Recording, roots: dict[str, Any]) -> str:
    """Say why a recording that ended without a problem has kept no call, with the remedy."""
    if recording.refused_for_bytes:
        return "no call fits in `max_bytes=`; increase it"
    if not recording.seen:
        return f"the model made no scaled_dot_product_attention call: {_other_attention(roots)}"
    if recording.without_values:
        return (
            f"none of the {recording.seen} attention calls can be stored: their tensors are meta, "
            "fake or nested, or inside vmap"
        )
    if recording.without_heads:
        return (
            f"none of the attention calls has the heads {recording.capture.heads}, or as many of "
            "them for each key/value head as for the others; choose others with `heads=`"
        )
    phases = recording.census.phases()
    if recording.capture.phase not in ("", *phases):
        return (
            f"none of the {recording.seen} attention calls is of phase {recording.capture.phase}: "
            f"choose {' or '.join(phases)} with `phase=`"
        )
    callers = [module or "(outside all watched modules)" for module in recording.census.modules()]
    shown = ", ".join(callers[:3]) + (" …" if len(callers) > 3 else "")
    return (
        f"none of the {recording.seen} attention calls came from a module that matches "
        f"{recording.capture.modules!r}; they came from: {shown}. Select some with `modules=`"
    )


def _other_attention(roots: dict[str, Any]) -> str:
    for root in roots.values():
        implementation = getattr(getattr(root, "config", None), "_attn_implementation", None)
        if implementation not in (None, "sdpa"):
            return (
                f"it uses attn_implementation={implementation!r}; load it with "
                "attn_implementation='sdpa'"
            )
    return (
        "it probably calls another attention kernel directly (flash-attn, xFormers, FlexAttention, "
        "or matmul and softmax); switch it to SDPA to record it"
    )
