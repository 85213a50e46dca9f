"""A sparse kernel is compared with attention to those keys that it reports as chosen."""

import json
import math
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention
from torch.utils._python_dispatch import TorchDispatchMode

from capture.call.attention_call import AttentionCall
from capture.call.block_mask import block_mask
from replay.accuracy.reference import attention
from replay.accuracy.sparse import kept_share, restricted
from replay.accuracy.verdict import Expected, judge
from replay.diagnosis.derived import HeadRows, part
from replay.isolation.block_inputs import BlockInputs
from replay.isolation.judge import LocalJudge
from replay.isolation.output_rows import OutputRows, some_rows
from replay.kernels.chosen_keys import mask_of_blocks, mask_of_tokens
from replay.kernels.registry import Kernel
from replay.rows.row_files import row_from_json, row_to_json
from tests.factories import random_call
from tests.replay.bench.small_kernels import Register, Replayed


def test_indices_become_a_mask() -> None:
    call = random_call(q_heads=4, kv_heads=2, kv_len=5)
    mask = mask_of_tokens(torch.tensor([[[0, 3, 3], [-1, 4, 99]]]), call)
    assert mask.shape == (1, 4, 1, 5)
    assert mask[0, :, 0].int().tolist() == [
        [1, 0, 0, 1, 0],
        [1, 0, 0, 1, 0],
        [0, 0, 0, 0, 1],
        [0, 0, 0, 0, 1],
    ]


def test_choice_is_joined_with_the_calls_own_mask() -> None:
    chosen = torch.tensor([True, True, False, False])
    own = torch.tensor([True, False, True, False])
    plain = random_call(kv_len=4)
    boolean = plain.with_tensors({"attn_mask": own})
    added = plain.with_tensors({"attn_mask": torch.where(own, 0.5, -math.inf)})
    assert restricted(plain, chosen).attn_mask is chosen
    assert kept_share(plain, restricted(plain, chosen)) == 0.5
    kept = restricted(boolean, chosen).attn_mask
    assert kept.tolist() == [True, False, False, False]
    kept = restricted(added, chosen).attn_mask
    assert kept.tolist() == [0.5, -math.inf, -math.inf, -math.inf]
    assert kept_share(added, restricted(added, chosen)) == 0.5


def test_unread_keys_cannot_spoil_the_reference() -> None:
    call = random_call(q_heads=4, kv_heads=2, kv_len=6)
    chosen = mask_of_tokens(torch.tensor([[[0, 1], [4, 5]]]), call)
    expected = attention(restricted(call, chosen))
    call.key[0, 0, 4], call.value[0, 1, 0] = math.nan, math.inf
    assert torch.equal(attention(restricted(call, chosen)), expected)
    call.value[0, 0, 1] = math.nan  # a chosen key is read
    assert attention(restricted(call, chosen)).isnan().any()


@pytest.mark.parametrize(
    "chosen",
    [
        torch.ones(13),
        torch.ones(2, 13, dtype=torch.bool),
        block_mask(torch.ones(1, 1, 1, 3, dtype=torch.bool), 64, 4),
    ],
)
def test_invalid_choice_is_refused(chosen: Tensor) -> None:
    with pytest.raises(ValueError, match="a bool mask that broadcasts to"):
        restricted(random_call(), chosen)


MAP = torch.tensor([[[[1, 0, 1], [0, 1, 0]], [[0, 0, 1], [1, 1, 0]]]], dtype=torch.bool)
"""Blocks of 3 keys that 2 heads keep in 2 tiles of 4 queries, for 7 queries and 8 keys."""


def test_blocks_are_expanded_where_rows_are_read() -> None:
    call = random_call(batch=2, q_heads=2, kv_heads=1, q_len=7, kv_len=8)
    chosen, dense = block_mask(MAP, 4, 3), mask_of_blocks(MAP, 4, 3, call)
    assert dense[1, 0, 3].int().tolist() == [1, 1, 1, 0, 0, 0, 1, 1]
    assert dense[1, 1, 4].int().tolist() == [1, 1, 1, 1, 1, 1, 0, 0]
    kept, expected = restricted(call, chosen), restricted(call, dense)
    assert chosen.untyped_storage().nbytes() == MAP.numel()
    # Pairs of a head: 4 queries × 5 keys and 3 × 3; 4 × 2 and 3 × 6.
    assert kept_share(call, kept) == kept_share(call, expected) == (29 + 26) / (2 * 56)
    assert torch.equal(attention(kept), attention(expected))
    rows = OutputRows([1, 1], [0, 1], [3, 6])
    assert torch.equal(some_rows(kept, rows).attn_mask, some_rows(expected, rows).attn_mask)
    place = HeadRows(1, 1, torch.tensor([0, 6]))
    assert torch.equal(part(kept, place).attn_mask, part(expected, place).attn_mask)
    call.value[0, 0, 0] = math.nan
    assert torch.equal(Expected.of(call, chosen).exposed, Expected.of(call, dense).exposed)


@pytest.mark.parametrize("fields", [{"is_causal": True}, {"attn_mask": torch.arange(8) != 7}])
def test_blocks_are_joined_with_what_else_hides_keys(fields: dict[str, Any]) -> None:
    call = random_call(batch=2, q_heads=2, kv_heads=1, q_len=7, kv_len=8, **fields)
    kept = restricted(call, block_mask(MAP, 4, 3))
    expected = restricted(call, mask_of_blocks(MAP, 4, 3, call))
    assert kept_share(call, kept) == kept_share(call, expected)
    assert torch.equal(attention(kept), attention(expected))


