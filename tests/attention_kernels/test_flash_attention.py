"""FlashAttention's functions equal attention in float64, sequence by sequence, in every layout."""

import math
from collections.abc import Callable, Sequence
from typing import Any
from unittest import mock

import pytest
import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode

from attention_kernels import flash_operators
from attention_kernels.decode.cache_update import append_to_cache, gather_pages
from attention_kernels.flash_attention import (
    flash_attn_func,
    flash_attn_varlen_func,
    flash_attn_with_kvcache,
)
from tests.attention_kernels import eager
from tests.attention_kernels.calls import DEVICE, assert_near, half, lengths, normal, offsets
from tests.replay.kernels.pairwise import each_pair

OPTIONS: list[dict[str, Any]] = [
    {"causal": True, "softmax_scale": 0.3},
    {"window_size": (9, 0), "softcap": 2.0},
    {"causal": True, "window_size": [12, -1], "learnable_sink": half(4)},
]
FP8_WAYS = ("", "paired ", "E5M2, paired ", "large, paired ")
Sequences = list[tuple[Tensor, Tensor, Tensor]]
"""Queries, keys and values of each sequence, (S, H, D)."""


def sequences(q_lens: Sequence[int], k_lens: Sequence[int], dtype: Any = None) -> Sequences:
    sizes = [*zip(q_lens, k_lens, strict=True)]
    return [
        tuple(
            normal(length, heads, dim, seed=3 * i + j, dtype=dtype or torch.float16)
            for j, (length, heads, dim) in enumerate(((sq, 4, 32), (sk, 2, 32), (sk, 2, 16)))
        )
        for i, (sq, sk) in enumerate(sizes)
    ]  # type: ignore[misc]


