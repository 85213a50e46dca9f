"""Errors and masses of block-sparse attention on recorded calls."""

import math

import pytest
import torch
from torch.nn.functional import scaled_dot_product_attention

from attention_kernels.sparse.block_policy import BlockPolicy, kept_blocks
from capture.call.attention_call import AttentionCall
from replay.kernels.chosen_keys import mask_of_blocks
from replay.sparsity import block_errors
from replay.sparsity.block_errors import head_errors
from tests.factories import random_call

ROWS, KEYS = 4, 8
POLICIES = [BlockPolicy(keep=0.3), BlockPolicy(keep=0.6), BlockPolicy(mass=0.9)]


def masked(call: AttentionCall, policy: BlockPolicy, *, dropped: bool = False) -> torch.Tensor:
    """Return attention to the keys that a policy keeps, or to the dropped ones."""
    kept = kept_blocks(
        call.query, call.key, policy, ROWS, KEYS, is_causal=call.is_causal, scale=call.scale
    )
    mask = mask_of_blocks(kept, ROWS, KEYS, call) ^ dropped
    if call.is_causal:
        mask &= torch.ones_like(mask).tril()
    arguments = call.arguments() | {"attn_mask": mask, "is_causal": False}
    return scaled_dot_product_attention(**arguments)


def test_masses_and_errors_of_two_blocks_as_computed_by_hand() -> None:
    # One query with the scores ln 1, ln 1 | ln 3, ln 3 has the weights 1/8, 1/8 | 3/8, 3/8.
    key = torch.tensor([0.0, 0.0, math.log(3), math.log(3)]).view(1, 1, 4, 1)
    value = torch.tensor([8.0, 0.0, 4.0, 4.0]).view(1, 1, 4, 1)
    call = AttentionCall(torch.ones(1, 1, 1, 1), key, value, scale=1.0)
    found = head_errors(call, [BlockPolicy(keep=0.5), BlockPolicy(keep=1.0)], 1, 2)
    assert found.density == [[0.5], [1.0]]
    assert found.mass[0][0] == pytest.approx(0.75)
    # The output is 1 + 0 + 1.5 + 1.5 = 4, and that over the second block is 4 too.
    assert found.sums[0][0] == pytest.approx((16, 16, 16, 4, 0, 0), abs=1e-5)
    other = call.with_tensors({"value": torch.tensor([8.0, 0.0, 4.0, 8.0]).view(1, 1, 4, 1)})
    found = head_errors(other, [BlockPolicy(keep=0.5)], 1, 2)
    # 1 + 1.5 + 3 = 5.5, but (4 + 8) / 2 = 6 over the second block.
    assert found.sums[0][0] == pytest.approx((33, 36, 30.25, 5.5, 0.25, 0.5), rel=1e-5)
    assert found.elements == 1


@pytest.mark.parametrize(
    "fields",
    [{}, {"scale": 0.5, "batch": 2}, {"kv_heads": 2, "q_heads": 4}, {"is_causal": True}],
    ids=["plain", "batch", "groups", "causal"],
)
def test_errors_are_those_of_masked_attention(fields: dict[str, object]) -> None:
    call = random_call(**{"q_len": 30, "kv_len": 30, **fields})  # type: ignore[arg-type]
    exact = scaled_dot_product_attention(**call.arguments())
    found = head_errors(call, POLICIES, ROWS, KEYS)
    for policy, sums in zip(POLICIES, found.sums, strict=True):
        output = masked(call, policy)
        squares = (output - exact).square().sum(dim=(0, 2, 3))
        assert [each.squared for each in sums] == pytest.approx(squares.tolist(), rel=1e-4)
        products = (output * exact).sum(dim=(0, 2, 3))
        assert [each.product for each in sums] == pytest.approx(products.tolist(), rel=1e-4)


def test_error_is_the_dropped_mass_times_the_distance_to_the_dropped_output() -> None:
    call = random_call(q_len=ROWS, kv_len=32, q_heads=1)
    exact = scaled_dot_product_attention(**call.arguments())
    (policy, *_) = POLICIES
    kept, dropped = masked(call, policy), masked(call, policy, dropped=True)
    scores = call.query @ call.key.mT * call.query.shape[-1] ** -0.5
    blocks = kept_blocks(call.query, call.key, policy, ROWS, KEYS)
    weights = scores.softmax(-1) * ~mask_of_blocks(blocks, ROWS, KEYS, call)
    mass = weights.sum(-1, keepdim=True)
    torch.testing.assert_close(kept - exact, mass * (kept - dropped))
    found = head_errors(call, [policy], ROWS, KEYS)
    assert 1 - found.mass[0][0] == pytest.approx(float(mass.mean()), rel=1e-4)


def test_error_shows_a_lone_key_that_the_mean_of_its_block_hides() -> None:
    call = random_call(q_heads=2, q_len=32, kv_len=64, head_dim=16)
    query, key, value = (each.clone() for each in (call.query, call.key, call.value))
    query[:, 0] = 1.0
    # One key of block 5 has a large score, and its neighbours cancel it in the mean.
    key[:, 0] *= 0.01
    key[0, 0, 40] = 7.0
    key[0, 0, 41:48] = -1.2
    value[0, 0, 40] = 20.0
    value[0, 1] += 3.0
    call = call.with_tensors({"query": query, "key": key, "value": value})
    policy = BlockPolicy(keep=0.5)
    assert not kept_blocks(query, key, policy, ROWS, KEYS)[0, 0, :, 5].any()
    found = head_errors(call, [policy], ROWS, KEYS)
    spike, other = (each.absolute / each.size for each in found.sums[0])
    assert spike > 0.9
    assert other < 0.2
    assert found.mass[0][0] < 0.1 < found.mass[0][1]


def test_examined_tiles_stand_for_all(monkeypatch: pytest.MonkeyPatch) -> None:
    call = random_call(q_len=400, kv_len=80, q_heads=1)
    monkeypatch.setattr(block_errors, "MOST_TILES", 100)
    whole = head_errors(call, POLICIES, ROWS, KEYS)
    monkeypatch.setattr(block_errors, "MOST_TILES", 50)
    monkeypatch.setattr(block_errors, "MOST_WEIGHTS", 7 * ROWS * 80)  # several parts
    half = head_errors(call, POLICIES, ROWS, KEYS)
    assert half.density == whole.density
    assert half.elements * 2 == whole.elements
    for one, other in zip(half.sums, whole.sums, strict=True):
        assert one[0].squared * 2 == pytest.approx(other[0].squared, rel=0.15)


def test_nan_is_refused() -> None:
    call = random_call()
    call.key[0, 0, 0, 0] = math.nan
    with pytest.raises(ValueError, match="NaN or infinite inputs"):
        head_errors(call, POLICIES, ROWS, KEYS)
