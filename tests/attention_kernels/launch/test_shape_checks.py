"""Tensors that do not fit together are refused, and vectors of any stride are read correctly."""

from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor

from attention_kernels.decode.contiguous_decode import contiguous_decode
from attention_kernels.decode.paged_batch import paged_batch
from attention_kernels.decode.paged_decode import paged_decode
from attention_kernels.decode.paging import page
from attention_kernels.decode.quantised_decode import quantised_decode
from attention_kernels.launch.launcher import Launch
from attention_kernels.operators import attention
from attention_kernels.portable.masked_prefill import masked_prefill, visited_blocks_of
from attention_kernels.portable.prefill import prefill
from attention_kernels.portable.varlen import KeyRanges, packed_prefill, padded_prefill
from attention_kernels.quantised.quantised_prefill import quantised_prefill
from attention_kernels.sparse.block_sparse import block_sizes
from attention_kernels.sparse.sparse_decode import sparse_decode
from attention_kernels.sparse.token_choice import choose_paged_tokens
from capture.call.attention_call import AttentionCall
from replay.kernels.registry import find
from tests.attention_kernels import calls
from tests.attention_kernels.calls import DEVICE, half, lengths

BATCH, HEADS, KV_HEADS, KEYS, DIM = 3, 4, 2, 40, 32


def call_of(q_len: int = 1, kv_len: int = KEYS, batch: int = BATCH) -> tuple[Tensor, ...]:
    call = calls.call_of(q_len, kv_len, DIM, batch=batch, q_heads=HEADS, kv_heads=KV_HEADS)
    return call.query, call.key, call.value


LENGTHS = lengths(5, 40, 33)


def apart(tensor: Tensor, other: int) -> Tensor:
    """Return a view of equal numbers, with `other` after each of them in memory."""
    return torch.stack([tensor, torch.full_like(tensor, other)], dim=-1)[..., 0]


def _decoded(lengths: Tensor) -> Tensor:
    return contiguous_decode(*call_of(), seqused_k=lengths)


def _decoded_in_8_bits(lengths: Tensor) -> Tensor:
    return quantised_decode(*call_of(), dtype=torch.int8, seqused_k=lengths)


def _padded(lengths: Tensor) -> Tensor:
    return padded_prefill(*call_of(7), KeyRanges(None, lengths))


def _begun_late(lengths: Tensor) -> Tensor:
    return padded_prefill(*call_of(7, 80), KeyRanges(lengths, LENGTHS))


@pytest.mark.parametrize("attend", [_decoded, _decoded_in_8_bits, _padded, _begun_late])
def test_lengths_may_lie_apart(attend: Callable[[Tensor], Tensor]) -> None:
    expected = attend(LENGTHS)
    assert torch.equal(attend(apart(LENGTHS, 1)), expected)
    assert torch.equal(attend(LENGTHS[1:2].expand(BATCH)), attend(LENGTHS[1:2].repeat(BATCH)))


@pytest.mark.parametrize("attend", [_decoded, _decoded_in_8_bits])
def test_long_lengths(attend: Callable[[Tensor], Tensor], monkeypatch: pytest.MonkeyPatch) -> None:
    """Triton does not compile descriptors with 64-bit positions."""
    launched, launch = [], Launch.__call__
    monkeypatch.setattr(
        Launch, "__call__", lambda self, *given: launched.extend(given) or launch(self, *given)
    )
    expected = attend(LENGTHS)
    assert torch.equal(attend(LENGTHS.long()), expected)
    assert not any(isinstance(each, Tensor) and each.dtype == torch.int64 for each in launched)


def test_offsets_may_lie_apart() -> None:
    query, key, value = (half(40, heads, DIM) for heads in (HEADS, 2, 2))
    offsets, used = lengths(0, 5, 20, 40), lengths(5, 3, 9)
    expected = packed_prefill(query, key, value, offsets, offsets, 20, seqused_k=used)
    for far in ((True, False, False), (False, True, False), (False, False, True)):
        q, k, n = (
            apart(each, 7) if is_far else each
            for each, is_far in zip((offsets, offsets, used), far, strict=True)
        )
        assert torch.equal(packed_prefill(query, key, value, q, k, 20, seqused_k=n), expected)


def test_a_table_of_pages_may_lie_in_any_way() -> None:
    query, key, value = call_of()
    cache = page(key, value, 16, lengths=LENGTHS)
    expected = paged_decode(query, *cache)
    chosen = choose_paged_tokens(query, cache.key_pages, cache.block_table, LENGTHS, 0.5)
    for table in (apart(cache.block_table, 0), cache.block_table.mT.contiguous().mT):
        moved = cache._replace(block_table=table, lengths=apart(LENGTHS, 1))
        assert torch.equal(paged_decode(query, *moved), expected)
        found = choose_paged_tokens(query, moved.key_pages, table, moved.lengths, 0.5)
        assert torch.equal(found, chosen)


QUERY, KEY, VALUE = call_of()
MISFITS: dict[str, tuple[Tensor, Tensor, Tensor]] = {
    "one batch element of keys": (QUERY, KEY[:1], VALUE[:1]),
    "fewer values than keys": (QUERY, KEY, VALUE[:, :, :9]),
    "a smaller query": (QUERY[..., :16], KEY, VALUE),
    "heads that no group shares": (QUERY[:, :3], KEY, VALUE),
    "no batch": (QUERY[0], KEY[0], VALUE[0]),
    "a query without a batch": (QUERY[0], KEY, VALUE),
}
MASK = torch.ones(1, KEYS, dtype=torch.bool, device=DEVICE)


