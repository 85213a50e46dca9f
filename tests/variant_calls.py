"""Small calls that use features for which SDPA has no argument."""

from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from capture.call.attention_call import AttentionCall
from capture.call.attention_variant import AttentionVariant
from tests.factories import normal, random_call


def paged_call(lengths: list[int], page_size: int, **sizes: Any) -> AttentionCall:
    """Return a call whose sequences have `lengths` keys in scrambled pages, some of them not full.

    Two pages are unused, and the table's rows are one entry longer than needed. Queries are packed
    if `cu_seqlens_q` is given.
    """
    pages = -(-max(*lengths, 1) // page_size) + 1
    pool = len(lengths) * pages + 2
    order = torch.randperm(pool, generator=torch.Generator().manual_seed(0))
    batch = 1 if "cu_seqlens_q" in sizes else len(lengths)
    call = random_call(
        batch=pool,
        kv_len=page_size,
        **{"q_len": 3, **sizes},
        seqused_k=torch.tensor(lengths).int(),
        page_table=order[: len(lengths) * pages].view(-1, pages).int(),
    )
    return replace(call, query=call.query[:batch])


MLA = {"head_dim": 576, "v_head_dim": 512, "q_heads": 4, "kv_heads": 1, "dtype": torch.bfloat16}


def mla_call(page_size: int = 64, **changes: Any) -> AttentionCall:
    """Return a call of absorbed MLA, whose value is the first 512 columns of its key."""
    call = paged_call([17, 140], page_size, **{**MLA, **changes})
    return replace(call, value=call.key[..., :512])


def sequences(call: AttentionCall) -> list[AttentionCall]:
    """Return a paged call's sequences; keys are looked up one by one, as flash-attn defines."""
    table, lengths, size = call.page_table, call.seqused_k, call.key.shape[2]
    found = []
    for n, length in enumerate(lengths.tolist()):
        places = [(int(table[n, t // size]), t % size) for t in range(length)]
        key, value = (
            torch.cat([pool[:1, :, :0], *(pool[page, None, :, t, None] for page, t in places)], 2)
            for pool in (call.key, call.value)
        )
        rows = slice(n, n + 1), slice(None), slice(None)
        if call.cu_seqlens_q is not None:
            first, end = call.cu_seqlens_q[n : n + 2].tolist()
            rows = slice(None), slice(None), slice(first, end)
        whole = dict.fromkeys(("seqused_k", "page_table", "cu_seqlens_q"))
        found.append(replace(call, query=call.query[rows], key=key, value=value, **whole))
    return found


def in_float8(call: AttentionCall, *names: str) -> AttentionCall:
    """Return the call with the named tensors in float8, each with its scale for each key head."""
    found: dict[str, Tensor] = {}
    for number, name in enumerate(names, start=2):
        tensor, factors = getattr(call, name), torch.linspace(0.01, 0.03, call.shape.kv_heads)
        factors *= number
        of_heads = factors.repeat_interleave(tensor.shape[1] // len(factors))[:, None, None]
        found |= {name: (tensor / of_heads).to(torch.float8_e4m3fn), f"{name}_scale": factors}
    return call.with_tensors(found)


LENGTHS_Q, LENGTHS_K = torch.tensor([0, 5, 16]).int(), torch.tensor([0, 9, 24]).int()
PACKED = {"q_len": 16, "kv_len": 24, "cu_seqlens_q": LENGTHS_Q, "cu_seqlens_k": LENGTHS_K}
SQUARE = {"q_len": 16, "kv_len": 16, "is_causal": True}
SOME_KEYS = {"batch": 2, "seqused_k": torch.tensor([4, 13]).int()}
BOTTOM_RIGHT = AttentionVariant(bottom_right=True)
SOFT_CAP = AttentionVariant(softcap=0.5)


def bounded(left: int, right: int | None = None, *, bottom_right: bool = True) -> AttentionVariant:
    return AttentionVariant(window=(left, right), bottom_right=bottom_right)


LEFT_OF_TOP = bounded(2, 0, bottom_right=False)
TWO_LEFT = bounded(2, bottom_right=False)
LONGEST = AttentionVariant(bottom_right=True, max_seqlen_q=11, max_seqlen_k=15)
THREE = {"q_len": 3, "is_causal": True}

_FIELDS: dict[str, dict[str, Any]] = {
    "bottom-right": {"is_causal": True, "variant": BOTTOM_RIGHT},
    "bottom-right, square": {"q_len": 13, "is_causal": True, "variant": BOTTOM_RIGHT},
    "window": {**SQUARE, "variant": bounded(3, bottom_right=False)},
    "window both ways": {"kv_len": 16, "variant": bounded(4, 2)},
    "softcap": {"variant": SOFT_CAP},
    "softcap and mask": {"variant": SOFT_CAP, "attn_mask": normal(9, 13) > 0},
    "sinks": {"q_heads": 4, "kv_heads": 2, "sinks": normal(4, seed=7)},
    "sinks and window": {**SQUARE, "sinks": normal(2, seed=7), "variant": LEFT_OF_TOP},
    "packed": PACKED,
    "packed, causal bottom right": {**PACKED, "is_causal": True, "variant": LONGEST},
    "packed, causal top left": {**PACKED, "is_causal": True, "variant": TWO_LEFT},
    "key-lengths": SOME_KEYS,
    "key-lengths, bottom right": {**SOME_KEYS, **THREE, "variant": BOTTOM_RIGHT},
}
CALLS = {name: random_call(**fields) for name, fields in _FIELDS.items()} | {
    "paged": paged_call([9, 0, 5], 4, q_heads=4, kv_heads=2),
    "paged, packed, bottom right, window": paged_call(
        [9, 12], 4, q_len=16, is_causal=True, cu_seqlens_q=LENGTHS_Q, variant=bounded(2)
    ),
    "scaled": in_float8(random_call(q_heads=4, kv_heads=2), "key"),
    "scaled, paged": in_float8(paged_call([9, 0, 5], 4, q_heads=4, kv_heads=2), "key", "value"),
}
_KEY = CALLS["paged"].key.to(torch.float8_e4m3fn)
CALLS["scaled value, paged"] = replace(CALLS["scaled, paged"], key=_KEY, key_scale=None)


def _calls(head_dim: int, dtype: torch.dtype) -> dict[str, AttentionCall]:
    sizes = {"head_dim": head_dim, "dtype": dtype, "q_heads": 4, "kv_heads": 2}
    even = torch.tensor([0, 5, 16]).int()
    same = {"q_len": 16, "kv_len": 16, "cu_seqlens_q": even, "cu_seqlens_k": even.clone()}
    lengths = {"batch": 2, "kv_len": 40, "seqused_k": torch.tensor([17, 40]).int()}
    mask = torch.arange(16) < torch.tensor([[5], [16]])
    padded = {"batch": 2, "kv_len": 16, "attn_mask": mask[:, None, None]}
    left = bounded(4)
    two = AttentionVariant(softcap=2.0)
    sinks = {"sinks": normal(4, seed=7, dtype=torch.bfloat16)}
    asked: dict[str, dict[str, Any]] = {
        "bottom right": {"q_len": 9, "kv_len": 21, "is_causal": True, "variant": BOTTOM_RIGHT},
        "bottom right, batch": {"batch": 2, "is_causal": True, "variant": BOTTOM_RIGHT},
        "bottom right, decode": {"q_len": 1, "is_causal": True, "variant": BOTTOM_RIGHT},
        "top left": {"is_causal": True, "variant": two},
        "window, causal": {"q_len": 16, "kv_len": 16, "is_causal": True, "variant": left},
        "window, causal, longer keys": {"is_causal": True, "variant": left},
        "window, decode": {"q_len": 1, "kv_len": 21, "is_causal": True, "variant": left},
        "window, left": {"variant": left},
        "window, both ways": {"variant": bounded(3, 2)},
        "window, left and none after": {"variant": bounded(3, 0)},
        "window, top left": {"variant": bounded(3, 2, bottom_right=False)},
        "window, padded": {**padded, "variant": left},
        "soft cap, padded": {**padded, "variant": SOFT_CAP},
        "soft cap": {"variant": SOFT_CAP},
        "soft cap, scale, batch": {"batch": 2, "scale": 0.3, "variant": two},
        "soft cap, decode": {"q_len": 1, "variant": SOFT_CAP},
        "sinks": sinks,
        "sinks, window": {**sinks, "is_causal": True, "variant": left},
        "packed": PACKED,
        "packed, bottom right": {**PACKED, "is_causal": True, "variant": BOTTOM_RIGHT},
        "packed, top left": {**PACKED, "is_causal": True},
        "packed, even": {**same, "is_causal": True},
        "packed, window": {**PACKED, "is_causal": True, "variant": left},
        "packed, soft cap": {**PACKED, "variant": AttentionVariant(softcap=0.5, max_seqlen_q=11)},
        "packed, key lengths": {**PACKED, "seqused_k": torch.tensor([7, 15]).int()},
        "key lengths": lengths,
        "key lengths, decode": {**lengths, "q_len": 1},
        "key lengths, bottom right": {**lengths, "is_causal": True, "variant": BOTTOM_RIGHT},
        "key lengths, window": {**lengths, "is_causal": True, "variant": left},
    }
    calls = {kind: random_call(**{**sizes, **changes}) for kind, changes in asked.items()}
    packed = {"q_len": 16, "cu_seqlens_q": LENGTHS_Q, "is_causal": True}
    decoded = {"q_len": 2, "cu_seqlens_q": torch.arange(3).int()}
    one = replace(left, max_seqlen_q=1)
    in_pages: dict[str, tuple[int, dict[str, Any]]] = {
        "pages": (16, {}),
        "pages of 256": (256, {}),
        "pages, decode, window": (256, {"q_len": 1, "is_causal": True, "variant": left}),
        "pages, packed decode": (256, {**decoded, "is_causal": True, "variant": one}),
        "pages, packed, bottom right": (256, {**packed, "variant": BOTTOM_RIGHT}),
        "pages, packed, window": (16, {**packed, "variant": left}),
    }
    for kind, (page_size, changes) in in_pages.items():
        calls[kind] = paged_call([17, 40], page_size, **sizes, **changes)
    for kind in ("pages", "pages, packed, bottom right"):
        calls[f"float8, {kind}"] = in_float8(calls[kind], "query", "key", "value")
    return calls


LIBRARY_CALLS = _calls(64, torch.float16)
"""Half-precision calls for other libraries' kernels; the alignment of some calls is unsupported."""


def visible(call: AttentionCall) -> Tensor:
    """Return the visible pairs, (B, Sq, Sk) bool, tested one by one against the definitions."""
    batch, q_len, kv_len = call.shape.batch, call.shape.q_len, call.shape.kv_len
    cu_q = [0, q_len] if call.cu_seqlens_q is None else call.cu_seqlens_q.tolist()
    cu_k = [0, kv_len] if call.cu_seqlens_k is None else call.cu_seqlens_k.tolist()
    left, right = call.variant.window
    seen = torch.zeros(batch, q_len, kv_len, dtype=torch.bool)
    for b in range(batch):
        for n in range(len(cu_q) - 1):
            queries, keys = cu_q[n + 1] - cu_q[n], cu_k[n + 1] - cu_k[n]
            if call.seqused_k is not None:
                keys = int(call.seqused_k[n if call.cu_seqlens_q is not None else b])
            shift = keys - queries if call.variant.bottom_right else 0
            for i in range(queries):
                for j in range(keys):
                    seen[b, cu_q[n] + i, cu_k[n] + j] = (
                        (not call.is_causal or j <= i + shift)
                        and (left is None or j >= i + shift - left)
                        and (right is None or j <= i + shift + right)
                    )
    return seen
