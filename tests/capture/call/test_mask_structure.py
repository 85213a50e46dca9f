"""Structures are found in dense masks of every form, but not in slightly different masks."""

from dataclasses import replace
from typing import Any

import pytest
import torch
from hypothesis import assume, given, settings
from hypothesis import strategies as st
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from capture.call.attention_call import AttentionCall
from capture.call.attention_variant import PLAIN, AttentionVariant
from capture.call.mask_structure import BLOCK_ELEMENTS, MaskStructure, structure_of
from replay.accuracy.reference import attention
from tests.factories import normal, random_call
from tests.variant_calls import visible

ALL = torch.ones(8, 8, dtype=torch.bool)
PADDED = torch.arange(8) < torch.tensor([5, 8])[:, None, None, None]
"""Padding mask, a bool tensor of shape (2, 1, 1, 8)."""
BLOCKS = torch.block_diag(*(torch.ones(length, length) for length in (3, 1, 4))).bool()

WORDS: dict[str, tuple[Tensor, str]] = {
    "nothing": (ALL, "no mask"),
    "nothing, one element": (torch.ones(1, 1, dtype=torch.bool), "no mask"),
    "causal": (ALL.tril(), "causal"),
    "fewer keys than queries": (ALL[:, :5].tril(), "causal"),
    "after a cache": (ALL[:3].tril(5), "bottom-right causal"),
    "in a static cache": (ALL[:3].tril(2), "bottom-right causal, padding"),
    "window": (ALL.tril().triu(-3), "window 3/0"),
    "window both ways": (ALL.tril(2).triu(-2), "window 2/2"),
    "uneven window": (ALL.tril(1).triu(-4), "window 4/1"),
    "only what follows": (ALL.triu(), "window 0/∞"),
    "window after a cache": (ALL[:3].tril(5).triu(3), "bottom-right window 2/0"),
    "one query with a window": (ALL[7:].triu(3), "bottom-right window 4/0"),
    "one query in a static cache": (ALL[:1].tril(4), "padding"),
    "padding": (PADDED, "padding"),
    "padding, causal": (PADDED & ALL.tril(), "causal, padding"),
    "padding, window both ways": (PADDED & ALL.tril(2).triu(-2), "window 2/2, padding"),
    "left padding": (PADDED.flip(-1), "left padding"),
    "left padding, causal": (PADDED.flip(-1) & ALL.tril(), "causal, left padding"),
    "packed": (BLOCKS, "3 packed sequences"),
    "packed, causal": (BLOCKS.tril(), "3 packed sequences, causal"),
    "packed, window": (BLOCKS.tril().triu(-1), "3 packed sequences, window 1/0"),
    "packed, one hidden": (BLOCKS & (torch.arange(8) < 4)[:, None], "3 packed sequences, padding"),
}


def masked(mask: Tensor, **fields: Any) -> AttentionCall:
    """Return a call with a mask of 2 to 4 dimensions."""
    mask = mask[(None,) * (4 - mask.ndim)]
    sizes = {"batch": mask.shape[0], "q_len": max(mask.shape[2], 8 * (mask.shape[0] > 1))}
    return random_call(**{**sizes, "kv_len": mask.shape[3], "attn_mask": mask, **fields})


def as_numbers(mask: Tensor, hidden: float, dtype: torch.dtype = torch.float32) -> Tensor:
    return torch.zeros(mask.shape, dtype=dtype).masked_fill_(~mask, hidden)


FORMS = {
    "bool": lambda mask: mask,
    "-inf": lambda mask: as_numbers(mask, -torch.inf),
    "-inf in bfloat16": lambda mask: as_numbers(mask, -torch.inf, torch.bfloat16),
    "lowest": lambda mask: as_numbers(mask, torch.finfo(torch.float32).min),
    "lowest in float16": lambda mask: as_numbers(
        mask, torch.finfo(torch.float16).min, torch.float16
    ),
}


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("name", WORDS)
def test_words(name: str, form: str) -> None:
    mask, words = WORDS[name]
    has_empty_rows = bool((~mask.any(dim=-1)).any())
    found = structure_of(masked(FORMS[form](mask)))
    if has_empty_rows and form.startswith("lowest"):
        assert found is None  # a row without visible keys gives the mean of all values
    else:
        assert str(found) == words


