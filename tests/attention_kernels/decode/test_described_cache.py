"""16-bit keys are loaded in whole blocks, and keys beyond a sequence's length are not read."""

import math

import pytest
import torch
from torch import Tensor

from attention_kernels.decode import kv_cache, split_kv
from attention_kernels.decode.kv_cache import Cache
from attention_kernels.decode.split_kv_assignment import KeyAssignment
from attention_kernels.decode.split_kv_plan import Tiling
from attention_kernels.launch import descriptors
from attention_kernels.options import PLAIN, AttentionOptions
from tests.attention_kernels import eager
from tests.attention_kernels.calls import DEVICE, assert_near, half
from tests.attention_kernels.calls import lengths as int32

LENGTHS = [150, 0, 1, 64, 65, 128, 31]
EVEN = Tiling(32, 4, 3, splits=2)
DEALT = Tiling(32, 4, 3, 1, KeyAssignment(shares=9, resident=9, least=1, worth=1e9))
BOTTOM_RIGHT = AttentionOptions(bottom_right=True)


@pytest.fixture(autouse=True)
def small_caches_are_described(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(kv_cache, "WORTH_DESCRIBING", 0)
    monkeypatch.setattr(descriptors, "has_tma", lambda device: True)


def in_pages(key: Tensor, value: Tensor, lengths: Tensor, page_size: int, after: int) -> Cache:
    """Return a cache with each sequence's tokens, and NaN elsewhere. In the table, the page number
    `after` follows a sequence's last page."""
    batch, heads, kv_len, _ = key.shape
    pages_each = -(-kv_len // page_size)
    order = torch.randperm(batch * pages_each, generator=torch.Generator().manual_seed(0))
    # Page 0 belongs to no sequence.
    table = torch.full((batch, pages_each + 2), after, dtype=torch.int32, device=DEVICE)

    def pool(tensor: Tensor) -> Tensor:
        pages = tensor.new_full(
            (1 + batch * pages_each, page_size, heads, tensor.shape[3]), math.nan
        )
        for n, length in enumerate(lengths.tolist()):
            for first in range(0, length, page_size):
                page = 1 + int(order[n * pages_each + first // page_size])
                table[n, first // page_size] = page
                tokens = tensor[n, :, first : min(first + page_size, length)]
                pages[page, : tokens.shape[1]] = tokens.transpose(0, 1)
        return pages

    key_pages = pool(key)
    is_latent = value.data_ptr() == key.data_ptr()
    value_pages = key_pages[..., : value.shape[3]] if is_latent else pool(value)
    return Cache(key_pages, value_pages, table, lengths)


def in_one_piece(key: Tensor, value: Tensor, lengths: Tensor) -> Cache:
    """Return a cache with NaN after each sequence's last token."""
    for n, length in enumerate(lengths.tolist()):
        key[n, :, length:] = math.nan
        value[n, :, length:] = math.nan
    return Cache(key, value, lengths=lengths)


def assert_right(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    cache: Cache,
    tiles: Tiling | None,
    is_causal: bool = False,
    options: AttentionOptions = PLAIN,
) -> None:
    """Check a call over `cache`, which was made from `key` and `value` (B, Hkv, S, D)."""
    rows = query.shape[1] // key.shape[1] * query.shape[2]
    assert cache.access(is_causal, rows=rows) == "described"
    output = split_kv.attend_to_cache(
        query, cache, is_causal=is_causal, options=options, tiles=tiles
    )
    q_len = query.shape[2]
    for n, length in enumerate(cache.lengths.tolist()):
        own = slice(n, n + 1)
        if length == 0:
            assert not output[n].any()
            continue
        places = torch.arange(length, device=DEVICE)
        last = torch.arange(q_len, device=DEVICE) + (length - q_len if options.bottom_right else 0)
        mask = places <= last[:, None] if is_causal else None
        expected = eager.attend(query[own], key[own, :, :length], value[own, :, :length], mask)
        assert_near(output[own], expected.output)


def tensors(
    latent: bool, q_len: int = 1, as_in_models: bool = False
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    batch = len(LENGTHS)
    lengths = int32(*LENGTHS)
    if latent:
        v_dim, tail = (512, 64) if as_in_models else (32, 8)
        key = half(batch, 1, 150, v_dim + tail, seed=1)
        return half(batch, 4, q_len, v_dim + tail), key, key[..., :v_dim], lengths
    dim, v_dim = (128, 128) if as_in_models else (16, 32)
    key, value = half(batch, 2, 150, dim, seed=1), half(batch, 2, 150, v_dim, seed=2)
    return half(batch, 4, q_len, dim), key, value, lengths


@pytest.mark.parametrize("latent", [False, True], ids=["key and value", "latent"])
@pytest.mark.parametrize("tiles", [EVEN, DEALT, None], ids=["even", "assigned", "planned"])
@pytest.mark.parametrize(("page_size", "after"), [(64, 0), (128, -1)])
def test_pages(latent: bool, tiles: Tiling | None, page_size: int, after: int) -> None:
    query, key, value, lengths = tensors(latent)
    assert_right(query, key, value, in_pages(key, value, lengths, page_size, after), tiles)


@pytest.mark.parametrize("latent", [False, True], ids=["key and value", "latent"])
def test_head_dims_of_models(latent: bool) -> None:
    query, key, value, lengths = tensors(latent, as_in_models=True)
    assert_right(query, key, value, in_pages(key, value, lengths, 64, -1), None)


@pytest.mark.parametrize("latent", [False, True], ids=["key and value", "latent"])
@pytest.mark.parametrize("options", [PLAIN, BOTTOM_RIGHT], ids=["top left", "bottom right"])
def test_queries_that_do_not_see_all(latent: bool, options: AttentionOptions) -> None:
    """NaN begins directly after the last visible token."""
    query, key, value, _ = tensors(latent, q_len=3)
    lengths = int32(150, 0, 3, 64, 65, 128, 31)
    cache = in_pages(key, value, lengths, 64, 0)
    assert_right(query, key, value, cache, EVEN, is_causal=True, options=options)


@pytest.mark.parametrize("tiles", [EVEN, DEALT], ids=["even", "assigned"])
def test_latents_in_one_piece(tiles: Tiling) -> None:
    query, key, value, lengths = tensors(latent=True)
    whole = key.clone()
    assert_right(query, whole, whole[..., :32], in_one_piece(key, value, lengths), tiles)


@pytest.mark.parametrize("options", [PLAIN, BOTTOM_RIGHT], ids=["top left", "bottom right"])
def test_many_queries_of_keys_in_one_piece(options: AttentionOptions) -> None:
    query, key, value, _ = tensors(latent=False, q_len=10)
    lengths = int32(150, 0, 10, 64, 65, 128, 31)
    cache = in_one_piece(key.clone(), value.clone(), lengths)
    assert_right(query, key, value, cache, EVEN, is_causal=True, options=options)


def test_what_is_not_loaded_in_blocks(monkeypatch: pytest.MonkeyPatch) -> None:
    _, key, value, lengths = tensors(latent=False)
    cache = in_pages(key, value, lengths, 64, 0)
    assert cache.access(is_cut=True, begins_late=True) == "indirect", "NaN before the window"
    assert in_pages(key, value, lengths, 96, 0).access(False) == "indirect", "blocks in two pages"
    monkeypatch.setattr(kv_cache, "WORTH_DESCRIBING", 2**60)
    assert cache.access(is_cut=False) == "indirect", "too small"


def test_a_block_larger_than_a_page_is_looked_up_by_token() -> None:
    query, key, value, lengths = tensors(latent=False)
    cache = in_pages(key, value, lengths, 64, 0)
    assert_right(query, key, value, cache, Tiling(128, 4, 3, 1))
