"""Values too large for a kernel's number formats: overflow, and channels that distort a scale."""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from capture.call.attention_call import AttentionCall
from capture.call.per_head import SCALES
from replay.diagnosis.derived import part, scores
from replay.diagnosis.subject import COLLAPSE, Evidence, Score, Subject

FLOAT16_MAX = 65504.0
FACTORS = (2.0**-4, 2.0**-8, 2.0**-12)
"""Factors that scale inputs down; powers of two, so that nothing is rounded."""

OUTLIER = 4.0
"""Minimum ratio of an outlier channel of K to the typical channel."""

HALVED = 2.0
"""Factor by which removing a few channels must shrink the error if these channels cause it."""

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
    call, small = subject.call, part(subject.call, subject.place).without_scales()
    numbers = _numbers(small)
    batch, head, rows = subject.place
    is_finite = subject.own.error < torch.inf
    is_zero = not bool((subject.output[batch, head, rows] != 0).any())
    kind = "is not finite" if not is_finite else "is zero" if is_zero else "is wrong and finite"
    product = numbers["largest_product"]
    limit = f", beyond float16's {FLOAT16_MAX:,.0f}" if product > FLOAT16_MAX else ""
    reach = {
        "query": f"q·k reaches {product:,.4g}{limit}",
        "key": f"q·k reaches {product:,.4g}{limit}",
        "value": f"values reach {numbers['largest_value']:.4g}",
        "scores": f"scores reach {numbers['largest_score']:.4g}",
    }
    names = [] if call.value_is_in_key else ["query", "key", "value"]
    trials = [(name, factor) for factor in FACTORS for name in names]
    # If the output is finite, overflowing scores were clamped; smaller scores cannot show that.
    if not is_finite or is_zero:
        trials += [("scores", factor) for factor in FACTORS]
    for name, factor in trials:
        score = subject.cured_by(_scaled(call, name, factor))
        if score is None or subject.is_cured(subject.tried(_scaled(call, name, 1.0))):
            continue
        if name == "key" and is_finite and len(_outliers(small.key[0, 0])[1]):
            return None  # an outlier channel explains more, because K has its own scale
        now = "it is right" if score.passes else f"its error is {score.error:.2g}"
        own = subject.own.error if is_finite else None
        return Evidence(
            "overflow",
            f"the output {kind}; {reach[name]}, and with {HOW[name].format(1 / factor)} {now}",
            {
                **numbers,
                "scaled": name,
                "factor": factor,
                "error": own,
                "error_scaled": score.error,
            },
        )
    return _clamped(subject, small, numbers) if is_finite and not is_zero else None


HOW = {
    "query": "the query divided by {:g}, and the scale multiplied by it,",
    "key": "the key divided by {:g}, and the scale multiplied by it,",
    "value": "V divided by {:g}",
    "scores": "scores {:g} times smaller",
}
"""Description of the experiments."""


def _scaled(call: AttentionCall, name: str, factor: float) -> AttentionCall:
    """Return the call with smaller values; scaled scores come from a scaled query."""
    tensor = "query" if name == "scores" else name
    changed = tensor if getattr(call, SCALES[tensor]) is None else SCALES[tensor]
    scaled = call.with_tensors({changed: getattr(call, changed) * factor})
    scale = call.softmax_scale / factor if name in ("query", "key") else call.scale
    return replace(scaled, output=None, scale=scale)


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
    """Test whether the error disappears without the mean of K, or without its outlier channels.

    A constant added to all scores of a query does not change the softmax, so attention to K minus
    its mean over the keys is the same. Removing the outlier channels changes the attention, which
    then gets its own reference.
    """
    call = subject.call
    if call.value_is_in_key or call.page_table is not None or call.variant.softcap is not None:
        return None
    if call.key_scale is not None:  # centred keys would need another scale
        return None
    small = part(call, subject.place)
    sizes, channels = _outliers(small.key[0, 0])
    if not len(channels):
        return None
    key = call.key.to(torch.float32)
    mean = key.mean(dim=2, keepdim=True)
    centred = (key - mean).to(call.dtype)
    # Many channels are a large part of K, so removing them makes any error smaller.
    few = len(channels) <= FEW_CHANNELS * call.shape.head_dim
    collapse = HALVED if few else COLLAPSE  # rounding may account for the remaining error
    trial = replace(call.with_tensors({"key": centred}), output=None)
    score = subject.cured_by(trial, collapse=collapse)
    way, how = "centred", "with the mean of the keys subtracted, which does not change attention,"
    # Centring does not help if the outliers of a channel vary from key to key.
    if score is None:
        without = call.key.clone()
        without[..., channels] = 0
        trial = replace(call.with_tensors({"key": without}), output=None)
        score = subject.cured_by(trial, collapse=collapse)
        way, how = "removed", f"without {'it' if len(channels) == 1 else 'them'}"
        if score is None:
            return None
    worst, size, typical = int(channels[0]), float(sizes[channels[0]]), float(sizes.median())
    more = f" and {len(channels) - 1} more" if len(channels) > 1 else ""
    times = f"{size / typical:.3g} times" if typical else "far above"
    own = subject.own.error
    return Evidence(
        "k-outlier-channel",
        f"channel {worst}{more} of K is {size:.4g}, {times} the typical channel; {how} the error "
        f"is {score.error:.2g} instead of {own:.2g}",
        {
            "channel": worst,
            "channels": channels.tolist(),
            "size": size,
            "typical_size": typical,
            "error": own if own < torch.inf else None,
            "error_without": score.error,
            "way": way,
        },
    )


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
