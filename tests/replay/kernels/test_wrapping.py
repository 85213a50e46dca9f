"""Adapters are wrapped in SDPA's signature, and equal reasons have equal wording."""

import inspect
import re
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn.attention.bias import causal_lower_right, causal_upper_left

from capture.call.attention_call import AttentionCall
from capture.call.attention_variant import FEATURES as KNOWN
from capture.call.attention_variant import VARIANT_TENSORS, AttentionVariant
from capture.hooks.interceptor import Arguments, bind
from replay.kernels.constraints import no_mask
from replay.kernels.registry import Kernel, catalogue
from replay.kernels.wrapping import drop_in
from tests.factories import random_call


def test_signature_is_sdpas() -> None:
    signature = inspect.signature(drop_in(lambda call: call.query, ()))
    *sdpas, beyond = signature.parameters.values()
    assert sdpas == list(inspect.signature(bind).parameters.values())
    assert beyond.kind is inspect.Parameter.VAR_KEYWORD


class Recorder(list[Arguments]):
    """Adapter that records the arguments that its drop-in passes."""

    def __call__(self, arguments: Arguments) -> Tensor:
        self.append(arguments)
        return arguments.query


def test_a_causal_bias_is_what_it_says_and_no_mask() -> None:
    """The memory of a causal bias tensor is uninitialised."""
    call = random_call(q_len=5, kv_len=9)
    tensors = (call.query, call.key, call.value)
    seen = Recorder()
    attention = drop_in(seen, (no_mask,), ("bottom-right",))
    attention(*tensors, causal_upper_left(5, 9))
    attention(*tensors, causal_lower_right(5, 9))
    assert [(each.attn_mask, each.is_causal, each.variant.bottom_right) for each in seen] == [
        (None, True, False),
        (None, True, True),
    ]
    with pytest.raises(NotImplementedError, match="bottom right"):
        drop_in(seen, (no_mask,))(*tensors, causal_lower_right(5, 9))


PADDING = torch.arange(160) < torch.tensor([[90], [160]])
BASES: list[dict[str, Any]] = [
    {"q_len": 160, "batch": 2},
    {"q_len": 1, "batch": 2},
    {"q_len": 160, "batch": 2, "attn_mask": PADDING[:, None, None]},
]
"""Basic calls; a kernel supports at least one of them, or no call that SDPA has arguments for."""

FEATURES: dict[str, tuple[dict[str, Any], str]] = {
    "dropout": ({"dropout_p": 0.1}, "dropout makes the output random, so it cannot be judged"),
    "mask": (
        {"attn_mask": torch.rand(160) < 0.5},
        "takes no attn_mask|takes a padding mask only: .*",
    ),
    "float mask": (
        {"attn_mask": torch.zeros(160)},
        r"takes no attn_mask|takes a bool (padding|attn_)\w* ?\w* only, not float32",
    ),
    "mask by head": (
        {"attn_mask": torch.rand(1, 2, 1, 160) < 0.5},
        "takes no attn_mask|takes a padding mask only: .*|takes one attn_mask for all heads",
    ),
    "causal": (
        {"is_causal": True},
        "takes no causal calls|causal with .* bottom right, SDPA top left"
        "|takes no attn_mask in causal calls",
    ),
    "mask and causal": (
        {"is_causal": True, "attn_mask": PADDING[:, None, None]},
        "takes no attn_mask in causal calls|takes no attn_mask|takes no causal calls"
        "|attn_mask beside a causal mask, a window or lengths of keys",
    ),
    "scale": ({"scale": 0.3}, r"takes no scale: always 1/sqrt\(head_dim\), not 0.3"),
    "negative scale": (
        {"scale": -1.0},
        r"takes no scale: always 1/sqrt\(head_dim\), not -1|scale -1: must not be negative",
    ),
    "grouped": (
        {"q_heads": 4, "kv_heads": 2},
        "4 query heads over 2 key heads: needs equal numbers",
    ),
    "narrow values": ({"v_head_dim": 32}, "value head_dim 32 differs from query head_dim 64"),
    "odd head_dim": ({"head_dim": 60}, "head_dim 60: (needs|at most) .*"),
    "large head_dim": ({"head_dim": 512}, "head_dim 512: (needs|at most) .*"),
    "float32": ({"dtype": torch.float32}, "dtype float32: needs [a-z0-9, ]* or [a-z0-9]*"),
    "float64": ({"dtype": torch.float64}, "dtype float64: needs [a-z0-9, ]* or [a-z0-9]*"),
    "queries": ({"q_len": 150, "kv_len": 160}, "decode only: .* per sequence, not 150"),
}
"""Changes to a call that a kernel may not support, and the sentence that explains why."""

