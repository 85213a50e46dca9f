"""Checks and translation of FlashAttention's arguments."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from torch import Tensor

from attention_kernels.decode.kv_cache import FP8
from attention_kernels.launch.shape_checks import check_integers, check_types

NOT_COMPUTED = {
    "dropout_p": "dropout",
    "alibi_slopes": "ALiBi",
    "qv": "a second query for the values",
    "q_v": "a second query for the values",
    "q_descale": "FP8 tensors with scales",
    "k_descale": "FP8 tensors with scales",
    "v_descale": "FP8 tensors with scales",
    "attention_chunk": "attention in chunks",
    "seqused_q": "queries that do not count",
    "rotary_cos": "rotary embeddings",
    "rotary_sin": "rotary embeddings",
    "cache_leftpad": "caches padded left",
}
"""Arguments of FlashAttention for features that these kernels lack."""
WITHOUT_EFFECT = {
    *("deterministic", "num_splits", "pack_gqa", "sm_margin", "scheduler_metadata", "fa_version"),
    *("rotary_interleaved", "rotary_seqlens"),
}
"""Arguments that affect only speed, or only features that are refused."""


def check_features(**given: Any) -> None:
    """Raise an error for arguments that need other features than these kernels have."""
    for name, value in given.items():
        if name in WITHOUT_EFFECT:
            continue
        if name not in NOT_COMPUTED:
            raise TypeError(f"unexpected argument {name!r}")
        if value is not None and (isinstance(value, Tensor) or value != 0):
            raise NotImplementedError(f"{name}: there is no kernel for {NOT_COMPUTED[name]}")


def check_sizes(
    q: Tensor, k: Tensor, v: Tensor, axes: tuple[int, int], sinks: Tensor | None, out: Tensor | None
) -> None:
    """Check that types and shapes fit together; `axes` are the numbers of axes of `q` and of `k`
    and `v`.

    Raises:
        TypeError, ValueError: a type or a shape does not fit.
    """
    check_types({"q": q, "k": k, "v": v}, out=out)
    if (q.ndim, k.ndim, v.ndim) != (*axes, axes[1]):
        raise ValueError(
            f"expected a query of {axes[0]} dimensions, keys and values of {axes[1]}; got "
            f"{q.ndim}, {k.ndim} and {v.ndim}"
        )
    if k.shape[:-1] != v.shape[:-1] or q.shape[-1] != k.shape[-1]:
        sizes = tuple(q.shape), tuple(k.shape), tuple(v.shape)
        raise ValueError("query {}, keys {} and values {} do not fit together".format(*sizes))
    heads, kv_heads = q.shape[-2], k.shape[-2]
    if kv_heads == 0 or heads % kv_heads:
        raise ValueError(f"{heads} query heads are not a multiple of {kv_heads} key heads")
    if sinks is not None and sinks.shape != (heads,):
        raise ValueError(
            f"a sink of shape {tuple(sinks.shape)}: needs one for each of {heads} heads"
        )
    shape = (*q.shape[:-1], v.shape[-1])
    if out is not None and (out.shape, out.dtype, out.device) != (shape, q.dtype, q.device):
        raise ValueError(
            f"out of shape {tuple(out.shape)} in {out.dtype} on {out.device}: expected "
            f"{shape} in {q.dtype} on {q.device}"
        )


def check_new(
    k: Tensor | None,
    v: Tensor | None,
    k_cache: Tensor,
    v_cache: Tensor,
    batch: int,
    cu_seqlens_k_new: Tensor | None,
) -> tuple[Tensor, Tensor]:
    """Return new keys and values, or raise ValueError if they do not fit the cache."""
    if k is None or v is None:
        raise ValueError(f"{'k' if k is None else 'v'} is None: pass k and v, or neither")
    check_types({"k": k, "v": v})
    check_integers("cu_seqlens_k_new", cu_seqlens_k_new, (batch + 1,), k.device)
    tokens = k.shape[:-2]
    fits = tokens[:-1] == ((batch,) if cu_seqlens_k_new is None else ())
    for new, cache in ((k, k_cache), (v, v_cache)):
        fits = fits and new.shape == (*tokens, *cache.shape[-2:])
        if not fits or new.dtype != cache.dtype or new.device != cache.device:
            raise ValueError(
                f"new {tuple(new.shape)} in {new.dtype} on {new.device} do not fit a cache "
                f"{tuple(cache.shape)} in {cache.dtype} on {cache.device}, {batch} sequences"
            )
    return k, v


def check_room(tokens: int | Tensor, new: int, cache: Tensor, table: Tensor | None) -> None:
    """Raise ValueError if a cache has no room for a number of tokens that the host knows."""
    room = cache.shape[1] * (1 if table is None else table.shape[1])
    if not isinstance(tokens, Tensor) and not 0 <= tokens <= room - new:
        raise ValueError(f"cache_seqlens {tokens} and {new} new tokens: there is room for {room}")


def either(**given: Tensor | None) -> Tensor | None:
    """Return the one of two names for a tensor that is not None."""
    check_types({}, **given)
    (name, first), (other, second) = given.items()
    if first is not None and second is not None:
        raise ValueError(f"{name} and {other} are names of one argument: pass one of them")
    return second if first is None else first


def descales_of(
    keys: Tensor, k_descale: Tensor | None, v_descale: Tensor | None
) -> tuple[Tensor | None, Tensor | None]:
    """Return the scales of an FP8 cache; None for a cache in 16 bits, which has none even if the
    caller passes some."""
    check_types({}, k_descale=k_descale, v_descale=v_descale)
    return (k_descale, v_descale) if keys.dtype in FP8 else (None, None)


def batch_of(cu_seqlens: Tensor) -> int:
    """Return the number of sequences of a packed batch, from their offsets (B + 1,)."""
    check_types({"cu_seqlens_q": cu_seqlens})
    if cu_seqlens.numel() == 0:
        raise ValueError("cu_seqlens_q is empty: expected one offset more than sequences")
    return cu_seqlens.shape[0] - 1


def longest_of(q: Tensor, max_seqlen_q: int | Tensor | None) -> int:
    """Return the maximum number of queries of a packed sequence, Tq if it is not given.

    A tensor is read, which waits for the GPU.
    """
    longest = q.shape[0] if max_seqlen_q is None else int(max_seqlen_q)
    if longest < 1 and q.shape[0] > 0:
        raise ValueError(f"max_seqlen_q is {longest}: expected at least 1 for {q.shape[0]} queries")
    return longest


def window(window_size: Sequence[int | None]) -> tuple[int | None, int | None]:
    """Return the sides of a window, None for an unbounded one."""
    left, right = (None if side is None or side < 0 else int(side) for side in window_size)
    return left, right


def placed(output: Tensor, out: Tensor | None) -> Tensor:
    """Return `out` with a copy of the output, or the output if there is no `out`."""
    return output if out is None else out.copy_(output)
