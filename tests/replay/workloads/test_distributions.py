"""Each distribution of values of synthetic calls gives the promised attention."""

import pytest
import torch
from torch import Tensor

from capture.call.attention_call import AttentionCall
from replay.cli import shared_options as arguments
from replay.workloads.distributions import DISTRIBUTIONS
from replay.workloads.random_calls import Spec
from replay.workloads.random_masks import MASKS

SPEC = Spec(2, 4, 2, 64, 512, 64, 32, dtype=torch.float32)


def made(seed: int = 0, **changes: object) -> AttentionCall:
    return Spec(**{**vars(SPEC), **changes}).call("cpu", torch.Generator().manual_seed(seed))


def weights(name: str, **changes: object) -> tuple[Tensor, Tensor]:
    """Return attention weights (B, Hq, Sq, Sk) of a call, and its scores."""
    call = made(3, distribution=name, **changes)
    key = call.key.repeat_interleave(2, dim=1)
    scores = call.query @ key.mT * call.softmax_scale
    return scores.softmax(-1), scores


def test_command_offers_every_distribution() -> None:
    assert tuple(DISTRIBUTIONS) == arguments.DISTRIBUTIONS
    assert {*MASKS, "causal"} == set(arguments.MASKS)


@pytest.mark.parametrize("name", DISTRIBUTIONS)
def test_seed_decides_all_values(name: str) -> None:
    one, same, other = (made(seed, distribution=name) for seed in (5, 5, 6))
    assert torch.equal(one.key, same.key)
    assert not torch.equal(one.key, other.key)
    assert all(bool(each.isfinite().all()) for each in (one.query, one.key, one.value))
    assert one.origin.weights == (
        "none: random values, standard normal"
        if name == "normal"
        else f"none: random values, {name}"
    )


@pytest.mark.parametrize("name", DISTRIBUTIONS)
@pytest.mark.parametrize("kv_len", [1, 2])
def test_distributions_work_with_hardly_any_keys(name: str, kv_len: int) -> None:
    found, _ = weights(name, kv_len=kv_len)
    assert bool(found.isfinite().all())


def test_uniform_values_are_between_0_and_1() -> None:
    key = made(distribution="uniform").key
    assert 0 <= float(key.min()) < 0.01
    assert 0.99 < float(key.max()) <= 1
    assert float(key.mean()) == pytest.approx(0.5, abs=0.02)


def test_outlier_channels_take_the_range_and_change_little_else() -> None:
    means = made(distribution="outlier-channels").key.mean((0, 1, 2)).abs()
    assert int((means > 15).sum()) == 4
    assert int((means < 0.5).sum()) == 60
    found, _ = weights("outlier-channels")
    assert float(found.amax(-1).mean()) < 0.1


@pytest.mark.parametrize(("name", "place"), [("sink", 0), ("late-sink", -1)])
@pytest.mark.parametrize("scale", [None, 0.01])
def test_sink_draws_most_of_the_weight(name: str, place: int, scale: float | None) -> None:
    found, _ = weights(name, scale=scale)
    assert float(found[..., place].mean()) > 0.5
    value = made(distribution=name).value
    assert float(value[:, :, place].std()) < 0.2 * float(value.std())


def test_staircase_has_a_new_maximum_in_every_tile() -> None:
    _, scores = weights("staircase")
    maxima = scores.unflatten(-1, (8, 64)).amax(-1).mean((0, 1, 2))
    assert bool((maxima.diff() > 4).all())


def test_half_of_the_weight_underflows_in_8_bits() -> None:
    found, _ = weights("underflow")
    largest = found.amax(-1, keepdim=True)
    small = found.where(
        found < largest * 2**-6, 0.0
    )  # below E4M3's normal numbers, if the largest weight is scaled to 1
    assert float(small.sum(-1).mean()) == pytest.approx(0.5, abs=0.1)


def test_neighbours_are_alike_with_equal_sizes() -> None:
    value = made(distribution="model-like", batch=8).value
    neighbours = (value[:, :, 1:] * value[:, :, :-1]).mean() / value.square().mean()
    assert float(neighbours) == pytest.approx(0.9, abs=0.03)
    assert float(value[:, :, :8].std()) == pytest.approx(float(value[:, :, -8:].std()), rel=0.15)


@pytest.mark.parametrize("name", ["padding", "window", "random"])
def test_every_query_sees_a_key_and_misses_some(name: str) -> None:
    call = made(1, mask=name)
    assert call.attn_mask.dtype == torch.bool
    seen = call.attn_mask.expand(2, 1, 64, 512).sum(-1)
    assert 0 < int(seen.min()) <= int(seen.max()) <= 512
    assert int(seen.sum()) < seen.numel() * 512


def test_window_works_with_more_queries_than_keys() -> None:
    mask = made(mask="window", q_len=600, kv_len=20).attn_mask
    assert int(mask.sum(-1).min()) > 0
