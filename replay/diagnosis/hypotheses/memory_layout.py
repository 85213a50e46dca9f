"""Tensors read in the wrong order of heads and positions: NHD for HND, or the reverse."""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from dataclasses import replace
from typing import NamedTuple

import torch
from torch import Tensor

from capture.call.attention_call import AttentionCall
from capture.call.per_head import PER_HEAD
from replay.accuracy.gradient_causes import reread
from replay.accuracy.reference import attention
from replay.diagnosis.derived import HeadRows, can_be_gathered, part
from replay.diagnosis.subject import Evidence, Subject

ROWS = 8
"""Number of rows to compare, because each may be a row of another head."""


TENSORS = (("query", "key", "value"), ("key", "value"), ("query",), ("key",), ("value",))
"""Tensors that a kernel may read in the wrong order."""

ORDERS = ("(B, S, H, D)", "(B, H, S, D) after a transposition")
"""Wrong orders in which memory may be read."""


class _Layout(NamedTuple):
    """Call that results from a wrong layout, and the place of the wrong rows in its output."""

    sentence: str
    call: AttentionCall
    heads: Tensor
    """Query head of each row: (R,)."""
    queries: Tensor
    """Index of each row in its head: (R,)."""


def layout(subject: Subject) -> Evidence | None:
    """Test whether the output is that of tensors in another layout; no kernel runs."""
    if not can_be_gathered(subject.call):
        return None
    batch, head, rows = subject.place
    few = replace(subject, place=HeadRows(batch, head, rows[:ROWS]))
    few = replace(few, own=few.score(few.output, few.call))
    for each in _layouts(few.call, few.place):
        score = few.returned(_rows(each, batch))
        if score.explains(few.own):
            numbers = {"error": few.own.error, "error_of_this_layout": score.error}
            return Evidence("layout", each.sentence, numbers)
    return None


def _rows(layout: _Layout, batch: int) -> Tensor:
    """Return the reference of each row: (R, Dv)."""
    found: dict[int, Tensor] = {}
    for head in layout.heads.unique().tolist():
        at = (layout.heads == head).nonzero().flatten()
        small = part(layout.call, HeadRows(batch, head, layout.queries[at]))
        found.update(zip(at.tolist(), attention(small)[0, 0], strict=True))
    return torch.stack([found[at] for at in range(len(layout.heads))])


def _layouts(call: AttentionCall, place: HeadRows) -> Iterator[_Layout]:
    shape, (_, head, rows) = call.shape, place
    heads = torch.full_like(rows, head)
    has_heads = call.attn_mask is not None or any(name in call.tensors() for name in PER_HEAD)
    if not has_heads and shape.q_len % max(shape.kv_len, 1) == 0:
        swapped = {name: getattr(call, name).transpose(1, 2) for name in ("query", "key", "value")}
        yield _Layout(
            "the output is that of tensors in (B, S, H, D): positions are taken for heads",
            replace(call.with_tensors(swapped), output=None),
            rows,
            heads,
        )
    for what, other in _repacked(call):
        yield _Layout(what, other, heads, rows)
    index = head * shape.q_len + rows
    written = {
        "": (heads, rows),
        "; the output is written in (B, S, H, D)": (
            index % shape.q_heads,
            index // shape.q_heads,
        ),
        "; the output is read from (B, S, H, D)": (
            (rows * shape.q_heads + head) // shape.q_len,
            (rows * shape.q_heads + head) % shape.q_len,
        ),
    }
    for names, order in [((), ""), *itertools.product(TENSORS, ORDERS)]:
        read = {name: reread(getattr(call, name), order) for name in names}
        other = replace(call.with_tensors(read), output=None)
        what = f"the memory of {' and '.join(names)} is read as {order}" if names else ""
        for where, (of_heads, of_rows) in written.items():
            if what or where:
                yield _Layout((what + where).removeprefix("; "), other, of_heads, of_rows)


def _repacked(call: AttentionCall) -> Iterator[tuple[str, AttentionCall]]:
    """Yield calls whose tensors are packed into one, and unpacked along the wrong axis."""
    for names in TENSORS[:2]:
        tensors = [getattr(call, name) for name in names]
        if any(each.shape != tensors[0].shape for each in tensors):
            continue
        packed = torch.stack(tensors, 1)
        count, heads = packed.shape[1:3]
        grouped, interleaved = f"({count}, H, D)", f"(H, {count}, D)"
        read_interleaved = packed.flatten(1, 2).unflatten(1, (heads, count)).unbind(2)
        read_grouped = packed.transpose(1, 2).flatten(1, 2).unflatten(1, (count, heads)).unbind(1)
        for parts, given, read in (
            (read_interleaved, grouped, interleaved),
            (read_grouped, interleaved, grouped),
        ):
            other = call.with_tensors(dict(zip(names, parts, strict=True)))
            what = f"{' and '.join(names)} are packed as {given} and read as {read}"
            yield what, replace(other, output=None)
