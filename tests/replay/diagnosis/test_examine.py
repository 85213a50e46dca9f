"""Each kernel has one fault, and the doctor names its cause and its place."""

from __future__ import annotations

import contextlib
import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

from capture.call.attention_call import AttentionCall
from replay.accuracy.reference import attention
from replay.diagnosis.derived import HeadRows, gathered, part
from replay.diagnosis.examine import Examined, examine
from replay.diagnosis.poison import poisoned
from replay.isolation.process_state import ProcessState
from replay.kernels.registry import Kernel, find
from replay.rows.errors_of_output import AccuracyClass
from tests.factories import normal, random_call, settings
from tests.replay.diagnosis import faulty

BFLOAT16 = torch.bfloat16
SIZES: dict[str, Any] = {"batch": 2, "q_len": 40, "kv_len": 70}
MASK = normal(2, 1, 40, 70, seed=3) > -0.3
SQUARE = normal(2, 1, 48, 48, seed=4) > -0.3
ADDED = torch.zeros(2, 1, 40, 70).masked_fill(~MASK, -math.inf)
SLOPED = ADDED - normal(2, 1, 40, 70, seed=5).abs()


def call(**changes: Any) -> AttentionCall:
    return random_call(**{**SIZES, **changes})


def larger(made: AttentionCall, **factors: float) -> AttentionCall:
    return made.with_tensors({name: getattr(made, name) * by for name, by in factors.items()})


def with_sink(made: AttentionCall, at: int) -> AttentionCall:
    """Return a call in which every query scores one key far above the others."""
    direction = torch.nn.functional.normalize(normal(32, seed=6), dim=0)
    key = made.key.clone()
    key[:, :, at] = direction * 30
    query = made.query + direction * 4
    return made.with_tensors({"query": query.to(made.dtype), "key": key.to(made.dtype)})


def with_outlier(made: AttentionCall) -> AttentionCall:
    key = made.key.clone()
    key[..., 5] += 60
    return made.with_tensors({"key": key})


def with_alternating_outlier(made: AttentionCall) -> AttentionCall:
    """Return a call with an outlier channel of mean 0, so that subtracting the mean has no
    effect."""
    key = made.key.clone()
    key[:, :, ::2, 5] += 60
    key[:, :, 1::2, 5] -= 60
    return made.with_tensors({"key": key})


def examined(
    attention: Callable[..., Tensor], made: AttentionCall, kind: AccuracyClass = "exact"
) -> Examined:
    faulty.forget()
    # Unwritten memory may hold the right answer of an earlier kernel.
    filled = poisoned(0.7) if attention is faulty.rows_unwritten else contextlib.nullcontext()
    with torch.no_grad(), filled:
        return examine(Kernel("kernel", attention, kind), made, settings(), ProcessState())


def misreading(name: str) -> Callable[..., Tensor]:
    return faulty.with_mask(faulty.READINGS[name])


HEALTHY = {
    "plain": call(),
    "masked": call(dtype=BFLOAT16, attn_mask=MASK),
    "added": call(attn_mask=SLOPED),
    "late sink": with_sink(call(), 60),
    "outlier channel": with_outlier(call(dtype=BFLOAT16)),
    "causal, grouped": call(q_heads=4, kv_heads=2, is_causal=True),
    "one query": call(q_len=1),
    "large": larger(call(dtype=BFLOAT16), query=4.0, key=4.0),
}


@pytest.mark.parametrize("name", HEALTHY)
def test_correct_kernel_has_no_findings(name: str) -> None:
    assert examined(find("eager").attention, HEALTHY[name]) == Examined()