@pytest.mark.parametrize("name", WORDS)
def test_heads_and_batches_may_share_a_mask_or_have_their_own(name: str) -> None:
    mask, words = WORDS[name]
    mask = mask[(None,) * (4 - mask.ndim)]
    wide = mask.expand(-1, 2, max(mask.shape[2], 8 * (mask.shape[0] > 1)), -1)
    for given_mask in (wide, wide.contiguous(), mask.transpose(2, 3).contiguous().transpose(2, 3)):
        assert str(structure_of(masked(given_mask))) == words


@pytest.mark.parametrize("name", [name for name in WORDS if "left padding" not in name])
def test_restated_call_has_the_same_output_and_tensors(name: str) -> None:
    call = masked(WORDS[name][0], sinks=normal(2), variant=AttentionVariant(softcap=1.5))
    structure = structure_of(call)
    restated = structure.restated(call)
    assert restated.attn_mask is None
    assert restated.query is call.query
    assert restated.variant.softcap == 1.5
    torch.testing.assert_close(attention(restated), attention(call), rtol=1e-12, atol=1e-12)


def test_structure_without_an_option_is_not_restated() -> None:
    left = masked(PADDED.flip(-1))
    batch = masked(BLOCKS.expand(2, 1, 8, 8))
    for call in (left, batch):
        structure = structure_of(call)
        assert structure.restated(call) is None


def test_call_s_own_causality_counts() -> None:
    assert str(structure_of(masked(PADDED, is_causal=True))) == "causal, padding"
    within = masked(PADDED, variant=AttentionVariant(window=(2, 1)))
    assert str(structure_of(within)) == "window 2/1, padding"
    # With is_causal, the lowest value masks every key that the first query could see.
    lowest = as_numbers(ALL.triu(1), torch.finfo(torch.float32).min)
    assert structure_of(masked(lowest, is_causal=True)) is None


@pytest.mark.parametrize(
    "mask",
    [
        normal(8, 8),
        as_numbers(ALL.tril(), -1e9),
        as_numbers(ALL.tril(), torch.inf),
        as_numbers(ALL.tril(), torch.nan),
        as_numbers(ALL.tril(), torch.finfo(torch.bfloat16).min),
        torch.zeros(8, 8).to(torch.float8_e5m2),
        ALL ^ torch.eye(8).bool(),
        torch.stack([ALL.tril(), ALL.tril().triu(-2)])[None],
        ALL.tril().flip(0),
    ],
    ids=[
        "bias",
        "another number",
        "infinity",
        "NaN",
        "another dtype's lowest",
        "8 bits",
        "a hole in each row",
        "heads that differ",
        "rows in reverse",
    ],
)
def test_masks_without_a_structure_have_none(mask: Tensor) -> None:
    assert structure_of(masked(mask)) is None


def test_lengths_and_a_mask_are_left_alone() -> None:
    assert structure_of(random_call()) is None
    assert structure_of(masked(ALL, seqused_k=torch.tensor([3]))) is None
    assert structure_of(masked(ALL[:, :0])) is None


@st.composite
def calls(draw: st.DrawFn) -> AttentionCall:
    """Draw calls without a mask, in which each query sees a contiguous range of keys."""
    batch, q_len, kv_len = (draw(st.integers(low, high)) for low, high in ((1, 2), (1, 7), (2, 7)))
    side = st.none() | st.integers(0, 4)
    fields: dict[str, Any] = {
        "is_causal": draw(st.booleans()),
        "variant": AttentionVariant(draw(st.booleans()), (draw(side), draw(side))),
    }
    sequences = batch
    if batch == 1 and draw(st.booleans()):
        sequences = draw(st.integers(1, 3))
        lengths = [draw(st.lists(st.integers(1, 4), min_size=sequences, max_size=sequences))]
        lengths.append(draw(st.sampled_from([lengths[0], draw(st.permutations(lengths[0]))])))
        q_len = kv_len = sum(lengths[0])
        for name, each in zip(("cu_seqlens_q", "cu_seqlens_k"), lengths, strict=True):
            fields[name] = torch.tensor([0, *each]).cumsum(0).int()
    elif draw(st.booleans()):
        used = draw(st.lists(st.integers(0, kv_len), min_size=batch, max_size=batch))
        assume(1 not in used)  # a single key does not reveal a window's length
        fields["seqused_k"] = torch.tensor(used).int()
    return random_call(batch=batch, q_len=q_len, kv_len=kv_len, head_dim=4, **fields)


