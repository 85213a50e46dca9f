"""Synthetic counterparts are recorded calls whose values are replaced by random values."""

from dataclasses import replace

import pytest
import torch

from capture.call.attention_call import AttentionCall, Origin
from replay.workloads.synthetic_counterparts import counterpart
from tests.factories import random_call


def test_counterpart_has_everything_but_the_values() -> None:
    fused = torch.randn(2, 9, 4, 3, 8).to(torch.bfloat16)
    query, key, value = (fused[:, :, :, part].transpose(1, 2) for part in range(3))
    key = key[:, :1].expand(2, 4, 9, 8)
    mask = torch.rand(2, 1, 1, 9) > 0.5
    origin = Origin(
        model="model", weights="a checkpoint", module="layers.3", step=7, phase="decode"
    )
    call = AttentionCall(query, key, value, mask, query.clone(), scale=0.3, origin=origin)
    found = counterpart(call, "random", 5)
    for name in ("query", "key", "value"):
        one, other = getattr(call, name), getattr(found, name)
        assert (one.shape, one.stride(), one.dtype) == (other.shape, other.stride(), other.dtype)
        assert not torch.equal(one, other)
        assert 0.7 < float(other.float().std()) < 1.3
    assert found.attn_mask is mask
    assert (found.scale, found.is_causal, found.output) == (0.3, False, None)
    assert found.origin == replace(origin, weights="none: random values, standard normal")
    assert torch.equal(found.query, counterpart(call, "random", 5).query)
    assert not torch.equal(found.query, counterpart(call, "random", 6).query)


def test_matched_counterpart_has_the_moments_of_every_channel() -> None:
    call = random_call(batch=2, q_heads=4, kv_heads=2, q_len=300, kv_len=400)
    key = call.key * torch.arange(1, 33) + torch.linspace(-50, 50, 32)
    found = counterpart(replace(call, key=key), "matched", 5)
    for own, theirs in ((key, found.key), (call.value, found.value)):
        assert not torch.equal(own, theirs)
        deviation, mean = torch.std_mean(own, dim=(0, 2))
        other_deviation, other_mean = torch.std_mean(theirs, dim=(0, 2))
        assert torch.allclose(other_mean, mean, atol=0.25 * float(deviation.max()))
        assert torch.allclose(other_deviation, deviation, rtol=0.2)
    assert found.origin.weights == "none: random values, moments of the recorded ones"


@pytest.mark.filterwarnings("error")
@pytest.mark.parametrize("kv_len", [0, 1, 2])
def test_matched_counterpart_works_with_hardly_any_keys(kv_len: int) -> None:
    call = random_call(q_len=1, kv_len=kv_len)
    assert bool(counterpart(call, "matched", 0).key.isfinite().all())


@pytest.mark.parametrize("kind", ["random", "matched"])
def test_value_of_a_counterpart_stays_part_of_the_key(kind: str) -> None:
    key = torch.randn(1, 1, 9, 24)
    call = AttentionCall(torch.randn(1, 4, 2, 24), key, key[..., :16])
    found = counterpart(call, kind, 5)
    assert found.value_is_in_key
    assert found.value.shape == call.value.shape
    assert not torch.equal(found.key, call.key)