def expected(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    softmax_scale: float | None = None,
    causal: bool = False,
    window_size: Sequence[int] = (-1, -1),
    softcap: float = 0.0,
    learnable_sink: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """Return the output (S, H, D) and the log-sum-exp (H, S) of one sequence in float64."""
    query, key, value = (each.transpose(0, 1)[None] for each in (q, k, v))
    scores = eager.scores(query, key, scale=softmax_scale)[0]
    if softcap:
        scores = softcap * torch.tanh(scores / softcap)
    diagonals = torch.arange(len(q), device=DEVICE)[:, None] + len(k) - len(q)
    beyond = torch.arange(len(k), device=DEVICE) - diagonals
    left, right = (math.inf if side < 0 else side for side in window_size)
    is_hidden = (beyond > (0 if causal else right)) | (beyond < -left)
    lse = scores.masked_fill_(is_hidden, -math.inf).logsumexp(-1)
    if learnable_sink is not None:
        lse = torch.logaddexp(lse, learnable_sink.double()[:, None])
    weights = (scores - lse[..., None]).exp().nan_to_num()
    group = q.shape[1] // k.shape[1]
    return (weights @ value[0].double().repeat_interleave(group, dim=0)).transpose(0, 1), lse


def check(output: Tensor, lse: Tensor, given: Sequences, options: dict[str, Any]) -> None:
    """Compare an output and a log-sum-exp, packed or not, with those of each sequence alone."""
    outputs, sums = zip(*(expected(*each, **options) for each in given), strict=True)
    is_packed = output.ndim == 3
    assert output.is_contiguous()
    assert_near(output, torch.cat(outputs) if is_packed else torch.stack(outputs))
    assert_near(lse, torch.cat(sums, dim=1) if is_packed else torch.stack(sums))


class Cache:
    """A cache in one piece or in pages, all of it or rows of it, with NaN elsewhere."""

    def __init__(self, layout: str, batch: int, room: int = 64) -> None:
        size = 16 if "pages" in layout else room
        pages = torch.arange(2 * batch * room // size, dtype=torch.int32, device=DEVICE)
        self.table = (pages if layout == "whole" else pages.flip(0))[: batch * room // size]
        self.table = self.table.view(batch, room // size)
        count = batch if layout == "whole" else len(pages)
        self.key, self.value = (
            torch.full((count, size, 2, dim), math.nan, dtype=torch.float16, device=DEVICE)
            for dim in (32, 16)
        )
        self.given: dict[str, Tensor] = {}
        if layout == "rows":
            self.given = {"cache_batch_idx": self.table[:, 0]}
        elif layout != "whole":
            self.given = {"page_table": self.table}
        if layout == "rows of pages":
            self.given["page_table"] = torch.cat((self.table[:1], self.table.flip(0)))
            self.given["cache_batch_idx"] = lengths(*range(batch, 0, -1))

    def write(self, given: Sequences, stop: Sequence[int | None]) -> None:
        """Write each sequence's keys and values up to a token."""
        for pages, (_, key, value), end in zip(self.table, given, stop, strict=True):
            for token, slot in enumerate(zip(key[:end], value[:end], strict=True)):
                place = int(pages[token // self.key.shape[1]]), token % self.key.shape[1]
                self.key[place], self.value[place] = slot


@pytest.mark.parametrize("options", OPTIONS, ids=str)
@pytest.mark.parametrize(("q_len", "k_len"), [(3, 40), (40, 70), (70, 40)])
def test_batch(q_len: int, k_len: int, options: dict[str, Any]) -> None:
    given = sequences([q_len] * 2, [k_len] * 2)
    tensors = [torch.stack(each) for each in zip(*given, strict=True)]
    out = torch.empty(2, q_len, 4, 16, dtype=torch.float16, device=DEVICE)
    output, lse, probabilities = flash_attn_func(
        *tensors, 0.0, **options, out=out, return_attn_probs=True, num_splits=3, qv=None
    )
    assert (output is out, probabilities) == (True, None)
    check(output, lse, given, options)
    alone = flash_attn_func(*tensors, **options, deterministic=True)
    assert torch.equal(alone, out)
    assert alone.is_contiguous()


@each_pair(
    q_lens=[(3, 3, 3), (5, 170, 1), (5, 0, 2)],
    layout=["whole", "used", "pages", "gathered pages", *(f"{way}FP8 pages" for way in FP8_WAYS)],
    options=range(len(OPTIONS)),
)
def test_packed(
    q_lens: tuple[int, ...], layout: str, options: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    k_lens = (30, 7, 44)
    given, chosen = sequences(q_lens, k_lens), OPTIONS[options]
    more: dict[str, Any] = {"cu_seqlens_k": offsets(*k_lens), "max_seqlen_q": max(q_lens)}
    key, value = (torch.cat([each[i] for each in given]) for i in (1, 2))
    if layout == "used":
        key, value = (
            torch.cat([torch.nn.functional.pad(each[i], (0, 0, 0, 0, 0, 5)) for each in given])
            for i in (1, 2)
        )
        more = {"cu_seqlens_k": offsets(35, 12, 49), "seqused_k": lengths(*k_lens)}
    elif "pages" in layout:
        monkeypatch.setattr(flash_operators, "_is_gathered", lambda *_: layout[0] == "g")
        cache = Cache("pages", 3)
        cache.write(given, k_lens)
        key, value = cache.key, cache.value
        cache.table[1, 1:] = 99  # not read
        more |= {"block_table": cache.table, "max_seqlen_k": 44}
    if "FP8" in layout:
        if "paired" in layout:  # numbers are read in pairs if the head dimensions allow it
            value, given = (
                value.repeat(1, 1, 1, 2),
                [(q, k, v.repeat(1, 1, 2)) for q, k, v in given],
            )
        dtype = torch.float8_e5m2 if "E5M2" in layout else torch.float8_e4m3fn
        key, value = (each.to(dtype) for each in (key, value))
        units = torch.tensor([[0.75, 1.5], [1.25, 0.5]], device=DEVICE)
        more |= {"k_descale": units[0], "v_descale": units[1].expand(3, 2)}
        given = [
            (
                q,
                *(
                    each.to(key.dtype).float() * unit[:, None]
                    for each, unit in zip(kv, units, strict=True)
                ),
            )
            for q, *kv in given
        ]
    q = torch.cat([each[0] for each in given])
    if layout[0] == "l":  # beyond the range of float16
        q, more["k_descale"] = q.bfloat16() * 2.0**100, more["k_descale"] * 2.0**-100
        given = [
            (own.double() * 2.0**-100, *kv)
            for own, (_, *kv) in zip(q.split(q_lens), given, strict=True)
        ]
    output, lse, _ = flash_attn_varlen_func(
        q, key, value, offsets(*q_lens), **more, **chosen, return_attn_probs=True
    )
    check(output, lse, given, chosen)


@pytest.mark.parametrize(
    ("tokens", "batch", "pages", "is_gathered"),
    [(8192, 4, 512, True), (2047, 4, 512, False), (16384, 4, 16384, False), (512, 1, 64, True)],
)
def test_long_chunks_are_copied_for_the_hopper_kernel(
    tokens: int, batch: int, pages: int, is_gathered: bool
) -> None:
    """Copies are neither larger than 2 GiB nor made for less than 2,048 rows per sequence, nor for
    uneven batches."""
    query, table = torch.empty(tokens, 32, 128, dtype=torch.bfloat16), torch.empty(batch, pages)
    cache = torch.empty(9, 16, 8, 128, dtype=torch.bfloat16)
    for name in ("flash_operators", "hopper.hopper_prefill"):
        mock.patch(f"attention_kernels.{name}.has_gluon_kernels", return_value=True).start()
    found = [
        flash_operators._is_gathered(query, cache, cache, table, None, is_even)
        for is_even in (True, False)
    ]
    mock.patch.stopall()
    assert found == [is_gathered, False]


@each_pair(
    q_lens=[(1, 1), (3, 3), (20, 20), (5, 20)],
    layout=["whole", "rows", "pages", "rows of pages"],
    is_packed=[False, True],
    options=range(len(OPTIONS)),
)
def test_cache_grows(q_lens: tuple[int, int], layout: str, is_packed: bool, options: int) -> None:
    is_packed |= q_lens[0] != q_lens[1]
    chosen, used = OPTIONS[options], (11, 30)
    given = sequences(q_lens, [a + b for a, b in zip(used, q_lens, strict=True)])
    cache, filled = Cache(layout, 2), Cache(layout, 2)
    cache.write(given, used)
    filled.write(given, (None, None))
    join: Callable[..., Tensor] = torch.cat if is_packed else torch.stack
    q, k, v = (
        join([each[i][-n:] for each, n in zip(given, q_lens, strict=True)]) for i in range(3)
    )
    packed = {}
    if is_packed:
        packed = dict.fromkeys(("cu_seqlens_q", "cu_seqlens_k_new"), offsets(*q_lens))
        packed |= {"max_seqlen_q": max(q_lens)}
    lengths_before = lengths(*used)
    output, lse = flash_attn_with_kvcache(
        q, cache.key, cache.value, k, v, cache_seqlens=lengths_before, **cache.given, **packed,
        **chosen, return_softmax_lse=True,
    )  # fmt: skip
    check(output, lse, given, chosen)
    for after, wanted in ((cache.key, filled.key), (cache.value, filled.value)):
        torch.testing.assert_close(after, wanted, equal_nan=True, atol=0, rtol=0)
    assert lengths_before.tolist() == list(used)


@pytest.mark.parametrize("dtype", [torch.float16, torch.float32])
@pytest.mark.parametrize("length", [None, 20])
def test_cache_is_full_or_filled_to_one_length(length: int | None, dtype: torch.dtype) -> None:
    given = [(q, k[:length], v[:length]) for q, k, v in sequences((3, 3), (32, 32), dtype)]
    q, k, v = (torch.stack(each) for each in zip(*sequences((3, 3), (32, 32), dtype), strict=True))
    output, lse = flash_attn_with_kvcache(q, k, v, cache_seqlens=length, return_softmax_lse=True)
    check(output, lse, given, {})
    tokens = torch.arange(64, dtype=torch.int32, device=DEVICE).view(2, 32)
    pages = (each.flatten(0, 1)[:, None] for each in (k, v))
    paged = flash_attn_with_kvcache(q, *pages, cache_seqlens=length, block_table=tokens)
    assert_near(paged, output.double())


@pytest.mark.parametrize("is_compiled", [False, True])
@pytest.mark.parametrize("in_pages", [False, True])
def test_values_are_the_first_part_of_the_keys(in_pages: bool, is_compiled: bool) -> None:
    attend: Any = flash_attn_with_kvcache
    if is_compiled:
        attend = torch.compile(attend, fullgraph=True, backend="aot_eager")
    q, new = half(2, 3, 4, 320), half(2, 3, 1, 320, seed=1)
    cache = half(4, 16, 1, 320, seed=2)
    table = lengths(3, 1, 0, 2).view(2, 2) if in_pages else None
    rows = {"block_table": table} if in_pages else {"cache_batch_idx": lengths(3, 1)}
    tokens = [cache[table[i]].flatten(0, 1) if in_pages else cache[3 - 2 * i] for i in range(2)]
    keys = [torch.cat((each[:12], new[i])) for i, each in enumerate(tokens)]
    given = [(q[i], key, key[..., :288]) for i, key in enumerate(keys)]
    output, lse = attend(
        q, cache, cache[..., :288], new, new[..., :288], cache_seqlens=12, causal=True, **rows,
        return_softmax_lse=True,
    )  # fmt: skip
    check(output, lse, given, {"causal": True})


def test_appending_and_gathering_do_not_wait_for_the_gpu() -> None:
    """Reading a number of a fake tensor is an error."""
    cache = Cache("pages", 2)
    new, starts = half(5, 2, 32), offsets(2, 3)
    with FakeTensorMode(allow_non_fake_inputs=True) as mode:
        key, k, table, used = map(mode.from_tensor, (cache.key, new, cache.table, lengths(3, 4)))
        append_to_cache(key, key, k, k, used, table, mode.from_tensor(starts))
        append_to_cache(key, key, k[None], k[None], used[:1], None, None)
        assert gather_pages(key, table, used).shape == (2, 64, 2, 32)


def grow(q: Tensor, cache: list[Tensor], k: Tensor, v: Tensor, used: Tensor, **rows: Any) -> Any:
    return flash_attn_with_kvcache(
        q * 1, *cache, k, v, cache_seqlens=used, causal=True, return_softmax_lse=True, **rows
    )


@pytest.mark.parametrize("layout", ["whole", "rows", "pages"])
def test_compiled_code_is_one_graph_for_all_lengths_of_a_cache(layout: str) -> None:
    compiled = torch.compile(grow, fullgraph=True, dynamic=True, backend="aot_eager")
    for step, (q_len, batch, room) in enumerate(((7, 3, 80), (20, 3, 64), (3, 3, 48), (6, 5, 80))):
        given = sequences([q_len] * batch, [q_len + step + 2] * batch)
        caches = [Cache(layout, batch, room) for _ in range(2)]
        for cache in caches:
            cache.write(given, [step + 2] * batch)
        q, k, v = (torch.stack([each[i][-q_len:] for each in given]) for i in range(3))
        used = lengths(*[step + 2] * batch)
        given_to = [((q, [each.key, each.value], k, v, used), each.given) for each in caches]
        with torch.no_grad(), torch._dynamo.config.patch(error_on_recompile=step > 0):
            outputs = compiled(*given_to[0][0], **given_to[0][1])
        for one, other in zip(outputs, grow(*given_to[1][0], **given_to[1][1]), strict=True):
            assert torch.equal(one, other)
        assert torch.equal(caches[0].key.nan_to_num(), caches[1].key.nan_to_num())


def layer(q: Tensor, k: Tensor, v: Tensor, *starts: Any, **options: Any) -> Any:
    function = flash_attn_varlen_func if starts else flash_attn_func
    output, lse, _ = function(q * 1, k, v, *starts, return_attn_probs=True, **options)
    return output + 1, lse


@pytest.mark.parametrize("layout", ["batch", "packed", "pages"])
def test_compiled_code_is_one_graph_for_all_lengths(layout: str) -> None:
    compiled = torch.compile(layer, fullgraph=True, dynamic=True, backend="aot_eager")
    options = {"causal": True, "window_size": (9, 0), "softcap": 5.0, "s_aux": half(4)}
    for step, lens in enumerate(((20, 20, 20), (21, 21, 21), (9, 9, 9), (40, 40, 40))):
        given = sequences(lens, lens)
        join: Callable[..., Tensor] = torch.stack if layout == "batch" else torch.cat
        tensors = [*map(join, zip(*given, strict=True))]
        out = torch.zeros_like(tensors[0])[..., :16].contiguous()
        starts: tuple[Any, ...] = ()
        if layout != "batch":
            starts = (offsets(*lens), offsets(*lens), max(lens), max(lens))
        if layout == "pages":
            cache = Cache("pages", 3, 16 * (5 + step))
            cache.write(given, lens)
            tensors[1:], options["block_table"] = (cache.key, cache.value), cache.table
        with torch.no_grad(), torch._dynamo.config.patch(error_on_recompile=step > 0):
            outputs = compiled(*tensors, *starts, **options, out=out)
        for one, other in zip(outputs, layer(*tensors, *starts, **options), strict=True):
            assert torch.equal(one, other)
        assert torch.equal(out + 1, outputs[0])


def test_autocast_converts_tensors() -> None:
    q, k, v = sequences((20,), (20,), torch.float32)[0]
    with torch.autocast(DEVICE.type, torch.bfloat16):
        output = flash_attn_varlen_func(q, k, v, offsets(20), offsets(20), 20, 20)
    assert output.dtype == torch.bfloat16


def test_operators_pass_pytorchs_own_checks() -> None:
    options = (0.2, True, 5, None, 3.0, half(4))
    given = sequences((3, 20), (30, 44))
    q, k, v = (torch.cat(each) for each in zip(*given, strict=True))
    starts = offsets(3, 20), offsets(30, 44)
    ours = torch.ops.attention_kernels
    packed = [each.clone().requires_grad_() for each in (q, k, v)]
    torch.library.opcheck(ours.varlen.default, (*packed, *starts, 20, None, *options, 44))
    cache = Cache("pages", 2)
    cache.write(given, (None, None))
    place = cache.key, cache.value
    for queries, at_q, longest in ((q, starts[0], 20), (q.view(1, 23, 4, 32)[:, :3], None, 3)):
        batch = 2 if at_q is not None else 1
        call = (queries, *place, lengths(30, 44)[:batch], cache.table[:batch], at_q, longest, 44)
        torch.library.opcheck(ours.kvcache.default, (*call, *options))
    new = k[:6].unflatten(0, (2, 3)), v[:6].unflatten(0, (2, 3))
    torch.library.opcheck(
        ours.append_to_cache.default, (*place, *new, lengths(10, 20), cache.table, None)
    )


Q, K, V = (each[None] for each in sequences((3,), (40,))[0])
WIDE = {"q": half(1, 3, 1, 320), "k_cache": half(1, 9, 1, 320), "v_cache": half(1, 9, 1, 288)}
GIVEN: dict[Callable[..., Any], dict[str, Any]] = {
    flash_attn_func: {"q": Q, "k": K, "v": V},
    flash_attn_varlen_func: {
        **{"q": Q[0], "k": K[0], "v": V[0], "max_seqlen_q": 3, "max_seqlen_k": 40},
        **{"cu_seqlens_q": offsets(3), "cu_seqlens_k": offsets(40)},
    },
    flash_attn_with_kvcache: {"q": Q, "k_cache": K, "v_cache": V, "cache_seqlens": 1},
}
REFUSED: list[tuple[Callable[..., Any], dict[str, Any], str]] = [
    (flash_attn_func, {"dropout_p": 0.1}, "^dropout_p: there is no kernel for dropout"),
    (flash_attn_func, {"alibi_slopes": half(4)}, "^alibi_slopes: there is no"),
    (flash_attn_func, {"qv": Q}, "^qv: there is no"),
    (flash_attn_func, {"q_descale": half(1)}, "^q_descale: there is no"),
    (flash_attn_func, {"attention_chunk": 5}, "^attention_chunk: there is no"),
    (flash_attn_func, {"causl": True}, "unexpected argument 'causl'"),
    (flash_attn_func, {"q": Q.tolist()}, "^q must be a tensor, got list"),
    (flash_attn_func, {"out": [Q]}, "^out must be a tensor or None, got list"),
    (flash_attn_func, {"s_aux": [1.0]}, "^s_aux must be a tensor or None, got list"),
    (flash_attn_func, {"q": Q[0]}, "4 dimensions.*got 3"),
    (flash_attn_func, {"v": V[:, 1:]}, "do not fit together"),
    (flash_attn_func, {"q": Q[:, :, 1:]}, "3 query heads are not a multiple of 2"),
    (flash_attn_func, {"s_aux": half(2)}, "^a sink of shape"),
    (flash_attn_func, {"s_aux": half(4), "learnable_sink": half(4)}, "names of one argument"),
    (flash_attn_func, {"out": Q}, r"^out of shape .*expected \(1, 3, 4, 16\)"),
    (flash_attn_varlen_func, {"seqused_q": lengths(3)}, "^seqused_q: there is no"),
    (flash_attn_varlen_func, {"cu_seqlens_q": offsets(3).long()}, "^cu_seqlens_q of .*int64"),
    (flash_attn_varlen_func, {"cu_seqlens_k": offsets(1, 39)}, r"^cu_seqlens_k of shape \(3,\)"),
    (flash_attn_varlen_func, {"cu_seqlens_k": None}, "^cu_seqlens_k is None"),
    (
        flash_attn_varlen_func,
        {"k": K, "v": V, "page_table": lengths(0, 0).view(2, 1)},
        "^block_table of shape",
    ),
    (flash_attn_varlen_func, {"cu_seqlens_q": [0, 3]}, "^cu_seqlens_q must be a tensor, got list"),
    (flash_attn_varlen_func, {"cu_seqlens_q": lengths()}, "^cu_seqlens_q is empty"),
    (flash_attn_varlen_func, {"max_seqlen_q": 0}, "^max_seqlen_q is 0: expected at least 1"),
    (flash_attn_with_kvcache, {"cache_seqlens": [1]}, "^cache_seqlens must be a tensor or None"),
    (flash_attn_with_kvcache, {"k": [K], "v": [V]}, "^k must be a tensor, got list"),
    (flash_attn_with_kvcache, {"cache_seqlens": 1000}, "^cache_seqlens 1000 and 0 new tokens"),
    (
        flash_attn_with_kvcache,
        {"k": K, "v": V, "cache_seqlens": 9},
        "9 and 40 new tokens: there is room",
    ),
    (flash_attn_with_kvcache, {"rotary_cos": half(8)}, "^rotary_cos: there is no"),
    (flash_attn_with_kvcache, {"cache_leftpad": lengths(1)}, "^cache_leftpad: there is no"),
    (flash_attn_with_kvcache, {"cache_seqlens": lengths(3).long()}, "^cache_seqlens of .*int64"),
    (flash_attn_with_kvcache, {"cache_batch_idx": lengths(0, 0)}, "^cache_batch_idx of shape"),
    (flash_attn_with_kvcache, {"q": Q.repeat(2, 1, 1, 1)}, "cache of 1 sequences, queries of 2"),
    (flash_attn_with_kvcache, {"k": K}, "^v is None"),
    (flash_attn_with_kvcache, {"k": K, "v": K}, "do not fit a cache"),
    (flash_attn_with_kvcache, {"k": K, "v": V, "cache_seqlens": None}, "^cache_seqlens is None"),
    (flash_attn_with_kvcache, {"k": K, "v": V, "softcap": -1.0}, "invalid softcap"),
    (flash_attn_with_kvcache, {"k": K, "v": V.clone().requires_grad_()}, "no backward pass"),
    (
        flash_attn_varlen_func,
        {"q": Q[0].clone().requires_grad_(), "k": K, "v": V, "page_table": lengths(0).view(1, 1)},
        "attention over a cache has no backward pass",
    ),
    (flash_attn_with_kvcache, {"q": Q.float(), "k": K, "v": V}, "float32, torch.float16"),
    (
        flash_attn_with_kvcache,
        {**WIDE, "k": WIDE["k_cache"], "v": WIDE["v_cache"]},
        "head dimensions 320 and 288",
    ),
]


@pytest.mark.parametrize(
    ("function", "changes", "message"), REFUSED, ids=[message for *_, message in REFUSED]
)
def test_calls_are_refused_by_name(
    function: Callable[..., Any],
    changes: dict[str, Any],
    message: str,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("attention_kernels.flash_attention.append_to_cache", "is not called")
    with pytest.raises((NotImplementedError, ValueError, TypeError), match=message):
        function(**{**GIVEN[function], **changes})
