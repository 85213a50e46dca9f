"""Options beyond SDPA are read back unchanged, or the file is refused."""

import math
import re
from dataclasses import replace
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest
import torch

from capture.call.attention_call import AttentionCall
from capture.call.attention_variant import AttentionVariant
from capture.errors import DatasetError
from capture.storage.call_file import FileEntry, PackedCall
from capture.storage.header import CallHeader
from tests.factories import normal, random_call
from tests.variant_calls import CALLS, paged_call


@pytest.mark.parametrize("call", CALLS.values(), ids=list(CALLS))
def test_call_comes_back(call: AttentionCall, tmp_path: Path) -> None:
    PackedCall.of(call).write(tmp_path / "call.safetensors")
    found = FileEntry.read(tmp_path / "call.safetensors").load()
    assert found.variant == call.variant
    assert found.features == call.features
    assert found.tensors().keys() == call.tensors().keys()
    for name, tensor in call.tensors().items():
        assert torch.equal(found.tensors()[name].view(tensor.shape), tensor), name


def nonsense(**options: Any) -> AttentionVariant:
    """Return an invalid variant, which can come only from a file."""
    made = AttentionVariant()
    vars(made).update(options)
    return made


@pytest.mark.parametrize("softcap", [0, 0.0, -30.0, math.nan, math.inf])
def test_soft_cap_is_positive_or_none(softcap: float) -> None:
    """FlashAttention's soft cap 0 means "no cap"; as a real cap, it would be divided by."""
    with pytest.raises(ValueError, match=r"^soft cap \S+: must be .* None for no cap, which in Fl"):
        AttentionVariant(softcap=softcap)


@pytest.mark.parametrize(
    "fields",
    [
        {"sinks": normal(3)},
        {"cu_seqlens_q": torch.tensor([0, 9])},
        {"cu_seqlens_q": torch.tensor([0, 9]), "cu_seqlens_k": torch.tensor([0, 4, 13])},
        {"cu_seqlens_q": torch.tensor([0, 8]), "cu_seqlens_k": torch.tensor([0, 13])},
        {"cu_seqlens_q": torch.tensor([0, 9, 5, 9]), "cu_seqlens_k": torch.tensor([0, 1, 2, 13])},
        {"seqused_k": torch.tensor([14])},
        {"seqused_k": torch.tensor([-1])},
        {"seqused_k": torch.tensor([1, 1])},
        {"seqused_k": normal(1)},
        {"key_scale": torch.ones(2)},
        {"key": normal(1, 2, 13, 32).to(torch.float8_e4m3fn), "key_scale": torch.ones(3)},
        {"variant": nonsense(softcap=0.0)},
        {"variant": nonsense(softcap=-1.0)},
        {"variant": nonsense(softcap="1")},
        {"variant": AttentionVariant(window=(-1, None))},
    ],
    ids=str,
)
def test_nonsense_is_refused(fields: dict[str, Any], tmp_path: Path) -> None:
    with pytest.raises(DatasetError):
        FileEntry.read(write(replace(random_call(), **fields), tmp_path)).load()


@pytest.mark.parametrize("stated", [None, 0, 5, 6, 9])
def test_longest_sequence_is_not_longer_than_stated(stated: int | None, tmp_path: Path) -> None:
    """For sequences of 3 and 6 queries, a maximum of 5 would leave the last output unwritten."""
    starts = {"cu_seqlens_q": torch.tensor([0, 3, 9]), "cu_seqlens_k": torch.tensor([0, 4, 13])}
    path = write(random_call(**starts, variant=AttentionVariant(max_seqlen_q=stated)), tmp_path)
    if stated is None or stated >= 6:
        assert FileEntry.read(path).load().variant.max_seqlen_q == stated
        return
    reason = f"max_seqlen_q is {stated}, but the longest sequence has 6 queries"
    with pytest.raises(DatasetError, match=reason):
        FileEntry.read(path).load()


def write(call: AttentionCall, directory: Path) -> Path:
    """Write a call to a file without the writer's check of its values."""
    path = directory / "call.safetensors"
    with patch("capture.storage.call_file.value_fault", return_value=""):
        PackedCall.of(call).write(path)
    return path


PAGED = paged_call([9, 6], 4)
assert PAGED.page_table is not None
POOL, ROOM = PAGED.key.shape[0], PAGED.page_table.shape[1]
PACKED = torch.tensor([0, 2, 3])