def test_no_mask_of_all_pairs_is_built(monkeypatch: pytest.MonkeyPatch) -> None:
    """Judging reads 64 of 2,048 queries at a time."""
    monkeypatch.setattr("replay.accuracy.reference.CPU_BLOCK", 64 * 2048)
    monkeypatch.setattr("replay.accuracy.nonfinite.BLOCK", 64 * 2048)
    monkeypatch.setattr("replay.timing.flops.ROWS_AT_A_TIME", 64)
    call = random_call(q_heads=1, q_len=2048, kv_len=2048, head_dim=8)
    call.value[0, 0, 2047, 0] = math.nan  # so that the keys of all rows are looked up
    kept = torch.eye(16, dtype=torch.bool)[None, None]
    output = attention(restricted(call, block_mask(kept, 128, 128))).to(call.dtype)
    with Largest() as largest:
        verdict = judge(output, Expected.of(call, block_mask(kept, 128, 128)), "sparse")
    assert verdict.passed
    assert 64 * 2048 <= largest.elements < 2048 * 2048 / 8


class Largest(TorchDispatchMode):
    """Keeps the largest number of elements in the memory of a result of PyTorch's operations."""

    elements = 0

    def __torch_dispatch__(
        self, function: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        found = function(*args, **(kwargs or {}))
        for each in found if isinstance(found, list | tuple) else [found]:
            if isinstance(each, Tensor):
                stored = each.untyped_storage().nbytes() // each.itemsize
                self.elements = max(self.elements, stored)
        return found


def every_other(call: AttentionCall) -> Tensor:
    return torch.arange(call.shape.kv_len) % 2 == 0


def first_block(call: AttentionCall) -> Tensor:
    kept = torch.tensor([True, False]).expand(1, 1, -(-call.shape.q_len // 4), 2)
    return block_mask(kept, 4, 32)


def block_sparse(
    query: Tensor, key: Tensor, value: Tensor, *rest: object, **options: object
) -> Tensor:
    return scaled_dot_product_attention(query, key[:, :, :32], value[:, :, :32])


def sparse(query: Tensor, key: Tensor, value: Tensor, *rest: object, **options: object) -> Tensor:
    return scaled_dot_product_attention(query, key[:, :, ::2], value[:, :, ::2])


def test_sparse_kernel_of_a_user_is_judged(kernels: Register, replayed: Replayed) -> None:
    kernel = kernels("mine", sparse, accuracy_class="sparse", chosen=every_other)
    call = random_call(kv_len=64, dtype=torch.bfloat16)
    row = replayed(call, kernel)["mine"]
    assert row.status == "ok", row.reason
    assert row.reason.startswith("on the keys it chose, ")
    assert row.kept == 0.5
    assert row.accuracy.chosen.max_abs < 0.05 < row.accuracy.reference.max_abs
    assert row_from_json(json.loads(json.dumps(row_to_json(row)))) == row


def test_blocks_of_a_users_kernel_are_judged(kernels: Register, replayed: Replayed) -> None:
    kernel = kernels("mine", block_sparse, accuracy_class="sparse", chosen=first_block)
    row = replayed(random_call(kv_len=64, dtype=torch.bfloat16), kernel)["mine"]
    assert (row.status, row.kept) == ("ok", 0.5), row.reason


@pytest.mark.parametrize(
    ("first", "later", "is_noted"), [(32, 30, False), (32, 28, True), (64, 62, True)]
)
def test_fewer_keys_are_noted(first: int, later: int, is_noted: bool) -> None:
    call = random_call(kv_len=64)
    judge, inputs = LocalJudge(call), BlockInputs(call)

    def called(keys: int) -> tuple[Tensor, Tensor]:
        chosen = torch.arange(64) < keys
        return attention(restricted(call, chosen), call.dtype), chosen

    output, chosen = called(first)
    assert judge.judge("mine", "sparse", output, chosen).finding.status == "ok"
    assert judge.judge("other", "sparse", output, ~chosen).finding.status == "inaccurate"
    inputs.draw(3, 1)
    inputs.apply(0, None)
    output, chosen = called(later)
    inputs.restore()
    assert judge.judge_block("mine", "sparse", 3, [output], 4, [(0, chosen)]) == ""
    assert bool(judge.other_shares) == is_noted


def test_failing_choice_costs_its_row(kernels: Register, replayed: Replayed) -> None:
    def broken(call: AttentionCall) -> Tensor:
        raise RuntimeError("no idea")

    kernel = kernels("mine", sparse, accuracy_class="sparse", chosen=broken)
    row = replayed(random_call(kv_len=64), kernel)["mine"]
    assert (row.status, row.reason) == ("error", "RuntimeError: no idea")


@pytest.mark.parametrize("fields", [{"accuracy_class": "sparse"}, {"chosen": every_other}])
def test_only_sparse_kernels_choose(fields: dict[str, Any]) -> None:
    with pytest.raises(ValueError, match="sparse if and only if `chosen` is given"):
        Kernel("mine", sparse, **fields)
