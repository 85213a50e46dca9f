"""Kinds of call for other libraries' kernels, and the kinds on which each kernel is checked."""

import functools
from collections.abc import Callable, Collection
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor

from capture.call.attention_call import AttentionCall
from replay.accuracy.verdict import Expected, judge
from replay.kernels.registry import Kernel, ScaledCore, catalogue, find
from tests.replay.kernels.pairwise import Case, pairwise
from tests.variant_calls import LIBRARY_CALLS

_generator = torch.Generator().manual_seed(0)


def _some(*shape: int) -> Tensor:
    """Return a random mask that keeps about 70 % of the keys."""
    return torch.rand(shape, generator=_generator) < 0.7


def _padding(lengths: list[int], kv_len: int, side: str = "right") -> Tensor:
    """Return a mask (B, 1, 1, Sk) bool, True for keys that are not padding."""
    position = torch.arange(kv_len).flip(0) if side == "left" else torch.arange(kv_len)
    return (position < torch.tensor(lengths)[:, None])[:, None, None]


KINDS: dict[str, dict[str, Any]] = {
    "plain": {},
    "batch": {"batch": 2},
    "scale": {"scale": 0.3},
    "scale, batch": {"scale": 0.3, "batch": 2},
    "cross": {"batch": 2, "q_len": 130, "kv_len": 150},
    "causal": {"is_causal": True},
    "causal, batch": {"is_causal": True, "batch": 2},
    "causal, longer keys": {"is_causal": True, "kv_len": 150},
    "grouped": {"q_heads": 4, "kv_heads": 2},
    "grouped, causal, batch": {"q_heads": 6, "kv_heads": 2, "batch": 2, "is_causal": True},
    "decode": {"batch": 2, "q_heads": 8, "kv_heads": 2, "q_len": 1, "kv_len": 133},
    "decode of one": {"q_len": 1, "kv_len": 48},
    "decode, scale": {"batch": 2, "q_len": 1, "kv_len": 48, "scale": 0.3},
    "padded right": {"batch": 2, "attn_mask": _padding([130, 77], 130)},
    "padded left": {"batch": 2, "attn_mask": _padding([60, 130], 130, "left")},
    "padded decode": {
        "batch": 2,
        "q_heads": 4,
        "kv_heads": 2,
        "q_len": 1,
        "attn_mask": _padding([60, 130], 130, "left"),
    },
    "padded, scale": {"batch": 2, "scale": 0.3, "attn_mask": _padding([130, 77], 130)},
    "bool mask": {"attn_mask": _some(130, 130)},
    "bool mask, batch": {"attn_mask": _some(2, 1, 130, 136), "batch": 2, "kv_len": 136},
    "bool mask, grouped": {
        "attn_mask": _some(130, 136),
        "q_heads": 4,
        "kv_heads": 2,
        "kv_len": 136,
    },
    "mask by head": {"attn_mask": _some(1, 2, 130, 136), "kv_len": 136},
    "float mask": {
        "attn_mask": torch.randn(1, 1, 130, 136, generator=_generator).half(),
        "kv_len": 136,
    },
    "narrow values": {"v_head_dim": 32},
    "head_dim 96": {"head_dim": 96},
    "head_dim 80": {"head_dim": 80},
    "bfloat16": {"dtype": torch.bfloat16},
    "float32": {"dtype": torch.float32},
}
"""Differences of each kind from a float16 call with 2 heads, 130 queries and head_dim 64."""

MASKED = tuple(kind for kind, changes in KINDS.items() if "attn_mask" in changes)

REFUSED = {
    "causal, longer keys": (
        "causal with 130 queries and 150 keys: the kernel aligns it bottom right, SDPA top left"
    ),
    "float32": "dtype float32: needs float16 or bfloat16",
    "narrow values": "value head_dim 32 differs from query head_dim 64",
    **dict.fromkeys(MASKED, "takes no attn_mask"),
}
"""Reasons of most libraries for not supporting a kind of call, keyed by the kind."""

LAYOUTS: dict[str, Callable[[Tensor], Tensor]] = {
    "contiguous": lambda x: x,
    "model's": lambda x: x.transpose(1, 2).contiguous().transpose(1, 2),
    "elements apart": lambda x: x.mT.contiguous().mT,
}
"""Functions that change a tensor's memory layout to BHSD, to BSHD (as in models), or to BHDS."""

QUANTISING = ("cudnn-fp8", "fa3-fp8")
"""Kernels whose adapters quantise. Other libraries quantise themselves; their stand-ins do not."""

VARIANTS = {
    "fa3": ("a tensor", "a tuple"),
    "fa3-fp8": ("a tensor", "a tuple"),
    "fa3-varlen": ("a tensor", "a tuple"),
    "fa3-kvcache": ("a tensor", "a tuple"),
    "sage1": ("", "smooth_k=off"),
    "sage2-varlen": ("", "smooth_k=off"),
    "sage3": ("", "mean=block", "mean=sequence"),
    "sparge": ("", "topk=0.25"),
}
"""Variants of kernels: their options, or the types that their library returns."""


