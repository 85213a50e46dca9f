"""Head dimensions for which a kernel is not made."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

import torch
from torch.nn.functional import pad

from capture.call.attention_call import AttentionCall
from replay.accuracy.reference import attention
from replay.diagnosis.derived import padded_sizes, part
from replay.diagnosis.subject import EXPLAINED, Evidence, Subject

WIDTHS = (16, 32, 64, 96, 128, 192, 256)
"""Head dimensions for which kernels are often compiled."""


def head_dim(subject: Subject) -> Evidence | None:
    """Test whether the kernel uses some channels only, or is right with another head dimension."""
    if subject.call.value_is_in_key:
        return None
    return _first_channels(subject) or _first_columns(subject) or padded_head_dim(subject)


def _first_channels(subject: Subject) -> Evidence | None:
    """Test whether scores come from the first channels alone; no kernel runs."""
    call, dim = subject.call, subject.call.shape.head_dim
    for width in (each for each in WIDTHS if each < dim):
        first = {name: getattr(call, name)[..., :width] for name in ("query", "key")}
        for scale in (call.softmax_scale, width**-0.5):
            other = replace(call.with_tensors(first), scale=scale, output=None)
            if subject.computed(other):
                sentence = f"only the first {width} of {dim} channels of query and key are used"
                return _evidence(subject, sentence, {"channels": width})
    return None


def _first_columns(subject: Subject) -> Evidence | None:
    """Test whether the first columns of the output are right, and all others wrong."""
    batch, head, rows = subject.place
    expected = attention(part(subject.call, subject.place))[0, 0]
    given = subject.output[batch, head, rows].to(expected)
    errors = torch.linalg.vector_norm(given - expected, dim=0)
    shares = errors / torch.linalg.vector_norm(expected, dim=0)
    wrong = ~(shares <= EXPLAINED)
    columns = len(wrong)
    for width in (each for each in WIDTHS if each < columns):
        if bool(wrong[width:].all()) and not bool(wrong[:width].any()):
            sentence = f"only the first {width} of {columns} columns of the output are right"
            return _evidence(subject, sentence, {"columns": width})
    return None


def padded_head_dim(subject: Subject) -> Evidence | None:
    """Test whether the error disappears when the head dimensions are padded with zeros."""
    call, dim = subject.call, subject.call.shape.head_dim
    own_scale = replace(call, scale=call.softmax_scale)
    for of_keys, of_values in _sizes(dim, call.shape.v_head_dim):
        score = subject.cured_by(_padded_to(own_scale, of_keys, of_values))
        if score is None or subject.is_cured(subject.tried(own_scale)):
            continue
        wide = f"{of_keys}" if of_keys == of_values else f"{of_keys} (values: {of_values})"
        same = dim == call.shape.v_head_dim
        own = f"{dim}" if same else f"{dim} (values: {call.shape.v_head_dim})"
        sentence = (
            f"it {subject.fault} at head_dim {own}, and is right when padded with zeros to {wide}"
        )
        numbers = {"padded": [of_keys, of_values], "error_padded": score.error}
        return _evidence(subject, sentence, numbers)
    return None


def _sizes(dim: int, of_values: int) -> Iterator[tuple[int, int]]:
    """Yield head dimensions of keys and values to pad to, the smallest first."""
    if dim != of_values:
        yield max(dim, of_values), max(dim, of_values)
    whole = zip(padded_sizes(dim), padded_sizes(of_values), strict=True)
    yield from sorted({each for each in whole if each != (dim, of_values)})


def _padded_to(call: AttentionCall, dim: int, of_values: int) -> AttentionCall:
    """Return the call with zeros added to the head dimensions; its scale must be explicit."""
    sizes = {"query": dim, "key": dim, "value": of_values}
    wide = {
        name: pad(getattr(call, name), (0, size - getattr(call, name).shape[-1]))
        for name, size in sizes.items()
    }
    return replace(call.with_tensors(wide), output=None)


def _evidence(subject: Subject, sentence: str, numbers: dict[str, object]) -> Evidence:
    shape = subject.call.shape
    own = {"head_dim": shape.head_dim, "v_head_dim": shape.v_head_dim, "error": subject.own.error}
    return Evidence("head-dim", sentence, {**own, **numbers})
