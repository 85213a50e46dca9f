"""vLLM: attention backends, and the layers whose cache is in FP8, as arguments of `vllm.LLM`.

vLLM has one backend for all layers, prefill and decode; our kernels of one backend count as one
kernel. From 0.26 on, layers with a sliding window may have another backend than layers without. The
export uses this only if it saves more. The format of the cache can differ: in layers whose every
call had an FP8 cache and keeps the kernel for it, the cache is in FP8, and in all others, which
vLLM skips, in 16 bits. Read from vLLM 0.22.1 and 0.27.1 (`AttentionConfig`, `CacheConfig`,
`AttentionBackendEnum`, `KVCacheSpecKind`).
"""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Collection, Iterable
from dataclasses import replace
from typing import Any, NamedTuple

from replay.export.assignment import assign, own_kernel
from replay.export.target import Ranges, Target
from replay.plan.key_lengths import KernelsByLength
from replay.plan.plan import LayerChoice, Plan

FLASH_3, FLASH, FP8 = "fa3-kvcache", "vllm-flash-attn", "fa3-kvcache-fp8"

KERNELS = {
    "fa2-kvcache": "FLASH_ATTN 2",
    FLASH_3: "FLASH_ATTN 3",
    FP8: "FLASH_ATTN 3",
    FLASH: "FLASH_ATTN",
    "vllm-triton": "TRITON_ATTN",
    "fa4-varlen": "FLASH_ATTN 4",
    "flashinfer-paged": "FLASHINFER",
    "flex": "FLEX_ATTENTION",
    "fa3-mla": "FLASH_ATTN_MLA",
    "flash-mla": "FLASHMLA",
    "flashinfer-mla": "FLASHINFER_MLA",
}
"""Backend of a kernel, and version of FlashAttention, if it is not the one that vLLM chooses."""

SAME = {
    **dict.fromkeys(("fa2", "fa2-varlen"), "fa2-kvcache"),
    **dict.fromkeys(("fa3", "fa3-varlen"), FLASH_3),
    "fa4": "fa4-varlen",
    "vllm-flash-attn-fp8": FP8,
    "flashinfer-decode": "flashinfer-paged",
}
"""Kernels of the same backends, which run other phases or have their keys in one piece."""

KINDS = {False: ("full_attention", "mla_attention"), True: ("sliding_window", "sliding_window_mla")}
"""Kinds of layers without and with a sliding window, and those of latent attention (MLA)."""


class Layers(NamedTuple):
    """Layers that share a kernel."""

    modules: frozenset[str]
    has_window: bool | None = None
    """Kind of the layers; None for all layers that share a backend."""


def _in(groups: Collection[Layers]) -> Callable[[LayerChoice], Layers | None]:
    """Return the function that finds the group of a choice."""

    def place(choice: LayerChoice) -> Layers | None:
        found = (each for each in groups if choice.module in each.modules)
        return None if choice.phase == "denoise" else next(found, None)

    return place


def _adapt(plan: Plan, target: Target) -> tuple[Plan, Target]:
    """Name kernels by their backends, and separate layers if that saves more."""
    plan = replace(
        plan,
        baseline=SAME.get(plan.baseline, plan.baseline),
        choices=[
            replace(
                choice,
                kernel=SAME.get(choice.kernel, choice.kernel),
                baseline=SAME.get(choice.baseline, choice.baseline),
                others=_others(choice, plan),
            )
            for choice in plan.choices
        ],
    )
    modules = frozenset(choice.module for choice in plan.choices)
    rest = frozenset(choice.module for choice in plan.choices if choice.kernel != FP8)
    by_cache = [Layers(modules - rest), Layers(rest)]
    by_kind = [
        Layers(frozenset(each.module for each in plan.choices if each.has_window is has), has)
        for has in KINDS
    ]
    possible = [replace(target, place=_in([Layers(modules)]))]
    if all(each.modules for each in by_cache):
        both = {name: KERNELS[name] for name in (FLASH_3, FLASH, FP8)}
        possible.insert(0, replace(target, kernels=both, place=_in(by_cache)))  # first of a tie
    if sorted(modules) == sorted(name for each in by_kind for name in each.modules):
        joins = "all layers of a kind, with windows or without"
        possible.append(replace(target, joins=joins, place=_in(by_kind)))
    return plan, max(possible, key=lambda each: _saved_ms(plan, each))


