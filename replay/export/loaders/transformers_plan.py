"""Attention functions for the modules of a transformers model, for prefill and decode.

`replay export` wrote this file. It needs transformers, and the library of each function:

    import attention_plan

    plan = attention_plan.load(model)
    model.generate(**inputs)
    plan.remove()

The model keeps the masks that it has without the plan, so it must use `sdpa` or `eager`.
"""

from __future__ import annotations

import importlib
import sys
from collections.abc import Callable
from functools import partial
from typing import Any

from torch import Tensor, nn
from torch.nn.attention import SDPBackend, sdpa_kernel
from transformers import AttentionInterface, AttentionMaskInterface

Plan = dict[tuple[str, bool], list[tuple[int, str]]]

PLAN: Plan = {}
"""Path of each module, True for decode; and the smallest key length of each of its functions,
longest first. An empty name is the model's own attention."""

FLASH = ("flash_attn", "flash_attn_interface", "flash_attn.cute")
OWN = ("sdpa", "eager")


class AttentionPlan:
    """Plan in a model, until `remove`.

    Args:
        model: a model of transformers, before or after `torch.compile`.

    Raises:
        ValueError: the model lacks a module of the plan, or has neither `sdpa` nor `eager`.
        ImportError: the library of a function is not installed.
    """

    def __init__(self, model: Any) -> None:
        self._model = model
        self._own = getattr(model.config, "_attn_implementation", None)
        if self._own not in OWN:
            raise ValueError(
                f"the model has attn_implementation={self._own!r}: give a model of transformers "
                "that was loaded with sdpa or eager"
            )
        modules = {_bare(path): module for path, module in model.named_modules()}
        self._modules: dict[str, nn.Module] = {}
        for path, _ in PLAN:
            # A path may begin with the name of a pipeline's component.
            bare = _bare(path)
            module = modules.get(bare, modules.get(bare.partition(".")[2]))
            if module is None:
                raise ValueError(f"the model has no module {path!r}: load the model of the plan")
            self._modules[path] = module
        for (path, decodes), kernels in PLAN.items():
            functions = [(length, _function(name)) for length, name in kernels]
            setattr(self._modules[path], _attribute(decodes), functions)
        name = f"attention_plan_{self._own}"
        AttentionInterface.register(name, partial(attention, self._own))
        AttentionMaskInterface.register(name, AttentionMaskInterface()[self._own])
        model.set_attn_implementation(name)

    def remove(self) -> None:
        """Restore the attention that the model had before."""
        self._model.set_attn_implementation(self._own)
        for path, decodes in PLAN:
            delattr(self._modules[path], _attribute(decodes))


load = AttentionPlan


def attention(
    own: str, module: nn.Module, query: Tensor, key: Tensor, *args: Any, **kwargs: Any
) -> Any:
    """Run the function of a module for (B, Hq, Sq, D) queries and (B, Hkv, Sk, D) keys.

    Modules without a function in the plan run the attention `own`, which the model had before.
    """
    decodes = query.shape[2] == 1 and key.shape[2] > 1
    for length, function in getattr(module, _attribute(decodes), ()):
        if key.shape[2] >= length:
            if function is not None:
                return function(module, query, key, *args, **kwargs)
            break
    if own == "eager":
        function = sys.modules[type(module).__module__].eager_attention_forward
    else:
        function = AttentionInterface()[own]
    return function(module, query, key, *args, **kwargs)


def _bare(path: str) -> str:
    """Return a path without the names of compiled wrappers and of peft's."""
    return path.replace("_orig_mod.", "").removeprefix("base_model.model.")


def _attribute(decodes: bool) -> str:
    return "attention_plan_decode" if decodes else "attention_plan_prefill"


def _function(name: str) -> Callable[..., Any] | None:
    """Return the function of a name in the plan; None for the model's own attention."""
    if not name:
        return None
    if name in FLASH:
        return partial(_flash, importlib.import_module(name).flash_attn_func)
    if name.startswith("sdpa_"):
        return partial(_restricted, SDPBackend.__members__[name.removeprefix("sdpa_").upper()])
    if name.startswith("attention_kernels"):
        import attention_kernels

        attention_kernels.register("transformers")
    function: Callable[..., Any] = AttentionInterface()[name]
    return function


def _restricted(backend: SDPBackend, *args: Any, **kwargs: Any) -> Any:
    """Run transformers' SDPA function with one backend of PyTorch."""
    with sdpa_kernel(backend):
        return AttentionInterface()["sdpa"](*args, **kwargs)


def _flash(
    function: Callable[..., Any],
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    dropout: float = 0.0,
    scaling: float | None = None,
    is_causal: bool | None = None,
    **others: Any,
) -> tuple[Tensor, None]:
    """Run a function of FlashAttention, whose tensors are (B, S, H, D)."""
    refused = ("softcap", "s_aux", "cache", "position_bias")
    given = [name for name in refused if others.get(name) is not None]
    if attention_mask is not None or dropout or given:
        what = ", ".join(given) or ("an attention mask" if not dropout else "dropout")
        raise NotImplementedError(f"flash_attn was planned for a layer without {what}")
    causal = getattr(module, "is_causal", True) if is_causal is None else is_causal
    query, key, value = (each.transpose(1, 2) for each in (query, key, value))
    causal = bool(causal) and query.shape[1] > 1
    output = function(query, key, value, softmax_scale=scaling, causal=causal)
    return (output[0] if isinstance(output, tuple) else output), None
