"""Explains wrong gradients by a known bug, which gives nearly the same ones.

Each hypothesis is a backward pass with one bug, in float64, for the batch element and key head with
the largest deviation. The best one is the cause if it leaves at most a tenth of the deviation of
every wrong gradient.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
from torch import Tensor

from capture.call.attention_call import AttentionCall
from replay.accuracy.faulty_backward import (
    INPUTS,
    FaultyBackward,
    Gradients,
    Hypotheses,
    Place,
)

UNEXPLAINED = 0.1
"""Largest share of a deviation that a cause leaves unexplained."""

MOST_SCORES = 2**26
"""Most scores of a group of heads that are computed at once; larger calls have no cause."""
MOST_OF_ALL_HEADS = 8 * MOST_SCORES
"""Most scores of all heads, for causes that need the gradients of each."""


def cause_of(
    call: AttentionCall,
    found: Gradients,
    right: Gradients,
    wrong: Sequence[str],
    earlier: AttentionCall | None = None,
) -> str:
    """Return a sentence about the bug that explains the wrong gradients; empty if none does.

    Args:
        found: the gradients of a kernel, each in the shape of its tensor.
        right: the reference, in float64.
        wrong: names of the wrong gradients.
        earlier: call with other keys that the kernel ran before, if there was one.
    """
    names = [name for name in INPUTS if name in wrong]
    shape = call.shape
    group = shape.q_heads // shape.kv_heads
    if not names or group * shape.q_len * shape.kv_len > MOST_SCORES:
        return ""
    place = _worst_place(found, right, names, group)
    here, expected = place.of(found), place.of(right)
    backward = FaultyBackward.of(call, place)
    best, cause = UNEXPLAINED, ""
    moved = ((text, place.of(each)) for text, each in _moved(right))
    scaled = _scaled(call, names, here, expected)
    kept = () if earlier is None else backward.with_keys_of(FaultyBackward.of(earlier, place))
    for hypotheses in (moved, scaled, backward.with_bugs(here, expected), kept):
        for text, alternative in hypotheses:
            left = max(_share(name, here, alternative, expected) for name in names)
            if left < best:
                best, cause = left, text
    if not cause and "query" not in wrong and group > 1:
        cause = _of_other_heads(call, place, names, here)
    return cause or _of_blind_rows(backward, here)


def _of_other_heads(
    call: AttentionCall, place: Place, names: Sequence[str], found: Gradients
) -> str:
    """Return a sentence if the gradients of a key head are sums over the wrong query heads.

    Least squares find the share of each query head in a sum; a head is in it with a share of 1.
    """
    batch, head, group = place
    if call.shape.q_heads * call.shape.q_len * call.shape.kv_len > MOST_OF_ALL_HEADS:
        return ""
    all_heads = [
        FaultyBackward.of(call, Place(batch, each, group)).gradients()
        for each in range(call.shape.kv_heads)
    ]
    right, alternate = (
        [*range(call.shape.q_heads)][each]
        for each in (place.heads, slice(head, None, call.shape.kv_heads))
    )
    sentences = []
    for name in names:
        parts = torch.cat([each[name] for each in all_heads]).flatten(1)
        total = found[name].nan_to_num().flatten()
        shares = torch.linalg.lstsq(parts @ parts.mT, (parts @ total)[:, None]).solution[:, 0]
        taken = (shares > 0.5).nonzero().flatten().tolist()
        if (parts[taken].sum(0) - total).norm() > UNEXPLAINED * total.norm():
            return ""
        sentence = f"grad_{name} of key head {head} sums query heads {taken} instead of {right}"
        if taken == alternate:
            sentence += f", as if query head i had key head i % {call.shape.kv_heads}"
        sentences.append(sentence)
    return "; ".join(sentences)


def _worst_place(found: Gradients, right: Gradients, names: Sequence[str], group: int) -> Place:
    deviations = []
    for name in names:
        difference = (found[name].double() - right[name].double()).abs().nan_to_num(nan=math.inf)
        size = right[name].double().abs().amax().clamp(min=torch.finfo(torch.double).tiny)
        of_heads = difference.amax((2, 3)) / size
        deviations.append(
            of_heads.unflatten(1, (-1, group)).amax(2) if name == "query" else of_heads
        )
    worst = torch.stack(deviations).amax(0)
    return Place(*divmod(int(worst.argmax()), worst.shape[1]), group)


def _share(name: str, found: Gradients, alternative: Gradients, right: Gradients) -> float:
    """Return the share of a gradient's deviation that an alternative leaves."""
    if name not in alternative:
        return 1.0
    left = (found[name] - alternative[name]).norm() / (found[name] - right[name]).norm()
    return float(left.nan_to_num(nan=math.inf))


def _of_blind_rows(backward: FaultyBackward, found: Gradients) -> str:
    """Return a sentence if a query that sees no key has a gradient."""
    blind = ~backward.visible.any(-1)
    if "query" not in found or not blind.any():
        return ""
    rows = found["query"][blind.expand(found["query"].shape[:2])]
    if not rows.isfinite().all():
        what = "NaN or infinity"
    elif rows.any():
        what = "a gradient that is not 0"
    else:
        return ""
    return f"grad_query has {what} in rows of queries that see no key"


def _moved(right: Gradients) -> Hypotheses:
    """Yield right gradients in a wrong place or layout."""
    if right["key"].shape == right["value"].shape:
        yield (
            "the gradients of key and value are exchanged",
            {
                "key": right["value"],
                "value": right["key"],
            },
        )
    for written, read in (("(B, S, H, D)", "(B, H, S, D)"), ("(B, H, S, D)", "(B, S, H, D)")):
        yield (
            f"gradients are written as {written}, but read as {read}",
            {name: reread(right[name], read) for name in INPUTS},
        )


def reread(tensor: Tensor, order: str) -> Tensor:
    """Return a tensor (B, H, S, D) with its memory read as `(B, S, H, D)`, or with that of its
    transpose read in its own order."""
    if order == "(B, S, H, D)":
        return tensor.reshape(tensor.transpose(1, 2).shape).transpose(1, 2)
    return tensor.transpose(1, 2).reshape(tensor.shape)


def _scaled(
    call: AttentionCall, names: Sequence[str], found: Gradients, right: Gradients
) -> Hypotheses:
    """Yield multiples of the right gradients."""
    factors = {
        name: float((found[name] * right[name]).sum() / right[name].square().sum())
        for name in names
    }
    scale, group = call.softmax_scale, call.shape.q_heads // call.shape.kv_heads
    known = {
        "the softmax scale is applied twice": scale,
        "the softmax scale is missing": 1 / scale if scale else math.inf,
        f"the mean over {group} query heads is taken instead of their sum": 1 / group,
    }
    first = factors[names[0]]
    why = [text for text, factor in known.items() if math.isclose(first, factor, rel_tol=0.01)]
    what = " and ".join(
        f"grad_{name} is {factor:.4g} × the right one" for name, factor in factors.items()
    )
    yield ": ".join([what, *why[:1]]), {name: factors[name] * right[name] for name in names}
