"""Messages about recordings that kept no call, with remedies."""

from __future__ import annotations

from capture.recording.recording import Recording
from capture.text.counted import counted


def no_match(globs: str, paths: list[str]) -> str:
    """Return the message that no module path matches the globs, with examples of paths."""
    likely = [path for path in paths if "att" in path.rpartition(".")[2].lower()] or paths
    shown = ", ".join(likely[:3])
    return f"no module matches {globs!r}; available: {shown} … Select some with `modules=`"


def nothing_kept(recording: Recording) -> str:
    """Return why a recording without problems kept no call, and the remedy."""
    if recording.counts.refused_for_bytes:
        return "no call fits in `max_bytes=`; increase it"
    if not recording.seen:
        return f"no attention call was seen: {_other_attention(recording)}"
    seen = counted(recording.seen, "attention call")
    counts = recording.census.items()
    refusals = {count.signature.refusal for _, count in counts}
    if "" not in refusals:
        remedy = "; choose others with `heads=`" if recording.capture.heads else ""
        return f"none of {seen} can be stored: {', '.join(sorted(refusals))}{remedy}"
    modules = dict.fromkeys(module for (module, _, _), _ in counts)
    phases = dict.fromkeys(phase for (_, phase, _), _ in counts)
    if recording.capture.phase not in ("", *phases):
        return (
            f"none of {seen} is of phase {recording.capture.phase}: choose "
            f"{' or '.join(phases)} with `phase=`"
        )
    if not any(modules):
        return (
            f"none of {seen} came from the modules that were given: give the model that makes the "
            "calls"
        )
    callers = [module or "(outside all watched modules)" for module in modules]
    shown = ", ".join(callers[:3]) + (" …" if len(callers) > 3 else "")
    return (
        f"none of {seen} came from a module that matches {recording.capture.modules!r}; they came "
        f"from: {shown}. Select some with `modules=`"
    )


def _other_attention(recording: Recording) -> str:
    """Return how the model seems to compute attention outside the entry points, and any remedy."""
    past = recording.missed_attention
    if any(each.kind in _OF_PYTORCH for each in past):
        return (
            "PyTorch's own modules computed it, by their fast path or with need_weights=True; they "
            "use SDPA with need_weights=False and torch.backends.mha.set_fastpath_enabled("
            "False), which changes the last bits of their outputs"
        )
    if past:
        return (
            f"the model's own code computes attention: {past[0]}; only calls of SDPA and other "
            "entry points are recorded"
        )
    if not recording.may_have_run:
        return "the model did not run while it was recorded"
    return (
        "none was found in the operations of one step; attention in a kernel of the model's own is "
        "not seen"
    )


_OF_PYTORCH = ("TransformerEncoderLayer", "MultiheadAttention")
