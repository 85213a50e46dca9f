"""Gradients are judged against a float64 reference, which equals autograd's on the formula."""

import math
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.nn.functional import scaled_dot_product_attention

from capture.call.attention_call import AttentionCall
from capture.call.attention_variant import AttentionVariant
from capture.call.gradients import GRADIENTS
from replay.accuracy.faulty_backward import FaultyBackward, Place
from replay.accuracy.gradient_reference import gradients
from replay.accuracy.gradient_verdict import judge_gradients
from tests.factories import normal, random_call

DOUBLE = torch.float64


def textbook(call: AttentionCall) -> Tensor:
    """Return attention by its formula, for autograd."""
    group = call.shape.q_heads // call.shape.kv_heads
    key, value = (each.repeat_interleave(group, 1) for each in (call.key, call.value))
    scores = call.query @ key.mT * call.softmax_scale
    if call.variant.softcap:
        scores = call.variant.softcap * torch.tanh(scores / call.variant.softcap)
    if call.attn_mask is not None and call.attn_mask.dtype == torch.bool:
        scores = scores.masked_fill(~call.attn_mask, -math.inf)
    elif call.attn_mask is not None:
        scores = scores + call.attn_mask
    place, ranges = torch.arange(key.shape[2]), map(call.key_ranges.of, range(call.shape.batch))
    seen = torch.stack(
        [(place >= first[:, None]) & (place < end[:, None]) for first, end in ranges]
    )
    scores = scores.masked_fill(~seen[:, None], -math.inf)
    total = scores.logsumexp(-1, keepdim=True)
    if call.sinks is not None:
        total = torch.logaddexp(total, call.sinks[:, None, None])
    return torch.exp(scores - total.masked_fill(total == -math.inf, 0.0)) @ value


def lengths(*values: int) -> Tensor:
    return torch.tensor(values, dtype=torch.int32)


SOME = normal(2, 1, 9, 13, seed=5) > 0
SOME[0, 0, 2] = False  # a query that sees no key
PACKED = {
    "cu_seqlens_q": lengths(0, 3, 3, 9),
    "cu_seqlens_k": lengths(0, 5, 7, 13),
    "variant": AttentionVariant(bottom_right=True, window=(4, None)),
}