@functools.cache
def expected(kind: str) -> tuple[AttentionCall, Expected]:
    """Return a random call of a kind and its expected output. Kernels get copies of the call."""
    sizes = {"batch": 1, "q_heads": 2, "q_len": 130, "head_dim": 64, "dtype": torch.float16}
    sizes |= KINDS[kind]
    sizes = {"kv_heads": sizes["q_heads"], "v_head_dim": sizes["head_dim"], **sizes}
    mask, fields = sizes.get("attn_mask"), ("attn_mask", "is_causal", "scale")
    sizes.setdefault("kv_len", sizes["q_len"] if mask is None else mask.shape[-1])
    generator = torch.Generator().manual_seed(0)

    def normal(*names: str) -> Tensor:
        shape = [sizes[name] for name in ("batch", *names)]
        return torch.randn(shape, generator=generator).to(sizes["dtype"])

    call = AttentionCall(
        normal("q_heads", "q_len", "head_dim"),
        normal("kv_heads", "kv_len", "head_dim"),
        normal("kv_heads", "kv_len", "v_head_dim"),
        enable_gqa=sizes["q_heads"] != sizes["kv_heads"],
        **{name: sizes[name] for name in fields if name in sizes},
    )
    return call, Expected.of(call)


def call_of(kind: str, layout: str = "contiguous") -> AttentionCall:
    """Return a copy of the random call of a kind, with the given memory layout."""
    call = expected(kind)[0].to("cpu")
    tensors = {name: LAYOUTS[layout](getattr(call, name)) for name in ("query", "key", "value")}
    return call.with_tensors(tensors)


@functools.cache
def every_case() -> list[Case]:
    """Return all cases that kernels of other libraries support, as (kernel, variant, kind, layout).

    The list is made once, because other tests register kernels.
    """
    return [
        (name, variant, kind, layout)
        for name, kernel in catalogue().items()
        if kernel.library not in ("torch", "triton") and not kernel.variant_of
        for kind in KINDS
        for layout in LAYOUTS
        if kernel.unsupported(call_of(kind, layout)) is None
        for variant in VARIANTS.get(name, ("",))
    ]


@functools.cache
def cases() -> list[Case]:
    return pairwise(every_case())


def check(name: str, kind: str, layout: str = "contiguous", has_core: bool = True) -> None:
    """Judge the kernel's drop-in and core on one call as the replay would."""
    kernel, right = find(name), expected(kind)[1]
    if kernel.prepare is not None and not has_core:
        with pytest.raises(NotImplementedError, match="core time"):
            kernel.prepare(call_of(kind, layout))
        kernel = replace(kernel, prepare=None)
    rule = "quantised" if name in QUANTISING else "exact"
    outputs = judge_call(kernel, lambda: call_of(kind, layout), right, rule, f"{kind}, {layout}")
    for which, output in outputs.items():
        if which == "drop-in" or name not in QUANTISING:
            assert output.dtype == expected(kind)[0].dtype
        assert output.shape == right.reference.shape


def judge_call(
    kernel: Kernel, make: Callable[[], AttentionCall], right: Expected, rule: str, kind: str
) -> dict[str, Tensor]:
    """Judge the drop-in and the core; each gets new tensors, because some kernels change them."""
    with torch.no_grad():
        outputs = {"drop-in": kernel.attention(**make().arguments())}
        if kernel.prepare is not None:
            core = kernel.prepare(make())
            outputs["core"] = core.product() if isinstance(core, ScaledCore) else core()
    for which, output in outputs.items():
        verdict = judge(output, right, rule)
        assert verdict.passed, f"{kernel.name} {which}, {kind}: {verdict.sentence}"
    return outputs


def verify(name: str, variant: str = "", without_core: Collection[str] = ()) -> dict[str, str]:
    """Check a kernel on its chosen calls; return the unsupported kinds with reasons."""
    option = f"[{variant}]" if "=" in variant else ""
    chosen = [case[2:] for case in cases() if case[:2] == (name, variant)]
    assert chosen, f"{name} is checked on nothing"
    for kind, layout in chosen:
        check(name + option, kind, layout, has_core=kind not in without_core)
    unsupported = find(name + option).unsupported
    reasons = {kind: unsupported(call_of(kind)) for kind in KINDS}
    return {kind: reason for kind, reason in reasons.items() if reason is not None}


DENSE = {
    "bottom right",
    "bottom right, batch",
    "bottom right, decode",
    "window, causal",
    "window, causal, longer keys",
    "window, decode",
    "window, left",
    "window, both ways",
    "window, left and none after",
}
"""Names of calls that SDPA cannot express because of a window or a bottom-right mask alone."""
CAPPED = {"soft cap", "soft cap, scale, batch", "soft cap, decode"}
SINKS = {"sinks", "sinks, window"}
PACKED = {"packed", "packed, bottom right", "packed, even", "packed, window"}
LENGTHS = {"key lengths", "key lengths, decode", "key lengths, bottom right", "key lengths, window"}


def verify_variants(name: str) -> set[str]:
    """Check a kernel on the calls beyond SDPA that it supports; return their names."""
    kernel = find(name)
    taken = {kind: call for kind, call in LIBRARY_CALLS.items() if kernel.refuses(call) is None}
    for kind, call in taken.items():
        make = functools.partial(call.to, "cpu")
        judge_call(kernel, make, Expected.of(call), kernel.accuracy_class, kind)
    return set(taken)
