"""Values too large for a kernel's number formats: overflow, and channels that distort a scale."""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from capture.call.attention_call import AttentionCall
from replay.diagnosis.derived import part, scores
from replay.diagnosis.subject import COLLAPSE, Evidence, Score, Subject

FLOAT16_MAX = 65504.0
FACTORS = (2.0**-4, 2.0**-8, 2.0**-12)
"""Factors that scale inputs down; powers of two, so that nothing is rounded."""

OUTLIER = 4.0
"""Minimum ratio of an outlier channel of K to the typical channel."""

HALVED = 2.0
"""Factor by which removing a few channels must shrink the error to show that they are its cause."""

FEW_CHANNELS = 1 / 16

MOST_CHANNELS = 0.25
"""Maximum share of channels that can be outliers."""

LIMITS = 200
"""Number of clamping limits tried for the scores."""


def overflow(subject: Subject) -> Evidence | None:
    """Test whether the error disappears when the same attention is computed from smaller numbers.

    Q or K is divided and the scale multiplied, which keeps every score unchanged; or V is divided,
    which divides the output. If the output is not finite, the scores are also reduced.
    """
    call = subject.call
    is_finite = subject.own.error < torch.inf
    small = part(call, subject.place)
    numbers = _numbers(small)
    batch, head, rows = subject.place
    is_black = not bool((subject.output[batch, head, rows] != 0).any())
    kind = "is not finite" if not is_finite else "is zero" if is_black else "is wrong and finite"
    for factor in FACTORS:
        for name, product in (("query", "q·k"), ("key", "q·k")):
            # The scores stay the same; only the range of intermediate numbers changes.
            scaled = replace(
                call.with_tensors({name: getattr(call, name) * factor}),
                output=None,
                scale=call.softmax_scale / factor,
            )
            score = None if call.value_is_in_key else subject.tried(scaled)
            if not subject.is_cured(score):
                continue
            if name == "key" and _has_outliers(small) and is_finite:
                return None  # K has a scale of its own, so an outlier channel explains more
            return Evidence(
                "overflow",
                f"the output {kind}; {_reach(product, numbers)}, and with the {name} divided by "
                f"{1 / factor:g}, and the scale multiplied by it, {_now(subject, score)}",
                {**numbers, "scaled": name, "factor": factor, **_errors(subject, score)},
            )
        scaled = replace(call.with_tensors({"value": call.value * factor}), output=None)
        score = None if call.value_is_in_key else subject.tried(scaled)
        if subject.is_cured(score):
            return Evidence(
                "overflow",
                f"the output {kind}; values reach {numbers['largest_value']:.4g}, and with V "
                f"divided by {1 / factor:g} {_now(subject, score)}",
                {**numbers, "scaled": "value", "factor": factor, **_errors(subject, score)},
            )
    # If scores overflow but the output is finite, the kernel must clamp its scores.
    if is_finite and not is_black:
        return _clamped(subject, small, numbers)
    for factor in FACTORS:
        query = call.query * factor
        score = subject.tried(replace(call.with_tensors({"query": query}), output=None))
        if subject.is_cured(score):
            return Evidence(
                "overflow",
                f"the output {kind}; scores reach {numbers['largest_score']:.4g}, and with scores "
                f"{1 / factor:g} times smaller {_now(subject, score)}",
                {**numbers, "scaled": "scores", "factor": factor, **_errors(subject, score)},
            )
    return None


def _clamped(subject: Subject, small: AttentionCall, numbers: dict[str, Any]) -> Evidence | None:
    """Test whether the output results from scores clamped at some limit."""
    found, value = scores(small), small.value[0, 0].to(torch.float64)
    added = None if small.attn_mask is None else small.attn_mask[0, 0]
    lowest, highest = float(found.mean()), float(found.max())
    best = (math.inf, highest)
    for limit in torch.linspace(lowest, highest, LIMITS, dtype=torch.float64).tolist():
        ended = found.clamp(max=limit)
        if added is not None and added.dtype == torch.bool:
            ended = ended.masked_fill(~added, -math.inf)
        elif added is not None:
            ended = ended + added
        best = min(best, (subject.returned(ended.softmax(-1) @ value).error, limit))
    if not Score(False, best[0]).explains(subject.own):
        return None
    return Evidence(
        "overflow",
        f"the output is that of scores clamped at {best[1]:.4g}, where they reach {highest:.4g}",
        {**numbers, "limit": best[1], "error": subject.own.error, "error_so": best[0]},
    )