@pytest.mark.parametrize(
    ("fields", "reason"),
    [
        ({"page_table": PAGED.page_table + POOL}, f"a page outside the pool of {POOL}"),
        ({"page_table": PAGED.page_table - POOL}, f"a page outside the pool of {POOL}"),
        ({"page_table": PAGED.page_table.float()}, "page_table of dtype 'float32'"),
        ({"page_table": PAGED.page_table[:1]}, "a page table of 1 rows for 2 sequences"),
        ({"page_table": PAGED.page_table[:, :0]}, f"{POOL} pages of 4 keys, 0 for each sequence"),
        ({"key": PAGED.key[:, :, :0], "value": PAGED.value[:, :, :0]}, "pages of 0 keys"),
        ({"value": PAGED.value[:-1]}, "value of shape"),
        ({"value": PAGED.value[:, :, :-1]}, "value of shape"),
        ({"seqused_k": None}, "a page table without lengths of keys"),
        ({"seqused_k": torch.tensor([4 * ROOM + 1, 1])}, "counts more keys than there are"),
        ({"seqused_k": torch.tensor([-1, 1])}, "counts more keys than there are"),
        ({"seqused_k": torch.tensor([1, 1, 1])}, "3 lengths of keys for 2 sequences"),
        ({"attn_mask": torch.ones(3, 4 * ROOM).bool()}, "attn_mask together with a page table"),
        ({"cu_seqlens_k": torch.tensor([0, 9, 15])}, "cu_seqlens_k together with a page table"),
        ({"cu_seqlens_q": PACKED}, "packed sequences have a batch of 1"),
        ({"cu_seqlens_q": PACKED[:2], "query": PAGED.query[:1]}, "2 lengths of keys for 1 seq"),
        ({"cu_seqlens_q": PACKED + 1, "query": PAGED.query[:1]}, "cu_seqlens_q does not rise"),
    ],
    ids=str,
)
def test_page_table_that_is_invalid_is_refused(
    fields: dict[str, Any], reason: str, tmp_path: Path
) -> None:
    path = write(replace(PAGED, **fields), tmp_path)
    with pytest.raises(DatasetError, match=re.escape(reason)) as caught:
        FileEntry.read(path).load()
    assert "\n" not in str(caught.value)


def test_pages_that_stand_for_too_much_memory_are_refused(tmp_path: Path) -> None:
    """A page table may name one page many times."""
    table = torch.zeros(2000, 30, dtype=torch.int32)
    lengths = torch.full((2000,), 30 * 64, dtype=torch.int32)
    pool = normal(1, 8, 64, 64)
    call = AttentionCall(
        normal(2000, 8, 1, 64), pool, pool.clone(), seqused_k=lengths, page_table=table
    )
    entry = FileEntry.read(write(call, tmp_path))
    with pytest.raises(DatasetError, match=r"take \d+ bytes of memory for a file"):
        entry.load()


MLA = paged_call([9, 6], 4, head_dim=24, kv_heads=1)
MLA = replace(MLA, value=MLA.key[..., :16])


def test_value_that_is_part_of_the_key_is_stored_once(tmp_path: Path) -> None:
    separate = replace(MLA, value=MLA.value.clone())
    (tmp_path / "separate").mkdir()
    saved = write(separate, tmp_path / "separate").stat().st_size
    path = write(MLA, tmp_path)
    assert 0 < MLA.value.nbytes < saved - path.stat().st_size + 200
    call = FileEntry.read(path).load()
    assert call.value.data_ptr() == call.key.data_ptr()
    assert call.value.stride() == call.key.stride()
    assert torch.equal(call.value, MLA.value)
    assert call.to("cpu").value_is_in_key
    assert call.to("cpu").key.data_ptr() != call.key.data_ptr()
    assert not FileEntry.read(tmp_path / "separate" / path.name).load().value_is_in_key


@pytest.mark.parametrize(
    ("columns", "reason"),
    [
        (25, "value_in_key is 25, but the key has 24 columns"),
        (-1, "value_in_key is -1, but the key has 24 columns"),
        (0, "tensors"),
        (2.5, "value_in_key is 2.5"),
    ],
)
def test_value_that_is_no_part_of_the_key_is_refused(columns: Any, reason: str) -> None:
    header = {**PackedCall.of(MLA).header.to_json(), "value_in_key": columns}
    with pytest.raises(ValueError, match=re.escape(reason)):
        CallHeader.from_json(header)


def test_value_beside_the_one_in_the_key_is_refused() -> None:
    data = PackedCall.of(replace(MLA, value=MLA.value.clone())).header.to_json()
    with pytest.raises(ValueError, match="tensors"):
        CallHeader.from_json({**data, "value_in_key": 16})
    assert CallHeader.from_json(data).value_in_key == 0


def test_huge_output_of_no_keys_is_refused(tmp_path: Path) -> None:
    """A value without keys can be expanded without memory, but its output would take 8 TB."""
    empty = normal(1, 1, 0, 1)
    call = AttentionCall(
        normal(1, 1, 1, 1).expand(1, 1, 2**20, 1), empty, empty.expand(1, 1, 0, 2**21)
    )
    path = write(call, tmp_path)
    with pytest.raises(DatasetError, match=r"its tensors take \d+ bytes"):
        FileEntry.read(path)
