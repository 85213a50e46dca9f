"""The difficulty of a call, and recordings that keep the most difficult calls."""

import math
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from torch import Tensor, nn
from torch.nn.functional import scaled_dot_product_attention

from capture import AttentionCall, load, record
from capture.call.attention_variant import AttentionVariant
from capture.cli.main import main
from capture.recording.difficulty import _attention, difficulty
from replay.accuracy import reference
from tests.factories import random_call
from tests.variant_calls import CALLS


def hardness(call: AttentionCall) -> float:
    return difficulty(call).item()


def with_outliers(call: AttentionCall, by: float = 30.0) -> AttentionCall:
    """Return the call with one much larger channel in K, with values of both signs."""
    key = call.key.clone()
    key[..., 3] *= by
    return call.with_tensors({"key": key})


def test_difficulty_is_the_error_of_int8_attention() -> None:
    call = random_call(q_len=32, kv_len=64, head_dim=64, v_head_dim=64)
    key = call.key - call.key.mean(2, keepdim=True)

    def rounded(tensor: Tensor, *dims: int) -> Tensor:
        scale = tensor.abs().amax(dims, keepdim=True) / 127
        return (tensor / scale).round() * scale

    exact = scaled_dot_product_attention(call.query, key, call.value)
    quantised = scaled_dot_product_attention(
        rounded(call.query, 2, 3), rounded(key, 2, 3), rounded(call.value, 2)
    )
    expected = (quantised - exact).abs().sum() / exact.abs().sum()
    assert hardness(call) == pytest.approx(float(expected), rel=1e-3)


def test_outliers_raise_the_difficulty_and_means_do_not() -> None:
    call = random_call(q_len=200, kv_len=300, head_dim=64)
    usual = hardness(call)
    assert hardness(with_outliers(call)) > 3 * usual
    late = call.query.clone()
    late[:, :, -1] *= 50  # the peak of a block is far above its other scores
    assert hardness(call.with_tensors({"query": late})) > 1.5 * usual
    # A mean of the keys, which smoothing removes, and a mean of the values add no difficulty.
    smoothed = hardness(call.with_tensors({"key": call.key + 40}))
    assert smoothed == pytest.approx(usual, rel=1e-2)
    assert hardness(call.with_tensors({"value": call.value + 3})) < 0.5 * usual


def test_keys_that_no_query_sees_do_not_count() -> None:
    call = random_call(q_len=64, kv_len=128, head_dim=64)
    query, key, value = call.query, call.key.clone(), call.value
    seen = torch.ones(64, 128, dtype=torch.bool)
    seen[:, 64:] = False
    key[:, :, 64:] *= 0.5
    key[:, :, :64, 3] *= 30.0
    hidden = hardness(replace(call, key=key, attn_mask=~seen))
    assert hardness(replace(call, key=key, attn_mask=seen)) > 3 * hidden
    as_floats = torch.zeros(64, 128).masked_fill(seen, -math.inf)
    assert hardness(replace(call, key=key, attn_mask=as_floats)) == pytest.approx(hidden)
    # Query i is aligned with key 64 + i, and sees only this key and later keys.
    window = AttentionVariant(window=(0, None), bottom_right=True)
    assert hardness(AttentionCall(query, key, value, variant=window)) < 2 * hidden


def test_mean_of_k_counts_beside_a_sink() -> None:
    """The mean of K shifts all scores of a query equally, except the sink's score."""
    call = random_call(q_len=64, kv_len=64, sinks=torch.zeros(2))
    assert hardness(call.with_tensors({"key": call.key + 1})) < 2 * hardness(call)


@pytest.mark.parametrize("name", sorted(CALLS))
def test_calls_beyond_sdpa(name: str) -> None:
    call = CALLS[name].without_pages().without_scales()
    every = tuple(torch.arange(n) for n in (*call.query.shape[:3:2], call.key.shape[2]))
    attended = _attention(call, call.query, call.key, call.value, every)
    expected = reference.attention(CALLS[name], torch.float32)
    assert torch.allclose(attended.flatten(1, 2), expected, atol=1e-5)
    assert 0 < hardness(CALLS[name]) < 0.1


def test_grouped_heads_are_the_same_as_repeated_ones() -> None:
    call = random_call(q_heads=4, kv_heads=2, q_len=64, kv_len=64, head_dim=32)
    heads = {name: getattr(call, name).repeat_interleave(2, 1) for name in ("key", "value")}
    assert hardness(call) == pytest.approx(hardness(call.with_tensors(heads)), rel=1e-5)


@pytest.mark.parametrize(("q_len", "kv_len"), [(0, 5), (5, 0), (1, 1), (1, 1000), (65, 5000)])
def test_any_length(q_len: int, kv_len: int) -> None:
    found = hardness(random_call(q_len=q_len, kv_len=kv_len))
    assert math.isnan(found) if not (q_len and kv_len) else 0 <= found < 0.1


def test_difficulty_leaves_random_state_and_ignores_autocast() -> None:
    call = random_call(q_len=16, kv_len=16).to("cpu")
    before = torch.get_rng_state()
    with torch.autocast("cpu", dtype=torch.bfloat16):
        inside = hardness(call)
    assert inside == hardness(call)
    assert torch.equal(torch.get_rng_state(), before)


class Planted(nn.Module):
    """Model that makes the given calls in order."""

    def forward(self, calls: list[AttentionCall]) -> list[Tensor]:
        return [torch.nn.functional.scaled_dot_product_attention(**c.arguments()) for c in calls]


HARD = (5, 11, 23, 24)


def planted() -> list[AttentionCall]:
    calls = [random_call(q_len=64, kv_len=64, seed=seed) for seed in range(30)]
    return [with_outliers(call) if n in HARD else call for n, call in enumerate(calls)]


@pytest.mark.parametrize("durable", [False, True])
def test_hardest_calls_are_kept_exactly(tmp_path: Path, durable: bool) -> None:
    calls, model = planted(), Planted()
    plain = model(calls)
    with record(model, tmp_path, max=4, sample="hard", durable=durable) as recording:
        outputs = model(calls)
    assert all(torch.equal(*pair) for pair in zip(plain, outputs, strict=True))
    assert not recording.problems
    data = load(tmp_path)
    assert tuple(call.origin.call_index for call in data) == HARD
    assert len([*tmp_path.glob("*.safetensors")]) == 4
    for call in data:
        assert call.origin.difficulty == pytest.approx(hardness(calls[call.origin.call_index]))


def test_calls_with_nan_or_infinity_come_first(tmp_path: Path) -> None:
    calls, model = planted(), Planted()
    calls[6].key.fill_(math.nan)
    calls[7].value[0, 0, 0, 0] = -math.inf
    with record(model, tmp_path, max=4, sample="hard"):
        model(calls)
    kept = {call.origin.call_index: call.origin for call in load(tmp_path)}
    assert len(kept.keys() & {6, 7}) == len(kept.keys() & HARD) == 2
    assert kept[6].difficulty is None
    assert kept[7].nonfinite == "value 1 infinite, output 64 infinite"


def test_difficulty_is_shown(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    model = Planted()
    for sample in ("hard", "spread"):
        with record(model, tmp_path, max=2, sample=sample, name=sample):
            model(planted()[:6])
    with pytest.raises(SystemExit):
        main(["show", str(tmp_path)])
    hard, _, spread = capsys.readouterr().out.partition("spread · ")
    (line,) = [line for line in hard.splitlines() if line.startswith("hard-000005 ")]
    assert f"{load(tmp_path)[1].origin.difficulty:.2%}" in line
    assert "difficulty" not in spread
