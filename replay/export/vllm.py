"""vLLM: one attention backend, and the layers whose cache is in FP8, as arguments of `vllm.LLM`.

vLLM has one backend for all layers, prefill and decode; our kernels of one backend count as one
kernel. The format of the cache can differ: in layers whose every call had an FP8 cache and keeps
the kernel for it, the cache is in FP8, and in all others, which vLLM skips, in 16 bits. Read from
vLLM 0.22.1 (`AttentionConfig`, `CacheConfig`, `AttentionBackendEnum`). Newer versions also take a
backend for each kind of layer (windows or not), which a plan does not tell apart.
"""

from __future__ import annotations

import json
import math
from collections.abc import Hashable
from dataclasses import replace
from typing import Any

from replay.export.assignment import assign, own_kernel
from replay.export.target import Ranges, Target
from replay.plan.plan import LayerChoice, Plan

FLASH_3, FP8 = "fa3-kvcache", "fa3-kvcache-fp8"

KERNELS = {
    "fa2-kvcache": "FLASH_ATTN 2",
    FLASH_3: "FLASH_ATTN 3",
    FP8: "FLASH_ATTN 3",
    "fa4-varlen": "FLASH_ATTN 4",
    "flashinfer-paged": "FLASHINFER",
    "flex": "FLEX_ATTENTION",
    "fa3-mla": "FLASH_ATTN_MLA",
    "flash-mla": "FLASHMLA",
    "flashinfer-mla": "FLASHINFER_MLA",
}
"""Backend, and version of FlashAttention, of a kernel."""

SAME = {
    **dict.fromkeys(("fa2", "fa2-varlen"), "fa2-kvcache"),
    **dict.fromkeys(("fa3", "fa3-varlen"), FLASH_3),
    "fa4": "fa4-varlen",
    "flashinfer-decode": "flashinfer-paged",
}
"""Kernels of the same backends, which run other phases or have their keys in one piece."""

ALL, IN_FP8 = "all layers", "layers with an FP8 cache"


def _alike(choice: LayerChoice) -> str | None:
    return None if choice.phase == "denoise" else ALL


def _adapt(plan: Plan, target: Target) -> tuple[Plan, Target]:
    """Name kernels by their backends, and separate layers with an FP8 cache if that saves more."""
    plan = replace(
        plan,
        baseline=SAME.get(plan.baseline, plan.baseline),
        choices=[
            replace(
                choice,
                kernel=SAME.get(choice.kernel, choice.kernel),
                baseline=SAME.get(choice.baseline, choice.baseline),
            )
            for choice in plan.choices
        ],
    )
    in_fp8 = _in_fp8(plan)

    def by_cache(choice: LayerChoice) -> Hashable | None:
        return IN_FP8 if choice.module in in_fp8 else _alike(choice)

    both = {name: KERNELS[name] for name in (FLASH_3, FP8)}
    separate = replace(target, kernels=both, place=by_cache)
    return plan, max((target, separate), key=lambda each: _saved_ms(plan, each))


def _in_fp8(plan: Plan) -> set[str]:
    """Return the modules whose caches are in FP8 in every phase."""
    others = {choice.module for choice in plan.choices if choice.kernel != FP8}
    return {choice.module for choice in plan.choices} - others


def _skipped(plan: Plan) -> list[int] | None:
    """Return the layers without an FP8 cache; None if a path has not exactly one number."""
    numbers = set()
    for module in {choice.module for choice in plan.choices} - _in_fp8(plan):
        found = [int(part) for part in module.split(".") if part.isdecimal()]
        if len(found) != 1:
            return None
        numbers.update(found)
    return sorted(numbers)


def _saved_ms(plan: Plan, target: Target) -> float:
    """Return the time that an export to the target saves; -inf if vLLM cannot run it."""
    ranges, losses = assign(plan, target)
    if target.place is not _alike:
        others = _kernel(plan, ranges, ALL) if ALL in ranges[0][1] else FLASH_3
        if others != FLASH_3 or _skipped(plan) is None:
            return -math.inf
    return plan.saved_ms - math.fsum(loss.lost_ms for loss in losses)


def _kernel(plan: Plan, ranges: Ranges, place: str) -> str:
    """Return the kernel in a place, or the model's own; empty if the layers have several of it."""
    ((_, kernel),) = ranges[0][1][place]
    own = {own_kernel(choice, plan) for choice in plan.choices}
    return kernel or (own.pop() if len(own) == 1 else "")


def _text(plan: Plan, ranges: Ranges, steps: int | None) -> str:
    arguments: dict[str, Any] = {}
    places = [place for place in (IN_FP8, ALL) if place in ranges[0][1]]
    kernels = [_kernel(plan, ranges, place) for place in places]
    if kernels and kernels[0] in KERNELS:
        backend, _, version = KERNELS[kernels[0]].partition(" ")
        arguments["attention_config"] = {"backend": backend}
        if version:
            arguments["attention_config"]["flash_attn_version"] = int(version)
    if FP8 in kernels:
        arguments["kv_cache_dtype"] = "fp8"
        if places[0] == IN_FP8 and (skipped := _skipped(plan)):
            arguments["kv_cache_dtype_skip_layers"] = [str(number) for number in skipped]
    return json.dumps(arguments, indent=2) + "\n"


TARGET = Target(
    "vllm",
    KERNELS,
    _alike,
    "all layers and phases",
    _text,
    has_steps=False,
    adapt=_adapt,
)