LARGE = larger(call(dtype=BFLOAT16), query=80.0, key=80.0)
OUTLIER = with_outlier(call(dtype=BFLOAT16))
SINK = with_sink(call(), 60)
GROUPED = call(q_heads=4, kv_heads=2)
CASES: dict[str, tuple[Callable[..., Tensor], AttentionCall, str]] = {
    "q·k past float16": (faulty.float16_scores, LARGE, "overflow"),
    "exp without a maximum": (
        faulty.no_maximum,
        larger(call(dtype=BFLOAT16), query=6.0, key=6.0),
        "overflow",
    ),
    "NaN made 0": (faulty.black, LARGE, "overflow"),
    "scores clamped": (
        faulty.clamped_scores,
        larger(call(dtype=BFLOAT16), query=4.0, key=4.0),
        "overflow",
    ),
    "values past float16": (
        faulty.float16_values,
        larger(call(dtype=BFLOAT16), value=1e5),
        "overflow",
    ),
    "outlier channel": (faulty.int8_keys, OUTLIER, "k-outlier-channel"),
    "additive mask ignored": (misreading("ignored"), call(attn_mask=SLOPED), "mask-ignored"),
    "causal ignored": (faulty.without_options, call(is_causal=True), "mask-ignored"),
    "causal ignored by one query": (
        faulty.without_options,
        call(q_len=1, is_causal=True),
        "mask-ignored",
    ),
    "inverted": (misreading("inverted"), call(attn_mask=MASK), "mask-misread"),
    "added": (misreading("added"), call(attn_mask=MASK), "mask-misread"),
    "multiplied": (faulty.multiplied, call(attn_mask=MASK), "mask-misread"),
    "shifted": (misreading("shifted"), call(attn_mask=MASK), "mask-misread"),
    "first batch": (misreading("first batch"), call(attn_mask=MASK), "mask-misread"),
    "transposed": (
        misreading("transposed"),
        call(q_len=48, kv_len=48, attn_mask=SQUARE),
        "mask-misread",
    ),
    "boolean": (misreading("not 0"), call(attn_mask=ADDED), "mask-misread"),
    "powers of 2": (misreading("log2"), call(attn_mask=SLOPED), "mask-misread"),
    "negated": (misreading("negated"), call(attn_mask=SLOPED), "mask-misread"),
    "late sink": (faulty.not_rescaled, SINK, "late-sink"),
    "changed": (faulty.scales_query, call(), "input-changed"),
    "unwritten": (faulty.rows_unwritten, call(), "output-unwritten"),
    "one buffer": (faulty.in_one_buffer, call(), "output-unwritten"),
    "keys left over": (faulty.tail_of_keys_dropped, call(), "odd-length"),
    "bottom right": (faulty.bottom_right, call(is_causal=True), "causal-alignment"),
    "bottom right, one query": (
        faulty.bottom_right,
        call(q_len=1, is_causal=True),
        "causal-alignment",
    ),
    "shifted diagonal": (faulty.without_itself, call(q_len=70, is_causal=True), "causal-alignment"),
    "by shape": (faulty.kept_by_shape, call(), "stale-graph"),
    "by address": (faulty.keys_kept_by_address, call(), "stale-graph"),
    "by the first element": (faulty.value_told_apart_by_its_first_element, call(), "stale-graph"),
    "captured memory": (faulty.first_memory, call(), "stale-graph"),
    "scale": (faulty.without_options, call(scale=0.3), "wrong-scale"),
    "heads": (faulty.heads_modulo, GROUPED, "head-mapping"),
    "one row": (faulty.one_row_off, call(), "unknown"),
    "flickering": (faulty.wrong_once, call(), "unknown"),
    "raises": (faulty.raises, call(), "unknown"),
}


@pytest.mark.parametrize("name", CASES)
def test_the_cause_is_named(name: str) -> None:
    attention, made, cause = CASES[name]
    found = examined(attention, made)
    assert found.evidence is not None
    assert found.evidence.cause == cause
    assert "untested" not in found.evidence.numbers


@pytest.mark.parametrize(
    ("attention", "made"),
    [(faulty.one_row_off, call()), (faulty.in_head(faulty.float16_scores, 1), LARGE)],
)
def test_the_head_is_named(attention: Callable[..., Tensor], made: AttentionCall) -> None:
    evidence = examined(attention, made).evidence
    assert evidence is not None
    assert evidence.place is not None
    assert evidence.place.head == 1


def test_evidence_has_the_numbers() -> None:
    for kernel, made, expected in (
        (faulty.int8_keys, OUTLIER, {"channel": 5, "way": "centred"}),
        (
            faulty.int8_keys,
            with_alternating_outlier(call(dtype=BFLOAT16)),
            {"channel": 5, "way": "removed"},
        ),
        (faulty.not_rescaled, SINK, {"key": 60}),
        (faulty.tail_of_keys_dropped, call(), {"multiple": 16, "lengths": "keys"}),
    ):
        evidence = examined(kernel, made).evidence
        assert evidence is not None
        assert evidence.numbers | expected == evidence.numbers


LOG2_E = 1 / math.log(2)


