"""Inputs change from sample to sample, in a way that another process can reproduce."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch.nn.functional import scaled_dot_product_attention

from capture.call.attention_call import AttentionCall
from replay.accuracy.reference import attention
from replay.isolation import input_perturbation as sequence
from replay.isolation.input_perturbation import (
    InputPerturbation,
    PerturbationSequence,
    SteppedPerturbation,
    some_rows,
)
from tests.factories import random_call
from tests.variant_calls import paged_call

CALLS: dict[str, Callable[[], AttentionCall]] = {
    "plain": lambda: random_call(q_len=40, kv_len=40),
    "grouped": lambda: random_call(batch=2, q_heads=6, kv_heads=2, q_len=40, kv_len=50),
    "causal": lambda: random_call(q_len=40, kv_len=40, is_causal=True),
    "decode": lambda: random_call(batch=2, q_heads=4, kv_heads=2, q_len=1, kv_len=70),
    "one key": lambda: random_call(q_len=1, kv_len=1),
    "bool mask": lambda: random_call(kv_len=40, attn_mask=torch.rand(1, 1, 9, 40) < 0.8),
    "float mask": lambda: random_call(kv_len=40, attn_mask=torch.randn(9, 40)),
    "shared heads": lambda: _expanded(random_call(q_heads=4, kv_heads=4, kv_len=40)),
}


def _expanded(call: AttentionCall) -> AttentionCall:
    shared = {name: getattr(call, name)[:, :1].expand(-1, 4, -1, -1) for name in ("key", "value")}
    return call.with_tensors(shared)


@pytest.mark.parametrize("name", CALLS)
def test_rows_of_a_perturbed_call_equal_attention(name: str) -> None:
    call = CALLS[name]()
    before = {each: tensor.clone() for each, tensor in call.tensors().items()}
    for number in range(5):
        perturbation = InputPerturbation(call, 7, number)
        perturbation.apply()
        assert not torch.equal(call.value, before["value"])
        output = scaled_dot_product_attention(**call.arguments())
        for rows in perturbation.rows(number):
            alone = scaled_dot_product_attention(**some_rows(call, rows).arguments())
            torch.testing.assert_close(alone[0, 0], rows.of(output))
        perturbation.apply()
        assert all(torch.equal(tensor, before[each]) for each, tensor in call.tensors().items())


def test_perturbation_uses_one_thread_on_a_cpu(monkeypatch: pytest.MonkeyPatch) -> None:
    sizes: list[int] = []
    for name in ("_negate", "_reverse"):
        monkeypatch.setattr(sequence, name, lambda rows: sizes.append(rows.numel()))
    call = random_call(q_heads=4, kv_heads=4, kv_len=5000, head_dim=64)
    InputPerturbation(call, 3, 0).apply()
    assert max(sizes) < 2**15
    assert sorted(sizes) == [4 * 64, 9 * 64] + [511 * 64] * 5  # a quarter of a head: 80,000


@pytest.mark.parametrize(
    ("sizes", "blocks"),
    [
        ({"batch": 2, "q_heads": 4, "kv_heads": 4, "kv_len": 64, "head_dim": 16}, 1),
        ({"batch": 40, "q_heads": 4, "kv_heads": 4, "kv_len": 64, "head_dim": 16}, 2),
        ({"batch": 2, "q_heads": 12, "kv_heads": 12, "kv_len": 256, "head_dim": 64}, 4),
        ({"batch": 64, "q_heads": 32, "kv_heads": 32, "kv_len": 3, "head_dim": 64}, 5),
    ],
    ids=str,
)
def test_every_perturbation_changes_every_head(
    sizes: dict[str, int], blocks: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    call = random_call(**sizes)
    before, sizes_seen = call.value.clone(), []

    def negate(rows: torch.Tensor) -> None:
        sizes_seen.append(rows.numel())
        rows.neg_()

    monkeypatch.setattr(sequence, "_negate", negate)
    for number in range(5):
        sizes_seen.clear()
        perturbation = InputPerturbation(call, 3, number, values_only=True)
        perturbation.apply()
        flipped = (call.value != before).all(-1).sum(-1)  # by sequence and head
        assert flipped.min() == flipped.max() >= call.value.shape[2] // 4 - 1
        *in_blocks, _one_more = sizes_seen
        assert len(in_blocks) == blocks
        assert max(in_blocks) < 2**15
        perturbation.apply()
    assert torch.equal(call.value, before)


def test_no_head_has_the_inputs_of_an_earlier_sample() -> None:
    call = random_call(batch=2, q_heads=4, kv_heads=2, kv_len=64)
    sequence = PerturbationSequence(call, seed=3)
    seen: list[set[Any]] = [set() for _ in range(4)]
    for _ in range(10):
        sequence.next()
        for head, values in zip(seen, call.value.flatten(0, 1), strict=True):
            head.add(tuple(values.flatten().tolist()))
    assert all(len(head) >= 9 for head in seen)
    sequence.undo()
    assert torch.equal(call.value, random_call(batch=2, q_heads=4, kv_heads=2, kv_len=64).value)


def test_choice_of_a_sparse_kernel_is_unchanged() -> None:
    call = random_call(kv_len=64)
    key, query = call.key.clone(), call.query.clone()
    PerturbationSequence(call, seed=3).next(values_only=True)
    assert torch.equal(call.key, key)
    assert torch.equal(call.query, query)


def test_keys_and_queries_stay_the_same_set() -> None:
    """Recorded key channels may be far from zero; smoothing relies on the mean of each channel."""
    call = random_call(q_len=40, kv_len=40)
    call.key[..., 3] += 200
    before = [tensor.sort(2).values for tensor in (call.key, call.query)]
    sequence, walk = PerturbationSequence(call, seed=3), SteppedPerturbation(call, seed=3)
    changes: list[Callable[[], object]] = [sequence.next] * 5 + [sequence.undo] + [walk.step] * 5
    for change in changes:
        key = call.key.clone()
        change()
        assert not torch.equal(call.key, key)
        after = [tensor.sort(2).values for tensor in (call.key, call.query)]
        assert all(map(torch.equal, before, after))


def test_another_process_makes_the_same_perturbation() -> None:
    first, second = random_call(kv_len=64), random_call(kv_len=64)
    number, _ = PerturbationSequence(first, seed=3).next()
    InputPerturbation(second, 3, number).apply()
    assert torch.equal(first.value, second.value)
    assert torch.equal(first.key, second.key)


@pytest.mark.parametrize("name", CALLS)
def test_stepped_perturbation_is_known_at_every_step(name: str) -> None:
    call = CALLS[name]()
    other = call.to("cpu")
    assert other.value.data_ptr() != call.value.data_ptr()
    recorded = {each: tensor.clone() for each, tensor in call.tensors().items()}
    walk = SteppedPerturbation(call, seed=7)
    for number in range(1, 40):
        walk.step()
        there = SteppedPerturbation(other, seed=7, number=number)
        there.apply()
        assert all(torch.equal(call.tensors()[each], other.tensors()[each]) for each in recorded)
        assert walk.rows(number) == there.rows(number)
        output = scaled_dot_product_attention(**call.arguments())
        for rows in walk.rows(number):
            alone = scaled_dot_product_attention(**some_rows(call, rows).arguments())
            torch.testing.assert_close(alone[0, 0], rows.of(output))
        there.apply()
    walk.apply()
    for each in (call, other):
        assert all(torch.equal(tensor, recorded[name]) for name, tensor in each.tensors().items())


def test_no_head_has_the_inputs_of_an_earlier_step() -> None:
    call = random_call(batch=2, q_heads=4, kv_heads=2, kv_len=100)
    walk, heads = (
        SteppedPerturbation(call, seed=3),
        (call.value.flatten(0, 1), call.key.flatten(0, 1)),
    )
    seen: list[set[Any]] = [set() for _ in range(8)]
    for _ in range(300):
        walk.step()
        for head, values in zip(seen, torch.cat(heads), strict=True):
            head.add(values.numpy().tobytes())
    assert [len(head) for head in seen] == [300] * 8


def test_stepped_perturbation_repeats_after_all_its_steps() -> None:
    call = random_call(kv_len=3)
    walk, value = SteppedPerturbation(call, seed=3, values_only=True), call.value.clone()
    key = call.key.clone()
    for number in range(1, 17):
        walk.step()
        assert torch.equal(call.value, value) == (number % 8 == 0)
    assert torch.equal(call.key, key)


@pytest.mark.parametrize("shares_value", [False, True])
def test_perturbation_reaches_judged_rows_in_every_page(
    shares_value: bool,
) -> None:
    call = paged_call([40, 70, 20], 16, q_heads=4, kv_heads=2, head_dim=24)
    if shares_value:
        call = replace(call, value=call.key[..., :16])
    before = attention(call)
    for number in range(20):
        perturbation = InputPerturbation(call, 0, number)
        perturbation.apply()
        changed, _ = perturbation.rows(number)
        rows = changed.of(before)
        moved = torch.linalg.vector_norm(changed.of(attention(call)) - rows, dim=1)
        assert (moved > 0.05 * torch.linalg.vector_norm(rows, dim=1)).all()
        perturbation.apply()
    assert torch.equal(attention(call), before)
    walk = SteppedPerturbation(call, 0, 5)
    walk.apply()
    assert not torch.allclose(attention(call), before)
    walk.apply()
    assert torch.equal(attention(call), before)


NO_KEYS: dict[str, Callable[[], AttentionCall]] = {
    "plain": lambda: random_call(q_len=40, kv_len=0),
    "grouped": lambda: random_call(batch=2, q_heads=4, kv_heads=2, kv_len=0),
    "mask": lambda: random_call(kv_len=0, attn_mask=torch.ones(9, 0, dtype=torch.bool)),
    "broadcast mask": lambda: random_call(kv_len=0, attn_mask=torch.zeros(9, 1)),
}


@pytest.mark.parametrize("name", NO_KEYS)
@pytest.mark.parametrize("kind", [InputPerturbation, SteppedPerturbation])
def test_rows_are_judged_without_keys(
    kind: type[InputPerturbation | SteppedPerturbation], name: str
) -> None:
    """A call may have no keys, because a model may attend to a cache that is still empty."""
    call = NO_KEYS[name]()
    before = call.query.clone()
    for number in range(5):
        change = kind(call, 7, number)
        change.apply()
        for rows in change.rows(number):
            alone = some_rows(call, rows)
            assert alone.key.shape[2] == 0
            assert torch.equal(attention(alone)[0, 0], rows.of(attention(call)))
        change.apply()
        assert torch.equal(call.query, before)
    walk = SteppedPerturbation(call, 7)
    walk.step()
    assert walk.number == 1
