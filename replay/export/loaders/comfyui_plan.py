"""Attention functions for the blocks of a diffusion transformer, as a node of ComfyUI.

`replay export` wrote this file. Put it into `custom_nodes` and insert the node "Attention plan"
between the loader of the model and the sampler. It needs ComfyUI 0.35, and the library of each
function.
"""

from __future__ import annotations

import importlib
from typing import Any

import torch
from torch import Tensor

Plan = list[tuple[int, dict[tuple[str, int], list[tuple[int, str]]]]]

PLAN: Plan = []
"""First denoising step of each range; type (or empty for any) and index of each block; and the
smallest key length of each of its functions, longest first. An empty name is ComfyUI's own."""


class Override:
    """Function for a model's `transformer_options["optimized_attention_override"]`."""

    def __init__(self) -> None:
        names = {
            name for _, blocks in PLAN for kernels in blocks.values() for _, name in kernels if name
        }
        if any(name.startswith("attention_kernels") for name in names):
            import attention_kernels

            attention_kernels.register("comfyui")
        module = importlib.import_module("comfy.ldm.modules.attention")
        missing = sorted(names - module.REGISTERED_ATTENTION_FUNCTIONS.keys())
        if missing:
            raise ImportError(f"ComfyUI lacks the attention functions {', '.join(missing)}")
        self._functions = {name: module.REGISTERED_ATTENTION_FUNCTIONS[name] for name in names}
        self._sigmas: Tensor | None = None
        self._step = 0

    def __call__(self, own: Any, *args: Any, **kwargs: Any) -> Tensor:
        """Run the function of the block for query, key, value and heads, or ComfyUI's `own`."""
        options = kwargs.get("transformer_options") or {}
        name = self._name(options, args[1].shape[-2])
        output: Tensor = self._functions.get(name, own)(*args, **kwargs)
        return output

    def _name(self, options: dict[str, Any], kv_len: int) -> str:
        """Return the name of a call's function; empty for ComfyUI's own."""
        step = self._current_step(options)
        blocks: dict[tuple[str, int], list[tuple[int, str]]] = {}
        for first, each in PLAN:
            if first <= step:
                blocks = each
        index = options.get("block_index", -1)
        kernels = blocks.get((options.get("block_type", ""), index)) or blocks.get(("", index), [])
        return next((name for start, name in kernels if kv_len >= start), "")

    def _current_step(self, options: dict[str, Any]) -> int:
        """Return the denoising step, counted from 0: the last whose noise level is not below."""
        sigmas, levels = options.get("sigmas"), options.get("sample_sigmas")
        if sigmas is None or levels is None:
            return 0
        if sigmas is not self._sigmas:  # reading the level waits for the GPU, so once a step
            level = sigmas.flatten()[0].to(levels.device) * (1 - 1e-6)
            self._sigmas, self._step = sigmas, max(0, int(torch.sum(levels >= level)) - 1)
        return self._step


class AttentionPlan:
    """Node that gives a model the plan."""

    RETURN_TYPES = ("MODEL",)
    FUNCTION = "apply"
    CATEGORY = "advanced/model"

    @classmethod
    def INPUT_TYPES(cls) -> dict[str, Any]:
        """Return the node's inputs."""
        return {"required": {"model": ("MODEL",)}}

    def apply(self, model: Any) -> tuple[Any]:
        """Return a copy of the model with the plan."""
        changed = model.clone()
        options = changed.model_options.setdefault("transformer_options", {})
        options["optimized_attention_override"] = Override()
        return (changed,)


NODE_CLASS_MAPPINGS = {"AttentionPlan": AttentionPlan}
NODE_DISPLAY_NAME_MAPPINGS = {"AttentionPlan": "Attention plan"}
