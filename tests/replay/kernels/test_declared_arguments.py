"""A user's function declares only the arguments that its kernel needs."""

import ast
import functools
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F

import attention_replay as ar
from replay.kernels.declared_arguments import SignatureError, check_source
from replay.kernels.registry import find, of_function, register_kernel
from tests.factories import random_call
from tests.variant_calls import in_float8

PLAIN = random_call(kv_len=9)
MASK = torch.ones(9, 9, dtype=torch.bool).tril()
CALLS = {
    "plain": PLAIN,
    "mask": replace(PLAIN, attn_mask=MASK),
    "bias": replace(PLAIN, attn_mask=torch.zeros(9, 9).masked_fill(~MASK, -9.0)),
    "causal": replace(PLAIN, is_causal=True),
    "scale": replace(PLAIN, scale=0.3),
    "heads": replace(random_call(kv_heads=1, kv_len=9), enable_gqa=True),
}
REASONS = {
    "mask": "takes no attn_mask",
    "bias": "takes no attn_mask",
    "causal": "takes no causal calls",
    "scale": "takes no scale: always 1/sqrt(head_dim), not 0.3",
    "heads": "2 query heads over 1 key heads: needs equal numbers",
}
MOST = "query, key, value, attn_mask=None, dropout_p=0.0, is_causal=False, scale=None"
FORMS: dict[str, tuple[str, set[str]]] = {
    "q, k, v": ("q, k, v", set()),
    "q, k, v, block=64, /": ("q, k, v", set()),
    "*tensors": ("*tensors", set()),
    "q, k, v, causal, sm_scale": ("q, k, v, is_causal=causal, scale=sm_scale", {"causal", "scale"}),
    "q, k, v, sm_scale=1.0, /": ("q, k, v, scale=sm_scale", {"scale"}),
    "Q, K, V, *, Mask": ("Q, K, V, Mask", {"mask", "bias"}),
    "queries, keys, values, bias=None": ("queries, keys, values, bias", {"bias"}),
    MOST: (
        ", ".join(part.partition("=")[0] for part in MOST.split(", ")[:6]) + ", scale=scale",
        {*REASONS} - {"heads"},
    ),
    "q, k, v, **others": ("q, k, v, **others", set(REASONS)),
    "*arguments, **others": ("*arguments, **others", set(REASONS)),
}
"""Declared parameters, with SDPA's arguments made of them and the calls that the function takes."""


def function_of(parameters: str, arguments: str) -> Callable[..., Any]:
    names: dict[str, Any] = {"sdpa": F.scaled_dot_product_attention}
    exec(f"def attend({parameters}):\n    return sdpa({arguments})", names)
    function: Callable[..., Any] = names["attend"]
    return function


@pytest.mark.parametrize(("parameters", "form"), FORMS.items(), ids=range(len(FORMS)))
def test_calls_are_right_or_refused(parameters: str, form: tuple[str, set[str]]) -> None:
    arguments, taken = form
    kernel = of_function("own", function_of(parameters, arguments))
    for name, call in CALLS.items():
        if name in {"plain", *taken}:
            assert kernel.refuses(call) is None
            expected = F.scaled_dot_product_attention(**call.arguments())
            assert torch.equal(kernel.attention(**call.arguments()), expected)
        else:
            is_bool = name == "mask" and "bias" in taken
            assert kernel.refuses(call) == ("takes no bool attn_mask" if is_bool else REASONS[name])


def test_a_scale_that_is_not_declared_is_refused() -> None:
    function = function_of("query, key, value, key_scale", "query, key, value")
    kernel = of_function("own", function, features=("scaled",))
    assert kernel.refuses(PLAIN) == "for calls with key_scale only"
    assert kernel.refuses(in_float8(PLAIN, "key")) is None
    assert kernel.refuses(in_float8(PLAIN, "key", "value")) == "takes no value_scale"


def test_all_of_sdpas_arguments_need_no_wrapper() -> None:
    function = function_of(f"{MOST}, enable_gqa=False", "query, key, value")
    general = functools.wraps(random_call)(function_of("*arguments, **others", ""))
    for each in (function, general, F.scaled_dot_product_attention):
        assert of_function("own", each).attention is each


class Tutorial(torch.autograd.Function):
    """Function of Triton's tutorial, whose `apply` takes positional arguments."""

    @staticmethod
    def forward(ctx: Any, q: Any, k: Any, v: Any, causal: Any, sm_scale: Any, warp: Any = 1) -> Any:
        return F.scaled_dot_product_attention(q, k, v, is_causal=causal, scale=sm_scale)


def test_apply_of_an_autograd_function_is_a_kernel() -> None:
    kernel = of_function("own", Tutorial.apply)
    assert kernel.refuses(CALLS["bias"]) == "takes no attn_mask"
    for name in ("plain", "causal", "scale"):
        given = CALLS[name].arguments()
        assert torch.equal(kernel.attention(**given), F.scaled_dot_product_attention(**given))


@pytest.mark.parametrize(
    ("parameters", "features", "wrong"),
    [
        ("query, key, value, window", (), "requires window: give it a default or drop it"),
        ("q, k, v, block", (), "requires block: give it a default or drop it"),
        ("x, y, z", (), "requires x: give it a default or drop it"),
        ("q, kv", (), "has no argument value: add it"),
        ("query, key, value", ("window",), "has no argument window: add it"),
    ],
)
def test_a_signature_that_cannot_work_is_one_sentence_with_a_stub(
    parameters: str, features: tuple[str, ...], wrong: str, kernels: Any
) -> None:
    function = function_of(parameters, "")
    sentence = rf"^attend {wrong}; a kernel may have any arguments of (def attend\(.*: \.\.\.)$"
    with pytest.raises(SignatureError, match=sentence) as raised:
        register_kernel("own", features=features)(function)
    stub: dict[str, Any] = {}
    exec(str(raised.value).partition(" arguments of ")[2], stub)
    assert of_function("own", stub["attend"]).attention is stub["attend"]
    if not features:
        with pytest.raises(SignatureError, match=sentence):
            check_source(ast.parse(f"def attend({parameters}): pass"), "attend")


@pytest.mark.parametrize(
    "source",
    [
        "@jit\ndef attend(x): pass",
        "@ar.register_kernel('own', features=('window',))\ndef attend(q, k, v, *, window): pass",
        "def attend(x): pass\ndef attend(q, k, v): pass",
        "def attend(x, y=1, *, z=2, **others): pass\nattend = other",
    ],
)
def test_a_signature_that_may_work_is_not_refused_before_it_is_imported(source: str) -> None:
    check_source(ast.parse(source), "attend")


def test_an_argument_beyond_sdpa_may_be_required(kernels: Any) -> None:
    function = function_of("q, k, v, *, seqused_k", "q, k, v")
    register_kernel("own", features=("key-lengths",))(function)
    kernel = find("own")
    used = replace(PLAIN, seqused_k=torch.tensor([9], dtype=torch.int32))
    assert kernel.refuses(PLAIN) == "for calls with seqused_k only"
    assert kernel.refuses(used) is None
    assert kernel.attention(**used.arguments()).shape == PLAIN.query.shape


def test_a_file_is_refused_before_it_is_imported(tmp_path: Path) -> None:
    file = tmp_path / "mine.py"
    file.write_text("def wrong(q, k, v, causal, block): ...\nraise SystemExit('imported')")
    sentence = r"mine.py:wrong': wrong requires block: .* def wrong\(query"
    with pytest.raises(ar.Error, match=sentence):
        ar.replay([PLAIN], kernels=f"{file}:wrong", device="cpu", progress=False)