def _others(choice: LayerChoice, plan: Plan) -> dict[str, float]:
    """Return the times that other backends save at a layer, each with its fastest kernel.

    The times of a layer with an FP8 cache hold for this cache alone, which an export keeps only
    with the layer's own kernel.
    """
    own = own_kernel(choice, plan)
    if SAME.get(own, own) == FP8:
        return {}
    found: dict[str, float] = {}
    for kernel, saved_ms in choice.others.items():
        backend = SAME.get(kernel, kernel)
        found[backend] = max(saved_ms, found.get(backend, saved_ms))
    found.pop(SAME.get(own, own), None)
    return found


def _saved_ms(plan: Plan, target: Target) -> float:
    """Return the time that an export to the target saves; -inf if vLLM cannot run it."""
    ranges, losses = assign(plan, target)
    if _arguments(plan, ranges) is None:
        return -math.inf
    return plan.saved_ms - math.fsum(loss.lost_ms for loss in losses)


def _arguments(plan: Plan, ranges: Ranges) -> dict[str, Any] | None:
    """Return the arguments that give layers their kernels; None if vLLM cannot have these."""
    kernels = {layers: _kernel(plan, layers, found) for layers, found in ranges[0][1].items()}
    named = {layers: KERNELS.get(kernel, "") for layers, kernel in kernels.items()}
    versions = {version for name in named.values() if (version := name.partition(" ")[2])}
    of_kind = {(layers.has_window, name.partition(" ")[0]) for layers, name in named.items()}
    backends = dict(of_kind)
    if len(versions) > 1 or len(backends) < len(of_kind):
        return None
    config: dict[str, Any] = {}
    if len({*backends.values()}) > 1:
        per_kind = {
            KINDS[kind][name.endswith("MLA")]: name for kind, name in backends.items() if name
        }
        config |= {"backend": "auto", "backend_per_kind": per_kind}
    elif any(backends.values()):
        (config["backend"],) = {*backends.values()}
    if versions:
        config["flash_attn_version"] = int(versions.pop())
    arguments: dict[str, Any] = {"attention_config": config} if config else {}
    if FP8 in kernels.values():
        in_16_bits = [layers.modules for layers, kernel in kernels.items() if kernel != FP8]
        skipped = _numbers(frozenset[str]().union(*in_16_bits))
        if skipped is None:
            return None
        arguments["kv_cache_dtype"] = "fp8"
        if skipped:
            arguments["kv_cache_dtype_skip_layers"] = skipped
    return arguments


def _kernel(plan: Plan, layers: Layers, found: KernelsByLength) -> str:
    """Return the kernel of layers, or the model's own; empty if they have several of it."""
    ((_, kernel),) = found
    own = {own_kernel(choice, plan) for choice in plan.choices if choice.module in layers.modules}
    return kernel or (own.pop() if len(own) == 1 else "")


def _numbers(modules: Iterable[str]) -> list[str] | None:
    """Return the numbers of layers; None if a path has not exactly one number."""
    numbers = set()
    for module in modules:
        found = [int(part) for part in module.split(".") if part.isdecimal()]
        if len(found) != 1:
            return None
        numbers.update(found)
    return [str(number) for number in sorted(numbers)]


def _text(plan: Plan, ranges: Ranges, steps: int | None) -> str:
    return json.dumps(_arguments(plan, ranges), indent=2) + "\n"


def _needs(text: str) -> str:
    return "vLLM 0.26 or later" if "backend_per_kind" in text else ""


TARGET = Target(
    "vllm",
    KERNELS,
    _in(()),
    "all layers and phases",
    _text,
    has_steps=False,
    adapt=_adapt,
    needs=_needs,
)
