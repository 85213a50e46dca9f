"""The functions of flash-attn 2 and 3 that their tests call, answered by a kernel of ours.

Arguments that affect only speed are ignored. Features that our kernels lack skip the test, with the
reason. Helpers such as padding are the tests' own.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest
import torch
from torch import Tensor

from benchmarks.public_tests.answers import Answers
from capture.call.attention_call import AttentionCall
from capture.call.attention_variant import AttentionVariant

NOT_DONE = {
    "alibi_slopes": "ALiBi",
    "qv": "a second query for the values",
    "q_descale": "FP8 tensors with scales",
    "k_descale": "FP8 tensors with scales",
    "v_descale": "FP8 tensors with scales",
    "attention_chunk": "attention in chunks",
    "seqused_q": "queries that do not count",
    "rotary_cos": "rotary embeddings",
    "cache_leftpad": "caches padded left",
}
"""Arguments for features that our kernels lack."""
CHANGE_NOTHING = {
    *("deterministic", "num_splits", "pack_gqa", "sm_margin", "scheduler_metadata"),
    *("rotary_sin", "rotary_interleaved", "rotary_seqlens", "cu_seqlens_k_new"),
    *("max_seqlen_q", "max_seqlen_k"),
    *("return_attn_probs", "return_softmax_lse"),
}
OPTIONS = {"softmax_scale", "causal", "window_size", "softcap"}


def no_rotary(*args: Any, **kwargs: Any) -> None:
    """Stand in for a function that computes no attention."""
    pytest.skip("rotary embeddings")


def nothing(*args: Any, **kwargs: Any) -> None:
    """Stand in for the function that plans a call of the library's own kernels."""


class FlashAttn:
    """flash-attn's functions, with the library's names and parameters."""

    def __init__(self, answers: Answers) -> None:
        self.answers = answers

    def flash_attn_func(
        self, q: Tensor, k: Tensor, v: Tensor, dropout_p: float = 0.0, **given: Any
    ) -> Any:
        query, key, value = (each.transpose(1, 2) for each in (q, k, v))
        call = _call(query, key, value, dropout_p=dropout_p, **given)
        output = self.answers(call, "flash_attn_func").transpose(1, 2)
        return (output, _no_lse(output), None) if given.get("return_attn_probs") else output

    def flash_attn_kvpacked_func(self, q: Tensor, kv: Tensor, *args: Any, **given: Any) -> Any:
        key, value = kv.unbind(2)
        return self.flash_attn_func(q, key, value, *args, **given)

    def flash_attn_qkvpacked_func(self, qkv: Tensor, *args: Any, **given: Any) -> Any:
        query, key, value = qkv.unbind(2)
        return self.flash_attn_func(query, key, value, *args, **given)

    def flash_attn_varlen_func(
        self,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        cu_seqlens_q: Tensor,
        cu_seqlens_k: Tensor,
        max_seqlen_q: int,
        max_seqlen_k: int,
        dropout_p: float = 0.0,
        block_table: Tensor | None = None,
        seqused_k: Tensor | None = None,
        **given: Any,
    ) -> Any:
        lengths: dict[str, Any] = {"cu_seqlens_k": cu_seqlens_k, "seqused_k": seqused_k}
        key, value = (
            each.transpose(0, 1)[None] if block_table is None else each.transpose(1, 2)
            for each in (k, v)
        )
        if block_table is not None:
            used = cu_seqlens_k.diff() if seqused_k is None else seqused_k
            lengths = {"seqused_k": used, "page_table": block_table}
        call = _call(
            q.transpose(0, 1)[None],
            key,
            value,
            dropout_p=dropout_p,
            cu_seqlens_q=cu_seqlens_q,
            max_seqlen_q=max_seqlen_q,
            **lengths,
            **given,
        )
        output = self.answers(call, "flash_attn_varlen_func")[0].transpose(0, 1)
        return (output, _no_lse(output), None) if given.get("return_attn_probs") else output

    def flash_attn_varlen_kvpacked_func(
        self, q: Tensor, kv: Tensor, *args: Any, **given: Any
    ) -> Any:
        key, value = kv.unbind(1)
        return self.flash_attn_varlen_func(q, key, value, *args, **given)

    def flash_attn_varlen_qkvpacked_func(
        self, qkv: Tensor, cu_seqlens: Tensor, max_seqlen: int, *args: Any, **given: Any
    ) -> Any:
        query, key, value = qkv.unbind(1)
        starts, longest = (cu_seqlens, cu_seqlens), (max_seqlen, max_seqlen)
        return self.flash_attn_varlen_func(query, key, value, *starts, *longest, *args, **given)

    def flash_attn_with_kvcache(
        self,
        q: Tensor,
        k_cache: Tensor,
        v_cache: Tensor,
        k: Tensor | None = None,
        v: Tensor | None = None,
        cache_seqlens: int | Tensor | None = None,
        cache_batch_idx: Tensor | None = None,
        block_table: Tensor | None = None,
        page_table: Tensor | None = None,
        cu_seqlens_q: Tensor | None = None,
        **given: Any,
    ) -> Any:
        """Write new keys and values into the cache first, as the library does."""
        table = block_table if page_table is None else page_table
        _check(given)
        batch = q.shape[0] if cu_seqlens_q is None else cu_seqlens_q.shape[0] - 1
        used = k_cache.shape[1] if cache_seqlens is None else cache_seqlens
        lengths = torch.as_tensor(used, dtype=torch.int32, device=q.device).expand(batch).clone()
        rows = list(range(batch)) if cache_batch_idx is None else cache_batch_idx.tolist()
        if k is not None and v is not None:
            starts = given.get("cu_seqlens_k_new")
            for new, cache in ((k, k_cache), (v, v_cache)):
                _append(_sequences(new, starts), cache, table, rows, lengths)
            lengths += torch.tensor([len(each) for each in _sequences(k, starts)]).to(lengths)
        if table is not None:
            more: dict[str, Any] = {"page_table": table[rows], "seqused_k": lengths}
            key, value = (each.transpose(1, 2) for each in (k_cache, v_cache))
        else:
            more = {"seqused_k": lengths}
            key, value = (each[rows].transpose(1, 2) for each in (k_cache, v_cache))
            if cu_seqlens_q is not None:
                room = key.shape[2]
                starts_k = torch.arange(batch + 1, dtype=torch.int32, device=q.device) * room
                more["cu_seqlens_k"] = starts_k
                key, value = (each.transpose(0, 1).flatten(1, 2)[None] for each in (key, value))
        if cu_seqlens_q is None:
            call = _call(q.transpose(1, 2), key, value, **more, **given)
            output = self.answers(call, "flash_attn_with_kvcache").transpose(1, 2)
        else:
            more["cu_seqlens_q"] = cu_seqlens_q
            call = _call(q.transpose(0, 1)[None], key, value, **more, **given)
            output = self.answers(call, "flash_attn_with_kvcache")[0].transpose(0, 1)
        return (output, _no_lse(output)) if given.get("return_softmax_lse") else output


