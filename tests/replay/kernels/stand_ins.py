"""Builders of stand-ins: functions with a library's parameters, but torch's arithmetic."""

import functools
import inspect
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor

Body = Callable[[SimpleNamespace], Any]


def parameters(listed: str) -> Callable[[Body], Callable[..., Any]]:
    """Give a function the parameters of a library's function, such as "q, k, v, *, causal=False".

    The decorated function takes one object, whose attributes are all arguments, including `self`.
    """
    signature = inspect.signature(eval(f"lambda {listed}: None", {"torch": torch}))

    def decorate(body: Body) -> Callable[..., Any]:
        @functools.wraps(body)
        def stand_in(*args: Any, **kwargs: Any) -> Any:
            given = signature.bind(*args, **kwargs)
            given.apply_defaults()
            return body(SimpleNamespace(**given.arguments))

        stand_in.__signature__ = signature  # type: ignore[attr-defined]
        return stand_in

    return decorate


def check_readable(*tensors: Tensor) -> None:
    """Check that kernels on a GPU can read the tensors: adjacent elements of one 16-bit dtype."""
    assert all(tensor.stride(-1) == 1 for tensor in tensors)
    assert {tensor.dtype for tensor in tensors} in ({torch.float16}, {torch.bfloat16})


def textbook(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    scale: float | None = None,
    causal: bool = False,
    mask: Tensor | None = None,
    top_left: bool = False,
    window: tuple[int | None, int | None] = (-1, -1),
    softcap: float | None = None,
    sink: Tensor | None = None,
) -> Tensor:
    """BHSD attention in float32, returned in the query's dtype.

    Causal masks and windows are aligned bottom right; -1 or None is a side without a limit.
    """
    query_, key, value = query.float(), key.float(), value.float()
    group = query.shape[1] // key.shape[1]
    key, value = key.repeat_interleave(group, 1), value.repeat_interleave(group, 1)
    scores = query_ @ key.mT * (query.shape[-1] ** -0.5 if scale is None else scale)
    if softcap:
        scores = softcap * torch.tanh(scores / softcap)
    if mask is not None:
        scores = scores + mask if mask.is_floating_point() else scores.where(mask, -torch.inf)
    rows, columns = scores.shape[-2:]
    offset = torch.arange(columns) - torch.arange(rows)[:, None]
    if causal:
        scores = scores.where(offset <= (0 if top_left else columns - rows), -torch.inf)
    before, after = window
    if before not in (-1, None):
        scores = scores.where(offset >= columns - rows - before, -torch.inf)
    if after not in (-1, None):
        scores = scores.where(offset <= columns - rows + after, -torch.inf)
    if sink is not None:  # a sink is like a key whose value is 0
        of_head = sink.float()[:, None, None].expand(*scores.shape[:3], 1)
        scores = torch.cat([of_head, scores], dim=-1)
        value = torch.cat([torch.zeros_like(value[:, :, :1]), value], dim=2)
    return (scores.softmax(-1).nan_to_num() @ value).to(query.dtype)


def heads_second(tensor: Tensor) -> Tensor:
    return tensor.transpose(0, 1)[None]


def flash_attention(given: SimpleNamespace) -> Tensor:
    """Run a function of FlashAttention 2, 3 or 4, with any of their parameters."""
    get = vars(given).get
    q, k, v = given.q, get("k", get("k_cache")), get("v", get("v_cache"))
    check_readable(q, k, v)
    q_offsets, k_offsets = get("cu_seqlens_q"), get("cu_seqlens_k")
    ends, starts = get("seqused_k", get("cache_seqlens")), get("cache_leftpad")
    pages = get("page_table", get("block_table"))
    for integers in (q_offsets, k_offsets, ends, starts, pages):
        assert integers is None or integers.dtype == torch.int32
    _check_longest(given, q_offsets, k_offsets, has_pages=pages is not None)
    if starts is not None:
        assert given.window_size == (-1, -1), "the alignment of its diagonal is unknown then"

    queries = q.unbind() if q_offsets is None else q.split(q_offsets.diff().tolist())
    if pages is not None:
        ends = k_offsets.diff() if ends is None else ends
        keys, values = ([pool[row].flatten(0, 1) for row in pages] for pool in (k, v))
    elif k_offsets is not None:
        keys, values = (each.split(k_offsets.diff().tolist()) for each in (k, v))
    else:
        keys, values = k.unbind(), v.unbind()
    outputs = []
    for i, query in enumerate(queries):
        used = slice(
            None if starts is None else int(starts[i]), None if ends is None else int(ends[i])
        )
        output = textbook(
            *map(heads_second, (query, keys[i][used], values[i][used])),
            given.softmax_scale,
            given.causal,
            window=given.window_size,
            softcap=given.softcap,
            sink=get("learnable_sink"),
        )
        outputs.append(output[0].transpose(0, 1))
    return torch.stack(outputs) if q_offsets is None else torch.cat(outputs)


def _check_longest(
    given: SimpleNamespace, q_offsets: Tensor | None, k_offsets: Tensor | None, has_pages: bool
) -> None:
    """Check the given lengths of the longest sequences; with pages, longer keys are allowed."""
    get = vars(given).get
    if q_offsets is not None and get("max_seqlen_q") is not None:
        assert given.max_seqlen_q == int(q_offsets.diff().max())
    if k_offsets is not None and get("max_seqlen_k") is not None:
        assert isinstance(given.max_seqlen_k, int)
        longest = int(k_offsets.diff().max())
        assert given.max_seqlen_k >= longest if has_pages else given.max_seqlen_k == longest