@pytest.mark.parametrize(
    "options",
    [
        {},
        {"is_causal": True, "sinks": normal(4, dtype=DOUBLE)},
        {"variant": AttentionVariant(window=(2, 1)), "scale": -0.3},
        {"attn_mask": SOME},
        {"attn_mask": normal(1, 4, 9, 13, dtype=DOUBLE)},
        {
            "attn_mask": normal(2, 1, 1, 13, dtype=DOUBLE),
            "variant": AttentionVariant(softcap=1.5),
            "sinks": normal(4, dtype=DOUBLE),
        },
        {"seqused_k": lengths(5, 13)},
        {"batch": 1, "is_causal": True, **PACKED},
    ],
)
@pytest.mark.parametrize("kv_heads", [2, 4])
def test_reference_equals_autograd(options: dict[str, Any], kv_heads: int) -> None:
    sizes = {"q_heads": 4, "kv_heads": kv_heads, "head_dim": 5, "v_head_dim": 3, "dtype": DOUBLE}
    call = random_call(**{"batch": 2, **sizes, **options})
    given = call.tensors()
    leaves = {n: t.clone().requires_grad_() for n, t in given.items() if t.dtype == DOUBLE}
    output = textbook(call.with_tensors(leaves))
    upper = normal(*output.shape, dtype=DOUBLE, seed=1)
    expected = torch.autograd.grad(output, list(leaves.values()), upper)
    for block in (None, 30):
        found = gradients(call, upper, block_elements=block)
        for name, gradient in zip(leaves, expected, strict=True):
            values = found[name].values.reshape(gradient.shape)
            torch.testing.assert_close(values, gradient, rtol=1e-12, atol=1e-12)
    place = Place(0, 1, 4 // kv_heads)
    right = FaultyBackward.of(replace(call, grad_output=upper), place)
    expected = place.of({name: found[name].values for name in ("query", "key", "value")})
    for is_normalised in (False, True):  # without a bug, both are right
        values = right.summed(right.gradients(is_normalised=is_normalised))
        torch.testing.assert_close(values, expected, rtol=1e-12, atol=1e-12)


def honest(call: AttentionCall, backend: SDPBackend = SDPBackend.MATH) -> dict[str, Tensor]:
    """Return the gradients of one of PyTorch's backends."""
    names = ("query", "key", "value")
    leaves = {name: getattr(call, name).clone().requires_grad_() for name in names}
    if call.attn_mask is not None and call.attn_mask.is_floating_point():
        leaves["attn_mask"] = call.attn_mask.clone().requires_grad_()
    with sdpa_kernel(backend):
        output = scaled_dot_product_attention(**{**call.arguments(), **leaves})
    output.backward(call.grad_output)
    return {name: leaf.grad for name, leaf in leaves.items() if leaf.grad is not None}


def call_with_upper(dtype: torch.dtype, size: float = 1.0, **options: Any) -> AttentionCall:
    sizes = {"batch": 2, "q_heads": 4, "kv_heads": 2, "q_len": 70, "kv_len": 70}
    call = random_call(**{**sizes, "dtype": dtype, **options})
    upper = normal(*call.query.shape[:3], call.shape.v_head_dim, seed=9) * size
    return replace(call, grad_output=upper.to(dtype))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("backend", [SDPBackend.MATH, SDPBackend.FLASH_ATTENTION])
@pytest.mark.parametrize("size", [1.0, 1e-6])  # float16 has subnormal gradients at 1e-6
def test_pytorchs_gradients_pass(dtype: torch.dtype, backend: SDPBackend, size: float) -> None:
    mask = SOME[:, :, :1, :1].expand(2, 1, 70, 70).clone()
    mask[:, :, 1] = True
    float_mask = normal(1, 4, 70, 70, dtype=dtype)
    options: list[dict[str, Any]] = [{"is_causal": True}, {"attn_mask": mask}]
    if backend == SDPBackend.MATH:
        options.append({"attn_mask": float_mask})
    for option in options:
        call = call_with_upper(dtype, size, **option)
        verdict = judge_gradients(call, honest(call, backend))
        assert verdict.passed, str(verdict)


def of_another_call(**changes: Any) -> Callable[[AttentionCall], dict[str, Tensor]]:
    return lambda call: honest(replace(call, **changes))


def diagonal_off_by_one(call: AttentionCall) -> dict[str, Tensor]:
    lower = torch.ones(call.shape.q_len, call.shape.kv_len, dtype=torch.bool).tril(1)
    return honest(replace(call, is_causal=False, attn_mask=lower[None, None]))


def stale_keys(call: AttentionCall) -> dict[str, Tensor]:
    key = call.key.clone()
    key[:, :, 32:48] = key[:, :, 16:32]
    return honest(replace(call, key=key))


def swapped(call: AttentionCall) -> dict[str, Tensor]:
    found = honest(call)
    return {**found, "key": found["value"], "value": found["key"]}


def mean_of_group(call: AttentionCall) -> dict[str, Tensor]:
    return {name: each / (1 + (name != "query")) for name, each in honest(call).items()}


def other_layout(call: AttentionCall) -> dict[str, Tensor]:
    found = honest(call)
    return {**found, "query": found["query"].transpose(1, 2).reshape(found["query"].shape)}


def random_query(call: AttentionCall) -> dict[str, Tensor]:
    found = honest(call)
    return {**found, "query": normal(*found["query"].shape, seed=3).to(call.dtype)}


def other_heads(call: AttentionCall) -> dict[str, Tensor]:
    """Sum dV over query heads 0 and 2, and 1 and 3, as if the heads of a group alternated."""
    key, value = (each.repeat_interleave(2, 1) for each in (call.key, call.value))
    of_heads = honest(replace(call, key=key, value=value, enable_gqa=False))["value"]
    return {**honest(call), "value": of_heads.unflatten(1, (2, 2)).sum(1)}


ALL = {"grad_query", "grad_key", "grad_value"}


@pytest.mark.parametrize(
    ("bug", "wrong", "cause"),
    [
        (diagonal_off_by_one, ALL, "the diagonal is wrong: each query sees one key too many"),
        (of_another_call(is_causal=False), ALL, "the mask is ignored"),
        (stale_keys, ALL, "keys 32 to 47 are stale: they are those 16 keys before"),
        (swapped, ALL - {"grad_query"}, "the gradients of key and value are exchanged"),
        (mean_of_group, ALL - {"grad_query"}, "grad_key is 0.5 × the right one and grad_value is"),
        (other_layout, {"grad_query"}, "gradients are written as (B, S, H, D), but read as (B, H"),
        (
            other_heads,
            {"grad_value"},
            "grad_value of key head ",
        ),
        (random_query, {"grad_query"}, ""),
    ],
)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_wrong_gradients_are_named(
    bug: Callable[[AttentionCall], dict[str, Tensor]],
    wrong: set[str],
    cause: str,
    dtype: torch.dtype,
) -> None:
    call = call_with_upper(dtype, is_causal=True)
    recorded = {GRADIENTS[name]: each for name, each in bug(call).items()}
    verdict = judge_gradients(call.with_tensors(recorded))
    assert set(verdict.wrong) == wrong
    assert verdict.cause.startswith(cause)
    if bug is other_heads:
        head = int(verdict.cause[len(cause)])
        assert verdict.cause[len(cause) + 1 :] == (
            f" sums query heads [{head}, {head + 2}] instead of [{2 * head}, {2 * head + 1}], "
            "as if query head i had key head i % 2"
        )
    assert bool(verdict.cause) == bool(cause)


def test_unusable_calls_are_refused() -> None:
    call = call_with_upper(torch.float32)
    for changed, reason in (
        (replace(call, grad_output=None), "backward=True"),
        (call, "no gradients to judge"),
        (replace(call, dropout_p=0.5), "dropout"),
        (replace(call, value=call.value * math.nan), "value .* NaN"),
    ):
        found = {} if changed is call else {"query": call.query}
        with pytest.raises(ValueError, match=reason):
            judge_gradients(changed, found)
