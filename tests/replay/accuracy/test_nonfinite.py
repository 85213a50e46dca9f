"""NaN and infinity in a call's inputs, and scores that overflow float16."""

import math
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention

from capture.call.attention_call import AttentionCall
from capture.call.attention_variant import AttentionVariant
from replay.accuracy.nonfinite import largest_scores, nonfinite_inputs
from replay.accuracy.reference import attention
from replay.accuracy.verdict import Expected, judge
from replay.kernels.registry import find
from replay.report.call_tables import print_report
from replay.rows.errors_of_output import AccuracyClass
from replay.rows.row import Row
from tests.factories import random_call
from tests.printed import printed
from tests.replay.bench.small_kernels import Register, Replayed

SEEN = torch.arange(13) < 10
"""A mask that hides the last three of 13 keys."""


def lengths(*values: int) -> Tensor:
    return torch.tensor(values, dtype=torch.int32)


HIDING: dict[str, dict[str, Any]] = {
    "bool mask": {"attn_mask": SEEN},
    "mask of -inf": {"attn_mask": torch.zeros(13).masked_fill(~SEEN, -math.inf)},
    "mask of the lowest value": {
        "attn_mask": torch.zeros(13).masked_fill(~SEEN, torch.finfo(torch.float32).min)
    },
    "causal": {"is_causal": True},
    "window": {"variant": AttentionVariant(window=(None, 1))},
    "padding": {"seqused_k": lengths(10)},
    "packed": {
        "cu_seqlens_q": lengths(0, 4, 9),
        "cu_seqlens_k": lengths(0, 5, 13),
        "seqused_k": lengths(5, 5),
    },
}


@pytest.mark.parametrize("hidden_by", HIDING)
def test_hidden_keys_are_named_and_change_no_result(hidden_by: str) -> None:
    call = random_call(q_heads=4, kv_heads=2, **HIDING[hidden_by])
    assert nonfinite_inputs(call) is None
    expected = attention(call)
    call.key[0, 1, 11:] = math.nan
    call.value[0, 1, 12, :5] = math.inf
    found = nonfinite_inputs(call)
    assert found.sentence == "key 64 NaN (hidden), value 5 infinite (hidden)"
    # The rows of the two query heads that share the key head are exposed.
    assert found.exposed.sum(-1).tolist() == [[0, 0, 9, 9]]
    torch.testing.assert_close(attention(call), expected, rtol=0, atol=1e-14)


def test_rows_that_do_not_see_nan_are_finite_and_exposed() -> None:
    call = random_call(q_len=13, is_causal=True)
    call.key[0, 0, 8:, 0], call.value[0, 0, 3, 2] = math.nan, math.nan
    found = nonfinite_inputs(call)
    assert found.sentence == "key 5 NaN (visible), value 1 NaN (visible)"
    assert found.exposed[0].int().sum(-1).tolist() == [12, 0]
    output = attention(call)[0, 0]
    assert output[:3].isfinite().all()
    assert output[3:8].isnan().any(0).nonzero().flatten().tolist() == [2]
    assert output[8:].isnan().all()


def test_lowest_value_hides_no_key_from_a_query_that_sees_no_other() -> None:
    lowest = torch.finfo(torch.float32).min
    call = random_call(attn_mask=torch.full((13,), lowest))
    call.value[0, 0, 0] = math.nan
    found = nonfinite_inputs(call)
    assert found.sentence == "value 32 NaN (visible)"
    assert not found.exposed.any()


def test_queries_masks_and_sinks_are_inspected() -> None:
    mask = torch.zeros(9, 13)
    mask[0], mask[1, 0] = -math.inf, math.nan
    call = random_call(attn_mask=mask, sinks=torch.tensor([-math.inf, 0.0]))
    call.query[0, 0, :2, 0] = math.inf
    found = nonfinite_inputs(call)
    assert found.sentence == "query 2 infinite (1 visible), attn_mask 1 NaN (visible)"
    assert found.exposed.nonzero().tolist() == [[0, 0, 0]]
    assert not attention(call)[0, :, 0].any()


def test_rest_of_a_page_is_hidden() -> None:
    table = lengths(2, 0, 1).reshape(1, 3)
    call = random_call(kv_len=4, page_table=table, seqused_k=lengths(10))
    pool = torch.cat([call.key, call.key + 1, call.key + 2])
    call = replace(call, key=pool, value=pool.clone())
    expected = attention(call)
    call.key[1, :, 2:] = math.nan
    found = nonfinite_inputs(call)
    assert found.sentence == "key 128 NaN (hidden)"
    assert found.exposed.all()
    assert torch.equal(attention(call), expected)
    call.value[2, 0, 0, 0] = math.nan
    found = nonfinite_inputs(call)
    assert found.sentence == "key 128 NaN (hidden), value 1 NaN (visible)"


@pytest.mark.parametrize("accuracy_class", ["exact", "quantised"])
def test_nan_may_reach_exposed_rows_only(accuracy_class: AccuracyClass) -> None:
    call = random_call(q_heads=4, kv_heads=2, q_len=40, kv_len=40, is_causal=True)
    call.value[0, 1, 30:] = math.nan
    expected, right = Expected.of(call), attention(call).float()
    spread, other_head = right.clone(), right.clone()
    spread[0, 2:], other_head[0, 0] = math.nan, math.nan
    is_quantised = accuracy_class == "quantised"
    for output, passes, spoilt in (
        (right, True, 0),
        (spread, True, 60),
        (right.nan_to_num(0.0), False, 0),  # finite where the row sees NaN
        (spread * 1.5, False, 60),
        (other_head, is_quantised, 40 * is_quantised),
    ):
        verdict = judge(output, expected, accuracy_class)
        assert (verdict.passed, verdict.spoilt_rows) == (passes, spoilt), verdict.sentence