def with_mask(call: AttentionCall, mask: Tensor) -> AttentionCall:
    """Return the call with this mask, and without options that state a structure."""
    return replace(
        call,
        attn_mask=mask,
        is_causal=False,
        variant=PLAIN,
        cu_seqlens_q=None,
        cu_seqlens_k=None,
        seqused_k=None,
    )


def seen_by(structure: MaskStructure, call: AttentionCall) -> Tensor:
    """Return the visible pairs (B, Sq, Sk) as bool, computed from the definitions."""
    unpadded = replace(structure, starts_k=None).restated(call)
    seen = visible(unpadded)
    if structure.starts_k is None:
        return seen
    return seen & (torch.arange(call.shape.kv_len) >= structure.starts_k[:, None, None])


@settings(max_examples=100, deadline=None)
@given(calls())
def test_options_are_found_in_their_mask(asked: AttentionCall) -> None:
    mask = visible(asked)[:, None]
    call = with_mask(asked, mask)
    structure = structure_of(call)
    assert structure is not None, f"{mask.int().tolist()} {asked.features} {asked.variant}"
    assert torch.equal(seen_by(structure, call), mask[:, 0])
    restated = structure.restated(call)
    if restated is not None:
        torch.testing.assert_close(attention(restated), attention(call), rtol=1e-12, atol=1e-12)


@settings(max_examples=100, deadline=None)
@given(calls(), st.data())
def test_one_element_off_is_another_mask(asked: AttentionCall, data: st.DataObject) -> None:
    mask = visible(asked)[:, None].clone()
    place = tuple(data.draw(st.integers(0, size - 1)) for size in mask.shape)
    mask[place] ^= True
    call = with_mask(asked, mask)
    structure = structure_of(call)
    if structure is None:
        return  # no structure is claimed
    if structure.cu_seqlens_q is None or call.shape.batch == 1:
        assert torch.equal(seen_by(structure, call), mask[:, 0])


class Work(TorchDispatchMode):
    """Counts the elements of all tensors that operators return."""

    def __init__(self) -> None:
        super().__init__()
        self.elements = self.largest = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        given = {each.untyped_storage().data_ptr() for each in args if isinstance(each, Tensor)}
        for each in result if isinstance(result, tuple | list) else [result]:
            if isinstance(each, Tensor) and each.untyped_storage().data_ptr() not in given:
                self.elements += each.numel()
                self.largest = max(self.largest, each.numel())
        return result


def work_on(call: AttentionCall) -> Work:
    with Work() as work:
        structure_of(call)
    return work


def test_mask_is_read_once_and_in_blocks() -> None:
    mask = torch.ones(4096, 2048, dtype=torch.bool).tril()
    work = work_on(masked(mask, q_heads=1, head_dim=1))
    assert work.largest <= BLOCK_ELEMENTS
    assert work.elements < 1.5 * mask.numel()


def test_expanded_dimensions_cost_nothing() -> None:
    mask = torch.ones(512, 512, dtype=torch.bool).tril()
    once = work_on(masked(mask, head_dim=1)).elements
    expanded = masked(mask.expand(8, 16, 512, 512), q_heads=16, head_dim=1)
    assert work_on(expanded).elements == once


def test_bias_is_given_up_early() -> None:
    bias = normal(4096, 2048)
    assert work_on(masked(bias, q_heads=1, head_dim=1)).elements < bias.numel()