def _now(subject: Subject, score: Score | None) -> str:
    assert score is not None
    return "it is right" if score.passes else f"its error is {score.error:.2g}"


def _errors(subject: Subject, score: Score | None) -> dict[str, Any]:
    assert score is not None
    own = subject.own.error
    return {"error": own if own < torch.inf else None, "error_scaled": score.error}


def _reach(what: str, numbers: dict[str, Any]) -> str:
    product = numbers["largest_product"]
    limit = f", beyond float16's {FLOAT16_MAX:,.0f}" if product > FLOAT16_MAX else ""
    return f"{what} reaches {product:,.4g}{limit}"


def _numbers(small: AttentionCall) -> dict[str, Any]:
    found = scores(small).abs()
    scale = abs(small.softmax_scale) or 1.0
    return {
        "largest_product": float(found.max()) / scale,
        "largest_score": float(found.max()),
        "largest_query": float(small.query.abs().max()),
        "largest_key": float(small.key.abs().max()),
        "largest_value": float(small.value.abs().max()),
    }


def outlier_channel(subject: Subject) -> Evidence | None:
    """Test whether the error disappears without K's mean, or without its outlier channels.

    A constant added to all scores of a query does not change the softmax, so attention to K minus
    its mean over the keys is the same. Removing the outlier channels changes the attention, which
    then gets its own reference.
    """
    call = subject.call
    if call.value_is_in_key or call.page_table is not None or call.variant.softcap is not None:
        return None
    small = part(call, subject.place)
    sizes, channels = _outliers(small.key[0, 0])
    if not len(channels):
        return None
    key = call.key.to(torch.float32)
    mean = key.mean(dim=2, keepdim=True)
    centred = (key - mean).to(call.dtype)
    score = subject.tried(replace(call.with_tensors({"key": centred}), output=None))
    way, how = "centred", "with the mean of the keys subtracted, which does not change attention,"
    # Centring does not help if the outliers of a channel vary from key to key.
    if not _is_better(subject, score, channels):
        without = call.key.clone()
        without[..., channels] = 0
        score = subject.tried(replace(call.with_tensors({"key": without}), output=None))
        way, how = "removed", f"without {'it' if len(channels) == 1 else 'them'}"
        if not _is_better(subject, score, channels):
            return None
    assert score is not None
    worst = int(channels[0])
    typical = float(sizes.median())
    more = f" and {len(channels) - 1} more" if len(channels) > 1 else ""
    return Evidence(
        "k-outlier-channel",
        f"channel {worst}{more} of K is {float(sizes[worst]):.4g}, {_times(sizes, worst)} the "
        f"typical channel; {how} the error is {score.error:.2g} instead of "
        f"{subject.own.error:.2g}",
        {
            "channel": worst,
            "channels": [int(each) for each in channels],
            "size": float(sizes[worst]),
            "typical_size": typical,
            "error": subject.own.error if subject.own.error < torch.inf else None,
            "error_without": score.error,
            "way": way,
        },
    )


def _is_better(subject: Subject, score: Score | None, channels: Tensor) -> bool:
    """Return True if the error shrank enough; rounding may account for the remaining error.

    Many channels are a large part of K, so removing them makes any error smaller.
    """
    few = len(channels) <= FEW_CHANNELS * subject.call.shape.head_dim
    return score is not None and score.is_cure_of(subject.own, HALVED if few else COLLAPSE)


def _times(sizes: Tensor, channel: int) -> str:
    typical = float(sizes.median())
    return f"{float(sizes[channel]) / typical:.3g} times" if typical else "far above"


def _outliers(key: Tensor) -> tuple[Tensor, Tensor]:
    """Return the size (D,) of each channel of keys (Sk, D), and the sorted outlier channels.

    The size is the root mean square, or the largest value if no channel stands out by its root mean
    square.
    """
    wide = key.to(torch.float64)
    for sizes in (wide.square().mean(dim=0).sqrt(), wide.abs().amax(dim=0)):
        by_size = sizes.argsort(descending=True, stable=True)
        out = by_size[sizes[by_size] > OUTLIER * sizes.median()]
        if 0 < len(out) <= MOST_CHANNELS * len(sizes):
            break
    else:
        out = out[:0]
    return sizes, out


def _has_outliers(small: AttentionCall) -> bool:
    return len(_outliers(small.key[0, 0])[1]) > 0
