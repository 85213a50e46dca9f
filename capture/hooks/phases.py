"""Decides the phase of a forward pass from its module and arguments.

- `denoise`: the module's forward takes a time step.
- `decode`: a language model reads at most `FEW` tokens, and its cache already holds tokens.
- `prefill`: any other forward pass of a language model, including later chunks of a prompt.
- `extend`, `mixed`: passes of a batch of requests (`capture.hooks.batch_phase`).
- `encode`: any other module runs, including an encoder inside a language model.
- `recompute`: a backward pass runs the module again (gradient checkpointing).
"""

from __future__ import annotations

import functools
import inspect
import sys
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, nn

from capture.hooks.attributes import attribute
from capture.hooks.batch_phase import CACHING, phase_of_lengths, prepared

RECOMPUTE = "recompute"

FEW = 8
"""Maximum number of tokens in a decoding step, which may verify several guessed tokens."""

_TIME_STEPS = ("t", "sigma", "time_step", "noise_level", "decoder_noise_time")
"""Parameter names for a time step, in addition to names that contain `timestep`."""
_CACHES = ("past_key_values", "past_key_value", "layer_past")
_TOKENS = (
    "decoder_input_ids",
    "decoder_inputs_embeds",
    "input_ids",
    "inputs_embeds",
    "hidden_states",
)
"""Parameter names for the tokens of a language model or its layer, (B, S) or (B, S, width)."""


