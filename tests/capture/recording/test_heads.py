"""Recordings that keep only some heads of each call."""

from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from capture import load, record
from capture.call.head_ranges import parse_ranges
from capture.cli.file_checks import check_files
from capture.errors import RecordingWarning
from capture.recording.heads import kv_heads_of, pick
from tests.factories import random_call


@pytest.mark.parametrize("text", ["", "a", "1,", "-1", "3-", "2-1", "1-2-3", "65536", "0-99999999"])
def test_invalid_range_is_refused(text: str) -> None:
    with pytest.raises(ValueError, match=r"invalid range .*(must be a number|ends before it)"):
        parse_ranges(text)


@pytest.mark.parametrize(
    ("heads", "q_heads", "kv_heads", "expected"),
    [
        ((0, 3), 4, 4, [0, 3]),
        ((0, 3), 4, 1, [0]),
        ((0, 1, 4, 5), 8, 2, [0, 1]),
        ((2, 3), 8, 2, [0]),
        ((0, 1, 4), 8, 2, None),  # two heads from one group, one from the other
        ((0, 4), 4, 4, None),  # head 4 does not exist
    ],
)
def test_key_value_heads(
    heads: tuple[int, ...], q_heads: int, kv_heads: int, expected: list[int] | None
) -> None:
    assert kv_heads_of(heads, q_heads, kv_heads) == expected


@pytest.mark.parametrize("heads", [(1,), (0, 5), (2, 3, 6, 7)])
def test_part_computes_the_same_part_of_the_output(heads: tuple[int, ...]) -> None:
    mask = torch.randn(1, 8, 9, 13)
    call = random_call(q_heads=8, kv_heads=2, attn_mask=mask, with_output=True)
    picked = kv_heads_of(heads, 8, 2)
    assert picked is not None
    part = pick(call, heads, picked)
    assert part.shape[:3] == (1, len(heads), len(picked))
    assert call.output is not None
    torch.testing.assert_close(
        F.scaled_dot_product_attention(**part.arguments()), call.output[:, list(heads)]
    )
    assert part.output is not None
    assert torch.equal(part.output, call.output[:, list(heads)])


def test_order_of_dimensions_stays_and_shared_heads_stay_shared() -> None:
    bshd = torch.randn(2, 5, 4, 8).transpose(1, 2)
    shared = torch.randn(2, 1, 5, 8).expand(2, 4, 5, 8)
    call = random_call(batch=2, q_heads=4, q_len=5, kv_len=5, head_dim=8)
    part = pick(call.with_tensors({"query": bshd, "key": shared}), (1, 3), [1, 3])
    assert part.query.stride() == (5 * 2 * 8, 8, 2 * 8, 1)
    assert torch.equal(part.query, bshd[:, [1, 3]])
    assert part.key.stride(1) == 0
    assert part.key.shape == (2, 2, 5, 8)


def test_value_that_is_part_of_the_key_stays_part_of_it() -> None:
    call = random_call(q_heads=4, kv_heads=2)
    part = pick(call.with_tensors({"value": call.key[..., :16]}), (2, 3), [1])
    assert part.value_is_in_key
    assert torch.equal(part.value, call.key[:, 1:, :, :16])


class Grouped(nn.Module):
    """Model with four query heads and two key/value heads; its second call has two of each."""

    def can_generate(self) -> bool:
        return True

    def forward(self, input_ids: Tensor) -> Tensor:
        query, key, value = torch.randn(4, 6, 8), torch.randn(2, 6, 8), torch.randn(2, 6, 8)
        query, key, value = query[None], key[None], value[None]
        output = F.scaled_dot_product_attention(query, key, value, enable_gqa=True)
        F.scaled_dot_product_attention(query[:, :2], key, value)
        return output


def test_recording_some_heads(tmp_path: Path) -> None:
    model = Grouped()
    with record(model, tmp_path, heads=[3, 1]) as recording:
        model(torch.zeros(1, 6))
    refused = "1 (without the heads 1,3 with equally many for each key/value head)"
    assert recording.summary == f"kept of the eligible calls: 1 of 1; refused: {refused}"
    dataset = load(tmp_path)
    (call,) = dataset
    assert call.shape[1:3] == (2, 2)
    assert call.origin.heads == "1,3"
    assert dataset.captures[0].heads == "1,3"
    assert dataset.captures[0].census["signatures"][0]["query"] == [1, 4, 6, 8]
    assert all(finding.good for finding in check_files(dataset))


def test_recording_one_phase(tmp_path: Path) -> None:
    model = Grouped()
    with record(model, tmp_path / "decode", phase="decode") as recording:
        for length in (6, 1, 1):
            model(torch.zeros(1, length))
    assert (recording.kept, recording.seen) == (4, 6)
    assert {call.origin.phase for call in load(tmp_path / "decode")} == {"decode"}
    with pytest.warns(RecordingWarning, match=r"of phase denoise: choose prefill with `phase=`"):  # noqa: SIM117
        with record(model, tmp_path / "none", phase="denoise"):
            model(torch.zeros(1, 6))
    with pytest.raises(ValueError, match=r"phase must be denoise, .* not 'warm-up'"):  # noqa: SIM117
        with record(model, tmp_path / "none", phase="warm-up"):
            pass