COMMON: dict[str, Any] = {"kv_len": 160, "head_dim": 64, "dtype": torch.float16}


def base_of(kernel: Kernel) -> dict[str, Any] | None:
    """Return what a call needs that the kernel supports; None if it supports no SDPA call."""
    calls = (each for each in BASES if kernel.unsupported(random_call(**COMMON, **each)) is None)
    return next(calls, None)


ADAPTED = [
    name
    for name, kernel in catalogue().items()
    if kernel.library and not kernel.variant_of
    if not name.startswith("torch-") and base_of(kernel) is not None
]
"""Kernels of libraries. Two kinds are left out: wrappers of PyTorch's SDPA, which repeat PyTorch's
reasons, and kernels that support no SDPA call."""


def supported(kernel: Kernel, **changes: Any) -> AttentionCall:
    """Return a base call that the kernel supports, with some changes."""
    return random_call(**{**COMMON, **(base_of(kernel) or {}), **changes})


@pytest.mark.parametrize("name", ADAPTED)
def test_one_reason_has_one_sentence(name: str) -> None:
    kernel = catalogue()[name]
    for feature, (changes, sentence) in FEATURES.items():
        reason = kernel.unsupported(supported(kernel, **changes))
        if reason is not None:
            assert re.fullmatch(sentence, reason), f"{feature}: {reason}"


@pytest.mark.parametrize("name", ["torch-math", "torch-default-compiled", "torch-fa3"])
@pytest.mark.parametrize("feature", ["dropout", "mask and causal"])
def test_limits_unchecked_by_pytorch_are_refused(name: str, feature: str) -> None:
    changes, sentence = FEATURES[feature]
    reason = catalogue()[name].unsupported(
        random_call(q_len=160, kv_len=160, batch=2, dtype=torch.float16, **changes)
    )
    assert re.fullmatch(sentence, reason)


@pytest.mark.parametrize("name", ADAPTED)
def test_no_drop_in_ignores_an_argument(name: str) -> None:
    """The drop-in checks its arguments even if `unsupported` was not called."""
    kernel = catalogue()[name]
    for feature in ("dropout", "mask", "causal", "mask and causal", "scale"):
        call = supported(kernel, **FEATURES[feature][0])
        reason = kernel.unsupported(call)
        # Masks are not checked for padding at every call, because a check would wait for the GPU.
        if reason is not None and "padding mask" not in reason:
            with pytest.raises(NotImplementedError, match="^" + re.escape(reason)):
                kernel.attention(**call.arguments())


def test_arguments_beyond_sdpas_arrive_by_name() -> None:
    call = random_call()
    tensors = (call.query, call.key, call.value)
    seen = Recorder()
    attention = drop_in(seen, (), KNOWN)
    beyond: dict[str, Any] = {
        name: torch.zeros(dims * [1]) for name, dims in VARIANT_TENSORS.items()
    }
    window = AttentionVariant(window=(3, 0), softcap=2.0)
    attention(*tensors, **beyond, window=(3, 0), softcap=2.0)
    assert seen[0] == bind(*tensors)._replace(**beyond, variant=window)
    lower_right = causal_lower_right(5, 9)
    attention(call.query[..., :5, :], *tensors[1:], lower_right, window=(3, 0))
    assert seen[1].variant == AttentionVariant(bottom_right=True, window=(3, 0))
    for name in ("sinks", "cu_seqlens_q", "seqused_k", "page_table"):
        with pytest.raises(NotImplementedError, match="has no"):
            drop_in(seen, ())(*tensors, **{name: beyond[name]})
    with pytest.raises(TypeError, match="windows"):
        attention(*tensors, windows=(3, 0))