class ModuleRole:
    """Properties of a module that decide phases."""

    def __init__(self, module: nn.Module) -> None:
        places = _places(module)
        self.time_steps = {
            name: place for name, place in places.items() if _is_time_step(name, module)
        }
        self.caches = {name: places[name] for name in _CACHES if name in places}
        self.tokens = {name: places[name] for name in _TOKENS if name in places}
        self.is_cross_attention = "key_value_states" in places
        self.generates = _can_generate(module)
        self.encodes = False
        """True for an encoder inside a language model."""
        self.layers: list[int | None] = [attribute(module, "layer_idx")]
        """Indices of the cache layers that belong to the module; None for the first layer."""
        if self.caches and self.layers == [None]:
            own = (attribute(part, "layer_idx") for part in module.modules())
            self.layers = [*dict.fromkeys(layer for layer in own if layer is not None)] or [None]

    @property
    def decides(self) -> bool:
        """True if the module's phase may differ from its caller's."""
        return bool(self.time_steps or self.caches or self.generates or self.encodes)

    def phase(
        self, outer: str | None, args: tuple[Any, ...], kwargs: Mapping[str, Any], step: int
    ) -> str | None:
        """Return the phase of a forward pass with these arguments; None for the caller's phase.

        Args:
            outer: phase of the caller; None if no watched module is the caller.
            step: number of earlier forward passes of the module.
        """
        if outer != "denoise" and self.time_step(args, kwargs) is not None:
            return "denoise"
        if outer in CACHING:
            return "encode" if self.encodes else None
        if outer in (None, "encode") and not self.encodes:
            caches = (_given(name, place, args, kwargs) for name, place in self.caches.items())
            cache = next((each for each in caches if each is not None), None)
            if cache is not None or self.generates:
                return self._text_phase(cache, args, kwargs, step)
        return prepared.phase or "encode" if outer is None else None

    def time_step(self, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Any:
        """Return the time step that a forward pass receives; None if it receives none."""
        given = (_given(name, at, args, kwargs) for name, at in self.time_steps.items())
        return next((value for value in given if value is not None), None)

    def _text_phase(
        self, cache: Any, args: tuple[Any, ...], kwargs: Mapping[str, Any], step: int
    ) -> str:
        tokens = self._new_tokens(args, kwargs)
        if kwargs.get("cache") is not None and kwargs.get("cu_seq_lens_q") is not None:
            return _batch_phase(**kwargs)
        if cache is not None:
            # For cross-attention, the cache holds the encoder's states, not tokens.
            crosses = self.is_cross_attention and kwargs.get("key_value_states") is not None
            # One filled layer is enough, because layers of linear attention may hold no tokens.
            is_filled = any(_tokens_in(cache, layer, crosses=crosses) for layer in self.layers)
            return "decode" if is_filled and tokens <= FEW else "prefill"
        # Without a cache among the arguments, the model may hold its own cache.
        return "decode" if not self.caches and step > 0 and tokens == 1 else "prefill"

    def _new_tokens(self, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> int:
        named = [_given(name, place, args, kwargs) for name, place in self.tokens.items()]
        for tensor in (*named, *args):
            if isinstance(tensor, Tensor) and tensor.ndim > 1:
                return int(tensor.shape[1])
        return 1


def roles(root: nn.Module) -> dict[nn.Module, ModuleRole]:
    """Return the role of a module and of every module below it."""
    found = {module: ModuleRole(module) for module in root.modules()}
    for module, role in found.items():
        if role.generates and role.caches:
            for inner in module.modules():
                # An inner model of transformers without a cache is an encoder.
                is_model = hasattr(inner, "can_generate") and not found[inner].generates
                is_encoder = not found[inner].caches or getattr(inner, "is_decoder", True) is False
                found[inner].encodes = found[inner].encodes or (is_model and is_encoder)
    return found


def deciding(root: nn.Module) -> dict[nn.Module, ModuleRole]:
    """Return the root and the modules below it where the phase may change."""
    known = roles(root)
    found = {root: known[root]}

    def look(module: nn.Module, around: ModuleRole) -> None:
        if around.time_steps:  # everything inside a denoiser denoises
            return
        for inner in module.children():
            role = known[inner]
            is_text = role.caches or role.generates
            within_text = around.caches or around.generates
            decides = role.time_steps or role.encodes or (is_text and not within_text)
            if decides:
                found[inner] = role
            look(inner, role if decides else around)

    look(root, known[root])
    return found


def stepping(root: nn.Module) -> dict[nn.Module, ModuleRole]:
    """Return the modules whose forward passes are a model's steps: the root or inner models."""
    found = deciding(root)
    wrapped = {module: role for module, role in found.items() if module is not root}
    return {root: found[root]} if found[root].decides or not wrapped else wrapped


def takes_time_step(module: nn.Module) -> bool:
    """Return whether a module is a denoiser, that is, whether its forward takes a time step."""
    return any(_is_time_step(name, module) for name in _places(module))


def in_backward() -> bool:
    """Return whether this code runs in a backward pass, which recomputes activations."""
    # This check works in both variants of torch.utils.checkpoint and on every autograd thread.
    return torch._C._current_graph_task_id() != -1


def _places(module: nn.Module) -> Mapping[str, int]:
    """Return the position of every parameter of a module's forward, by name."""
    if isinstance(module, torch.jit.ScriptModule):
        return {}
    if "forward" in vars(module):  # accelerate and diffusers set a wrapper on the instance
        return _parameters(module.forward, 0)
    return _parameters_of_method(type(module).forward)


def _parameters(forward: Any, skipped: int) -> Mapping[str, int]:
    try:
        parameters = [*inspect.signature(forward).parameters.values()][skipped:]
    except (TypeError, ValueError):
        return {}
    return {
        parameter.name: place if parameter.kind is parameter.POSITIONAL_OR_KEYWORD else sys.maxsize
        for place, parameter in enumerate(parameters)
    }


@functools.lru_cache(maxsize=4096)
def _parameters_of_method(forward: Any) -> Mapping[str, int]:
    return _parameters(forward, 1)


def _is_time_step(name: str, module: nn.Module) -> bool:
    # The name `r` means a time step only in diffusers' Würstchen.
    wuerstchen = name == "r" and type(module).__module__.startswith("diffusers.")
    return "timestep" in name or name in _TIME_STEPS or wuerstchen


def _given(name: str, place: int, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Any:
    return args[place] if place < len(args) else kwargs.get(name)


def _can_generate(module: nn.Module) -> bool:
    try:
        return bool(getattr(module, "can_generate", lambda: False)())
    except Exception:  # the model's own classes may raise
        return False


def _batch_phase(
    cu_seq_lens_q: Tensor,
    cu_seq_lens_k: Tensor | Mapping[str, Tensor],
    max_length_q: int,
    **others: Any,
) -> str:
    """Return the phase of a pass of transformers' continuous batching, which packs sequences."""
    if cu_seq_lens_q.is_cuda and torch.cuda.is_current_stream_capturing():
        return "decode" if max_length_q == 1 else "prefill"  # lengths cannot be read
    starts_k = cu_seq_lens_k
    if isinstance(starts_k, Mapping):  # by kind of layer; a window leaves some of the old keys
        starts_k = next(iter(starts_k.values()))
    return phase_of_lengths(cu_seq_lens_q.diff().tolist(), starts_k.diff().tolist())


def _tokens_in(cache: Any, layer: int | None, *, crosses: bool) -> int:
    """Return the number of tokens in one layer of a cache (default: the first layer)."""
    if crosses and isinstance(updated := getattr(cache, "is_updated", None), Mapping):
        return int(updated.get(layer or 0, False))
    if hasattr(cache, "get_seq_length"):
        try:
            return int(cache.get_seq_length(layer or 0))
        except (TypeError, ValueError):  # a layer without cached tokens, such as linear attention
            return int(cache.get_seq_length())
    while isinstance(cache, tuple | list):  # ((key, value), …), or one layer's (key, value)
        cache = cache[0] if cache else None
    return int(cache.shape[-2]) if isinstance(cache, Tensor) and cache.ndim > 1 else 0