def _chosen(query: Tensor, key: Tensor, value: Tensor) -> Tensor:
    indices = torch.zeros(BATCH, KV_HEADS, 3, dtype=torch.int32, device=DEVICE)
    return sparse_decode(query, key, value, indices)


def _in_8_bits(query: Tensor, key: Tensor, value: Tensor) -> Tensor:
    return quantised_decode(query, key, value, dtype=torch.int8)


FUNCTIONS: dict[str, Callable[..., Any]] = {
    "attention": partial(attention, enable_gqa=True),
    "contiguous_decode": contiguous_decode,
    "quantised_decode": _in_8_bits,
    "prefill": prefill,
    "masked_prefill": partial(masked_prefill, attn_mask=MASK),
    "padded_prefill": partial(padded_prefill, keys=KeyRanges(None, LENGTHS)),
    "quantised_prefill": quantised_prefill,
    "sparse_decode": _chosen,
    "block_sizes": block_sizes,
}


@pytest.mark.parametrize("misfit", MISFITS)
@pytest.mark.parametrize("attend", FUNCTIONS)
def test_refuses_tensors_that_do_not_fit(attend: str, misfit: str) -> None:
    match = r"do not fit together|are not a multiple of|of 4 dimensions"
    with pytest.raises(ValueError, match=match):
        FUNCTIONS[attend](*MISFITS[misfit])


def test_refuses_packed_tensors_with_a_batch() -> None:
    cache = page(KEY, VALUE, 16)
    with pytest.raises(ValueError, match=r"a query of 3 dimensions .* got 4, 4, 4"):
        paged_batch(QUERY, *cache, LENGTHS, 3)
    with pytest.raises(ValueError, match=r"of 3 dimensions \(tokens, .*\), got 4, 4, 4"):
        packed_prefill(QUERY, KEY, VALUE, LENGTHS, LENGTHS, 3)


@pytest.mark.parametrize("attend", [contiguous_decode, prefill, quantised_prefill])
def test_refuses_other_types_of_options(attend: Callable[..., Tensor]) -> None:
    with pytest.raises(TypeError, match=r"options must be AttentionOptions\(...\)"):
        attend(QUERY, KEY, VALUE, options=None)
    with pytest.raises(TypeError, match="options must be"):
        paged_batch(QUERY[:, :, 0], *page(KEY, VALUE, 16), LENGTHS, 3, options=None)


@pytest.mark.parametrize("attend", [contiguous_decode, prefill, quantised_prefill])
def test_refuses_too_few_sinks(attend: Callable[..., Tensor]) -> None:
    with pytest.raises(ValueError, match=r"sinks \(2,\): needs one for each of 4 query heads"):
        attend(QUERY, KEY, VALUE, sinks=torch.zeros(2, device=DEVICE))


def test_refuses_too_few_lengths() -> None:
    short = LENGTHS[:2]
    for attend in (_decoded, _decoded_in_8_bits, _padded, _begun_late):
        with pytest.raises(ValueError, match=r"sequences|needs 3 numbers"):
            attend(short)
    tokens = half(6, 2, DIM)
    with pytest.raises(ValueError, match=r"k_offsets of shape \(2,\): needs 3 numbers"):
        packed_prefill(tokens, tokens, tokens, LENGTHS, short, 3)
    with pytest.raises(ValueError, match="indices of shape"):
        sparse_decode(QUERY, KEY, VALUE, torch.zeros(1, KV_HEADS, 3, device=DEVICE).int())
    cache = page(KEY, VALUE, 16)
    with pytest.raises(ValueError, match="pages of keys"):
        paged_decode(QUERY, cache.key_pages, cache.value_pages[1:], *cache[2:])
    with pytest.raises(ValueError, match="pages of keys"):
        paged_decode(QUERY, cache.key_pages[0], cache.value_pages[0], *cache[2:])


def test_refuses_what_other_masks_leave() -> None:
    query, key, value = call_of(8)
    mask = torch.ones(BATCH, HEADS, 8, KEYS, dtype=torch.bool, device=DEVICE)
    visited = visited_blocks_of(query[:2], value[:2], mask[:2])
    with pytest.raises(ValueError, match="other batch elements or heads"):
        masked_prefill(query, key, value, mask, visited=visited)


KERNELS = (
    *("triton-fa2", "triton-masked", "triton-varlen", "triton-sage", "triton-fp8"),
    *("triton-decode", "triton-decode-int8", "triton-paged-decode", "triton-paged-decode-fp8"),
    *("triton-sparse-decode", "triton-paged-sparse-decode", "triton-block-sparse"),
)


@pytest.mark.parametrize("name", KERNELS)
@pytest.mark.parametrize("empty", ["batch", "queries", "keys"])
def test_nothing_gives_zeros(name: str, empty: str) -> None:
    query, key, value = call_of(
        0 if empty == "queries" else 1, 0 if empty == "keys" else 5, 0 if empty == "batch" else 2
    )
    batch, q_len, kv_len = query.shape[0], query.shape[2], key.shape[2]
    call = AttentionCall(query, key, value, enable_gqa=True)
    if name == "triton-masked":
        mask = torch.ones(q_len, kv_len, dtype=torch.bool, device=DEVICE)
        call = call.with_tensors({"attn_mask": mask})
    if name == "triton-varlen":
        call = call.with_tensors({"seqused_k": lengths(*[0] * batch)})
    kernel = find(name)
    assert kernel.refuses(call) is None
    outputs = [kernel.attention(**call.arguments())]
    if kernel.prepare is not None:
        outputs.append(kernel.prepare(call)())
    for output in outputs:
        assert output.shape == (batch, HEADS, q_len, DIM)
        assert not output.any()
