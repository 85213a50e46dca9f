"""Call every public function of attention_kernels once; needs only torch, Triton and pytest.

To test a wheel installed by itself, copy this file away from the checkout and run it with pytest.
"""

from collections.abc import Callable

import pytest
import torch
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention as sdpa

import attention_kernels as ak

pytestmark = pytest.mark.skipif(
    not torch.cuda.is_available() or torch.cuda.get_device_capability() != (9, 0),
    reason="needs a Hopper GPU",
)
LENGTH, PAGE = 256, 16


def normal(*shape: int, seed: int) -> Tensor:
    """Return standard normal float16 values on the GPU."""
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(shape, generator=generator).to("cuda", torch.float16)


class Inputs:
    """Queries of 256 tokens and of one token, key and value of 256 tokens, and a cache in pages."""

    def __init__(self) -> None:
        self.key, self.value = (normal(2, 4, LENGTH, 64, seed=seed) for seed in (1, 2))
        self.query, self.token = normal(2, 4, LENGTH, 64, seed=3), normal(2, 4, 1, 64, seed=4)
        pages = (2 * LENGTH // PAGE, PAGE, 4, 64)
        self.key_pages, self.value_pages = (
            tensor.transpose(1, 2).reshape(pages) for tensor in (self.key, self.value)
        )
        order = torch.arange(2 * LENGTH // PAGE, dtype=torch.int32, device="cuda")
        self.block_table = order.view(2, -1)
        self.lengths = torch.full((2,), LENGTH, dtype=torch.int32, device="cuda")
        self.all_seen = torch.ones(LENGTH, LENGTH, dtype=torch.bool, device="cuda")
        self.packed = [t.transpose(1, 2).flatten(0, 1) for t in (self.query, self.key, self.value)]
        self.offsets = torch.tensor([0, LENGTH, 2 * LENGTH], dtype=torch.int32, device="cuda")


def of_packed(x: Inputs) -> Tensor:
    output = ak.packed_prefill(*x.packed, x.offsets, x.offsets, LENGTH)
    return output.unflatten(0, (2, LENGTH)).transpose(1, 2)


def in_BSHD(*tensors: Tensor) -> list[Tensor]:
    return [tensor.transpose(1, 2) for tensor in tensors]


def in_blocks(x: Inputs) -> Tensor:
    """Attend to all blocks, as a map and as a policy list them."""
    tensors = x.query, x.key, x.value
    everything = ak.BlockPolicy(keep=1.0)
    kept = ak.kept_blocks(x.query, x.key, everything, *ak.block_sizes(*tensors))
    listed, chosen = ak.visited_of(kept, *tensors), ak.choose_blocks(*tensors, everything)
    assert torch.equal(listed.counts, chosen.counts)
    return ak.block_sparse_attention(*tensors, chosen)


def of_flash_varlen(x: Inputs) -> Tensor:
    ends = (x.offsets, x.offsets, LENGTH, LENGTH)
    output = ak.flash_attn_varlen_func(*x.packed, *ends)
    return output.unflatten(0, (2, LENGTH)).transpose(1, 2)


def of_flash_cache(x: Inputs) -> Tensor:
    (token,) = in_BSHD(x.token)
    pages = x.key_pages, x.value_pages
    output = ak.flash_attn_with_kvcache(
        token, *pages, cache_seqlens=x.lengths, block_table=x.block_table
    )
    return output.transpose(1, 2)


def of_batch(x: Inputs) -> Tensor:
    starts = torch.arange(3, dtype=torch.int32, device="cuda")
    cache = x.key_pages, x.value_pages, x.block_table, x.lengths
    return ak.paged_batch(x.token[:, :, 0], *cache, starts, 1)[:, :, None]


def chosen(x: Inputs) -> Tensor:
    return ak.choose_tokens(x.token, x.key, 1.0)


def chosen_in_pages(x: Inputs) -> Tensor:
    return ak.choose_paged_tokens(x.token, x.key_pages, x.block_table, x.lengths, 1.0)


def paged(x: Inputs) -> tuple[Tensor, ...]:
    return x.token, x.key_pages, x.value_pages, x.block_table, x.lengths


PREFILL: dict[str, Callable[[Inputs], Tensor]] = {
    "attention": lambda x: ak.attention(x.query, x.key, x.value),
    "prefill": lambda x: ak.prefill(x.query, x.key, x.value),
    "hopper_prefill": lambda x: ak.hopper_prefill(x.query, x.key, x.value),
    "masked_prefill": lambda x: ak.masked_prefill(x.query, x.key, x.value, x.all_seen),
    "block_sparse_attention": in_blocks,
    "padded_prefill": lambda x: ak.padded_prefill(
        x.query, x.key, x.value, ak.KeyRanges(None, x.lengths)
    ),
    "packed_prefill": of_packed,
    "flash_attn_func": lambda x: ak.flash_attn_func(*in_BSHD(x.query, x.key, x.value)).transpose(
        1, 2
    ),
    "flash_attn_varlen_func": of_flash_varlen,
    "quantised_prefill": lambda x: ak.quantised_prefill(x.query, x.key, x.value),
    "attend_to_quantised": lambda x: ak.attend_to_quantised(
        x.query, ak.quantise_key_value(x.key, x.value)
    ),
}
DECODE: dict[str, Callable[[Inputs], Tensor]] = {
    "attention": lambda x: ak.attention(x.token, x.key, x.value),
    "contiguous_decode": lambda x: ak.contiguous_decode(x.token, x.key, x.value),
    "flash_attn_with_kvcache": of_flash_cache,
    "paged_batch": of_batch,
    "paged_decode": lambda x: ak.paged_decode(*paged(x)),
    "quantised_decode": lambda x: ak.quantised_decode(x.token, x.key, x.value, dtype=torch.int8),
    "attend_to_cache": lambda x: ak.attend_to_cache(
        x.token, ak.quantise_cache(x.key, x.value, torch.float8_e4m3fn)
    ),
    "sparse_decode": lambda x: ak.sparse_decode(x.token, x.key, x.value, chosen(x)),
    "paged_sparse_decode": lambda x: ak.paged_sparse_decode(*paged(x), chosen_in_pages(x)),
}
CALLED_INSIDE = {
    *("block_sizes", "choose_blocks", "choose_paged_tokens", "choose_tokens", "kept_blocks"),
    *("quantise_cache", "quantise_key_value", "visited_of"),
}
TYPES = {"AttentionOptions", "BlockPolicy", "KeyRanges", "PLAIN", "register", "warm_up"}


def error(output: Tensor, expected: Tensor) -> float:
    """Return the relative L1 error."""
    return float((output.double() - expected.double()).abs().sum() / expected.double().abs().sum())


@pytest.mark.parametrize("name", PREFILL)
def test_prefill_equals_sdpa(name: str) -> None:
    x = Inputs()
    output = PREFILL[name](x)
    assert error(output, sdpa(x.query, x.key, x.value)) < (0.08 if "quantised" in name else 2e-3)


@pytest.mark.parametrize("name", DECODE)
def test_decode_equals_sdpa(name: str) -> None:
    x = Inputs()
    quantised = name in ("quantised_decode", "attend_to_cache")
    output = DECODE[name](x)
    assert error(output, sdpa(x.token, x.key, x.value)) < (0.08 if quantised else 2e-3)


def test_options_change_what_is_seen() -> None:
    x = Inputs()
    options = ak.AttentionOptions(window=(31, 0))
    output = ak.hopper_prefill(x.query, x.key, x.value, is_causal=True, options=options)
    ahead = torch.arange(LENGTH, device="cuda")
    distance = ahead[:, None] - ahead[None]
    expected = sdpa(x.query, x.key, x.value, (distance >= 0) & (distance <= 31))
    assert error(output, expected) < 2e-3


def test_every_public_name_is_called() -> None:
    assert set(ak.__all__) == {*PREFILL, *DECODE, *CALLED_INSIDE, *TYPES}