@pytest.mark.parametrize(
    ("factor", "name", "dtype"),
    [
        (1.46, "1.46", torch.float32),
        (1.4, "1.4", BFLOAT16),
        (0.667, "0.667", torch.float32),
        (LOG2_E, "log2 e", BFLOAT16),
    ],
)
def test_factor_is_named_only_if_it_fits(factor: float, name: str, dtype: torch.dtype) -> None:
    """Factors 1 % to 4 % from log2 e = 1.4427 change outputs as little as 8-bit rounding does."""
    evidence = examined(faulty.scaled_by(factor), call(scale=0.35, dtype=dtype)).evidence
    assert evidence is not None
    assert evidence.cause == "wrong-scale"
    times = f"times {name}:" if name == "log2 e" else f"which is {name} times as large"
    assert times in evidence.sentence
    kernel = faulty.with_mask(lambda mask: torch.where(mask == 0, mask, mask * factor))
    evidence = examined(kernel, call(attn_mask=SLOPED, dtype=dtype)).evidence
    assert evidence is not None
    assert evidence.cause == "mask-misread"
    assert evidence.sentence == f"the additive mask is multiplied by {name}"


@pytest.mark.parametrize(("given", "factor"), [(0.35, 0.5), (0.5, 2.1)])
def test_scale_is_not_mistaken_for_a_neighbouring_one(given: float, factor: float) -> None:
    """The given scales are near the known ones, 1/√D = 0.177 and 1."""
    evidence = examined(faulty.scaled_by(factor), call(scale=given)).evidence
    assert evidence is not None
    assert evidence.cause == "wrong-scale"
    assert f"the scale {given * factor:.3g} instead of {given}" in evidence.sentence


def test_equal_weights_are_not_mistaken_for_a_small_scale() -> None:
    """Any small enough scale gives equal weights, so the output does not determine the scale."""
    evidence = examined(lambda query, key, value, **_: value.mean(2, True).expand_as(query), call())
    assert evidence.evidence is not None
    assert evidence.evidence.cause == "unknown"


def test_unregistered_8_bit_kernel_is_recognised() -> None:
    made = call(dtype=BFLOAT16)
    evidence = examined(faulty.float8_values, made).evidence
    assert evidence is not None
    assert evidence.numbers["passes_as_quantised"]
    assert examined(faulty.float8_values, made, "quantised") == Examined()


def test_a_part_of_a_call_is_the_same_attention() -> None:
    made = call(q_heads=4, kv_heads=2, is_causal=True, q_len=70, attn_mask=None)
    place = HeadRows(1, 3, torch.tensor([0, 7, 69]))
    torch.testing.assert_close(attention(part(made, place))[0, 0], attention(made)[1, 3, place[2]])


def test_gathered_rows_take_their_mask_along() -> None:
    made = call(attn_mask=MASK)
    order = torch.randperm(70, generator=torch.Generator().manual_seed(0))
    torch.testing.assert_close(attention(gathered(made, keys=order)), attention(made))
    queries = torch.tensor([5, 5, 1])
    torch.testing.assert_close(
        attention(gathered(made, queries=queries)), attention(made)[:, :, queries]
    )


NO_KEY_SEEN = {
    "no keys": call(kv_len=0),
    "no keys, mask": call(kv_len=0, attn_mask=torch.ones(40, 0, dtype=torch.bool)),
    "no keys, causal": call(kv_len=0, is_causal=True),
    "all masked": call(attn_mask=torch.zeros(40, 70, dtype=torch.bool)),
}


@pytest.mark.parametrize(
    ("number", "what", "kind"), [(math.nan, "NaN", "exact"), (1.0, "something else", "quantised")]
)
@pytest.mark.parametrize("name", NO_KEY_SEEN)
def test_outputs_of_queries_without_keys_are_checked(
    name: str, number: float, what: str, kind: AccuracyClass
) -> None:
    def fills(query: Tensor, **arguments: Any) -> Tensor:
        return torch.full_like(query, number)

    assert examined(find("eager").attention, NO_KEY_SEEN[name]) == Examined()
    found = examined(fills, NO_KEY_SEEN[name], kind).evidence
    assert found is not None
    where = "queries whose keys are all masked" if name == "all masked" else "the call has no keys"
    assert where in found.sentence
    assert f"get {what}, where SDPA returns zeros" in found.sentence