def _call(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    *,
    softmax_scale: float | None = None,
    causal: bool = False,
    window_size: Sequence[int] = (-1, -1),
    softcap: float = 0.0,
    dropout_p: float = 0.0,
    cu_seqlens_q: Tensor | None = None,
    cu_seqlens_k: Tensor | None = None,
    seqused_k: Tensor | None = None,
    page_table: Tensor | None = None,
    max_seqlen_q: int | None = None,
    **given: Any,
) -> AttentionCall:
    """Translate flash-attn's options into ours; its masks are aligned to the bottom right."""
    _check(given)
    left, right = (None if int(side) < 0 else int(side) for side in window_size)
    return AttentionCall(
        query,
        key,
        value,
        is_causal=causal,
        scale=softmax_scale,
        enable_gqa=query.shape[1] != key.shape[1],
        dropout_p=dropout_p,
        cu_seqlens_q=cu_seqlens_q,
        cu_seqlens_k=cu_seqlens_k,
        seqused_k=seqused_k,
        page_table=page_table,
        variant=AttentionVariant(
            bottom_right=True,
            window=(left, right),
            softcap=softcap or None,
            max_seqlen_q=max_seqlen_q,
        ),
    )


def _check(given: dict[str, Any]) -> None:
    for name, what in NOT_DONE.items():
        value = given.get(name)
        if value is not None and (isinstance(value, Tensor) or value != 0):
            pytest.skip(what)
    if unknown := given.keys() - NOT_DONE.keys() - CHANGE_NOTHING - OPTIONS:
        raise TypeError(f"the shim of flash-attn has no argument {min(unknown)!r}")


def _sequences(new: Tensor, starts: Tensor | None) -> list[Tensor]:
    """Return the (S, H, D) tensor of each sequence."""
    if starts is None:
        return list(new)
    return list(new.split(starts.diff().tolist()))


def _append(
    new: list[Tensor], cache: Tensor, table: Tensor | None, rows: list[int], lengths: Tensor
) -> None:
    """Append each sequence's new tokens to its cache."""
    for tokens, row, length in zip(new, rows, lengths.tolist(), strict=True):
        if table is None:
            cache[row, length : length + len(tokens)] = tokens
            continue
        places = torch.arange(length, length + len(tokens), device=cache.device)
        size = cache.shape[1]
        cache[table[row, places // size].long(), places % size] = tokens


def _no_lse(output: Tensor) -> Tensor:
    """Return NaN, which fails every comparison."""
    return torch.full_like(output[..., 0], torch.nan, dtype=torch.float32)