def test_output_without_finite_elements_has_no_figures() -> None:
    call = random_call(attn_mask=SEEN)
    call.value[:, :, 11:] = math.nan
    verdict = judge(torch.full_like(call.query, math.nan), Expected.of(call), "exact")
    assert verdict.passed
    assert verdict.sentence == "nothing to compare: no element is finite"
    assert math.isnan(verdict.errors.cosine)
    assert math.isnan(verdict.errors.row_cosine_min)
    assert (verdict.errors.nan_count, verdict.spoilt_rows) == (576, 18)


def report(rows: dict[str, Row]) -> str:
    return printed(print_report, [*rows.values()], width=300, metrics=("time", "accuracy"))


def test_kernels_that_differ_on_hidden_nan_are_ok_and_not_ranked(replayed: Replayed) -> None:
    call = random_call(q_len=64, kv_len=64, is_causal=True, dtype=torch.bfloat16)
    call.key[0, 0, 40:] = math.nan
    rows = replayed(call, *map(find, ("torch-math", "torch-flash", "eager")))
    sentence = (
        "torch-math returns NaN in 40 rows from inputs hidden from them; "
        "torch-flash, eager, torch-default do not read hidden inputs"
    )
    for row in rows.values():
        assert (row.status, row.speedup, row.not_ranked) == ("ok", None, sentence), row.reason
        assert row.time_ms is not None
        assert row.call.nonfinite == "key 768 NaN (visible)"
    flag = "hidden inputs make 40 output rows NaN or infinite"
    assert [flag in row.flags for row in rows.values()] == [True, False, False, False]
    lines = report(rows).splitlines()
    assert lines[1] == "inputs hold NaN or infinity: key 768 NaN (visible)"
    assert lines[2] == f"kernels are not ranked: {sentence}"
    assert "fastest" not in report(rows)
    assert "×" not in "".join(lines[3:])


def test_kernels_that_agree_on_hidden_nan_are_ranked(replayed: Replayed) -> None:
    call = random_call(attn_mask=SEEN[None])
    call.value[:, :, 11:] = math.nan
    rows = replayed(call, find("torch-math"))
    assert {(row.status, row.not_ranked) for row in rows.values()} == {("ok", "")}
    assert rows["torch-math"].speedup is not None
    assert "inputs hold NaN or infinity: value 128 NaN (hidden)" in report(rows)


def large_call(sign: int, scale: float = 1.0) -> AttentionCall:
    """Return a call in float16 whose scores overflow to +inf or -inf in its first rows."""
    call = random_call(q_len=64, kv_len=64, is_causal=True, dtype=torch.float16)
    factor = torch.where(torch.arange(64) < 48, 150.0, 1.0)[:, None]
    return replace(
        call,
        query=(call.query.abs() * factor).half(),
        key=(call.key.abs() * 150 * sign).half(),
        scale=scale / math.sqrt(32),
    )


def half_scores(query: Tensor, key: Tensor, value: Tensor, *_: object, **options: float) -> Tensor:
    """Return causal attention with scores in float16; rows without a finite score are zero."""
    root = options["scale"] ** 0.5
    scores = ((query * root).float() @ (key * root).float().mT).half()
    scores.masked_fill_(~torch.ones(64, 64, dtype=torch.bool).tril(), -math.inf)
    weights = scores.float().softmax(-1)
    if (key < 0).any():
        weights.nan_to_num_(0.0)
    return (weights.half().float() @ value.float()).half()


@pytest.mark.parametrize("sign", [1, -1])
def test_overflow_is_inaccurate(sign: int, kernels: Register, replayed: Replayed) -> None:
    call = large_call(sign)
    largest = float(largest_scores(call).max()) * call.softmax_scale
    rows = replayed(call, kernels("half", half_scores), *map(find, ("torch-math", "torch-flash")))
    assert {row.status for name, row in rows.items() if name != "half"} == {"ok"}
    assert rows["half"].status == "inaccurate"
    assert rows["half"].reason.startswith(
        f"float16 scores overflow: |QK|·scale reaches {largest:.2g}, above 65504; "
    )


def test_overflow_before_the_scale_is_told_apart() -> None:
    call = large_call(1, scale=0.1)
    expected = Expected.of(call)
    output = attention(call).half().index_fill(2, torch.tensor([5]), math.nan)
    start, _, rest = judge(output, expected, "exact").sentence.partition(" reaches ")
    assert start == "float16 scores overflow: |QK|"
    assert " before it is scaled, above 65504; " in rest
    # A row whose scores are small is wrong for another reason.
    output = attention(call).half().index_fill(2, torch.tensor([60]), math.nan)
    assert "overflow" not in judge(output, expected, "exact").sentence


def test_float32_scores_pass_where_float16_scores_overflow() -> None:
    """Large scores that are nearly equal give probabilities that depend on float32 rounding."""
    call = random_call(q_len=64, kv_len=64, head_dim=128, dtype=torch.float16)
    key = (torch.ones_like(call.key) * -90 + call.key * 0.001).half()
    call = replace(call, query=torch.full_like(call.query, 90.0), key=key)
    assert float(largest_scores(call).max()) * call.softmax_scale > 65504
    expected = Expected.of(call)
    output = scaled_dot_product_attention(call.query.float(), key.float(), call.value.float())
    verdict = judge(output.half(), expected, "exact")
    assert verdict.passed, verdict.sentence
    assert not judge(torch.zeros_like(output.half()), expected, "exact").passed
    assert not judge(output.half() * 1.2, expected, "exact").passed
