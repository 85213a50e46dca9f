"""FP8 pages become bfloat16 as far as the copies fit; the other sequences remain."""

import math
from typing import Any, NamedTuple

import pytest
import torch
from torch import Tensor

from attention_kernels.decode import paged_batch as batches
from attention_kernels.decode.paging import PagedCache, page
from attention_kernels.hopper import paged_prefill_hopper
from attention_kernels.hopper.converted_pages import TOKENS, convert_pages
from attention_kernels.options import AttentionOptions
from attention_kernels.portable.paged_prefill import paged_prefill
from tests.attention_kernels.calls import DEVICE, assert_near, lengths, normal, offsets
from tests.attention_kernels.eager import attend

Q_LENS, K_LENS, DECODED = (130, 3, 127, 150, 140), (300, 40, 200, 140, 260), 4
"""With two query heads per key head, 128 queries are the fewest whose keys are copied."""
OPTIONS = AttentionOptions(bottom_right=True)


class Given(NamedTuple):
    query: Tensor
    cache: PagedCache
    units: tuple[Tensor, Tensor]
    """(B, Hkv) scales of keys and values."""
    key: Tensor
    """(B, Hkv, S, D) in float32, with scales."""
    value: Tensor


@pytest.fixture(scope="module", params=[16, 48])
def given(request: pytest.FixtureRequest) -> Given:
    """Return a batch over FP8 pages whose slots without a token hold NaN."""
    shape, batch = (len(Q_LENS), 2, max(K_LENS)), len(Q_LENS)
    key, value = normal(*shape, 64, seed=1), normal(*shape, 32, seed=2)
    # The interpreter does not round to bfloat16 as a GPU does: no product needs rounding.
    units = 2.0 ** (torch.arange(2 * batch * 2, device=DEVICE).view(2, batch, 2) % 3 - 1)
    key, value = ((each / 2).to(torch.float8_e4m3fn).float() for each in (key, value))
    is_token = torch.arange(shape[2], device=DEVICE) < lengths(*K_LENS)[:, None]
    hidden = ~is_token[:, None, :, None]
    pages = page(
        key.masked_fill(hidden, math.nan), value.masked_fill(hidden, math.nan), request.param,
        lengths=lengths(*K_LENS),
    )  # fmt: skip
    cache = pages._replace(
        key_pages=pages.key_pages.to(torch.float8_e4m3fn),
        value_pages=pages.value_pages.to(torch.float8_e4m3fn),
    )
    query = normal(sum(Q_LENS), 4, 64, dtype=torch.bfloat16)
    key, value = (
        each * unit[:, :, None, None] for each, unit in zip((key, value), units, strict=True)
    )
    return Given(query, cache, (units[0], units[1]), key, value)


@pytest.mark.parametrize(("room", "copied"), [(None, (0, 3, 4)), (5, (0, 3)), (4, (0,))])
def test_sequences_are_copied_in_order_while_they_fit(
    given: Given, room: int | None, copied: tuple[int, ...]
) -> None:
    """The three long sequences fill three, two and three pages."""
    page_bytes = TOKENS * 2 * (64 + 32) * 2
    most = {} if room is None else {"most_bytes": room * page_bytes}
    copies = convert_pages(
        given.query, *given.cache, offsets(*Q_LENS), *given.units, DECODED, **most
    )
    own = [n in copied for n in range(len(Q_LENS))]
    assert copies.lengths.tolist() == [n if c else -1 for n, c in zip(K_LENS, own, strict=True)]
    assert copies.other_lengths.tolist() == [
        -1 if c else n for n, c in zip(K_LENS, own, strict=True)
    ]
    for sequence in copied:
        length = K_LENS[sequence]
        pages = copies.table[sequence, : -(-length // TOKENS)].long()
        for found, tokens in ((copies.key, given.key), (copies.value, given.value)):
            rows = found[pages].flatten(0, 1).transpose(0, 1)
            assert torch.equal(rows[:, :length], tokens[sequence, :, :length].bfloat16())
            assert not rows[:, length:].any()


def test_a_batch_is_shared_by_three_kernels(given: Given, monkeypatch: pytest.MonkeyPatch) -> None:
    """With the portable kernel in place of the Hopper kernel, every row is written once."""
    written: list[list[bool]] = []

    def attend_to_pages(*arguments: Any, **options: Any) -> None:
        pages, longest, results = arguments[:6], arguments[6], arguments[7:]
        assert (longest, pages[1].dtype) == (max(Q_LENS), torch.bfloat16)
        output: Tensor = results[0]
        output.fill_(math.nan)
        options |= {"key_scale": None, "value_scale": None}
        paged_prefill(*pages, *results, **options)
        written.append(output.isfinite().all(2).any(1).tolist())

    monkeypatch.setattr(paged_prefill_hopper, "attend_to_pages", attend_to_pages)
    monkeypatch.setattr(batches, "is_read_on_hopper", lambda *_: True)
    monkeypatch.setattr(batches, "MOST_DECODED_QUERIES", 0)
    monkeypatch.setattr(batches, "DECODED_ROWS", 0)
    output = batches.paged_batch(
        given.query, *given.cache, offsets(*Q_LENS), max(Q_LENS), True,
        key_scale=given.units[0], value_scale=given.units[1], options=OPTIONS,
    )  # fmt: skip
    copied = (0, 3, 4)
    assert written == [[n in copied for n, q_len in enumerate(Q_LENS) for _ in range(q_len)]]
    for element, (q_len, k_len) in enumerate(zip(Q_LENS, K_LENS, strict=True)):
        own = slice(sum(Q_LENS[:element]), sum(Q_LENS[: element + 1]))
        seen = torch.ones(q_len, k_len, dtype=torch.bool, device=DEVICE).tril(k_len - q_len)
        tokens = given.key[element, :, :k_len], given.value[element, :, :k_len]
        key, value = (each[None].bfloat16() for each in tokens)
        expected = attend(given.query[own].transpose(0, 1)[None], key, value, seen[None, None])
        assert_near(output[own].transpose(0, 1), expected.output[0])
