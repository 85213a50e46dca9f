"""Kernels from the Hugging Face Hub, loaded with the package `kernels`, named `hub:ORG/REPO`.

A kernel is a small Python package around a compiled library. The package is built for the installed
PyTorch and CUDA, and loaded under its own name so that it does not collide with an installed one.
Without a network, only cached kernels load; the Hub is contacted once, for at most two seconds.
"""

from __future__ import annotations

import functools
import importlib
import os
import socket
from collections.abc import Callable
from dataclasses import dataclass
from types import ModuleType

import torch
from torch import Tensor

from capture.hooks.interceptor import Arguments
from replay.kernels import constraints as limits
from replay.kernels import flash_attention
from replay.kernels.constraints import Constraint
from replay.kernels.layout import on_bhsd, on_bshd
from replay.kernels.libraries import Capability, Library
from replay.kernels.wrapping import register_adapted
from replay.rows.errors_of_output import AccuracyClass

PATIENCE_SECONDS = 2.0

_limits = (
    limits.no_dropout,
    limits.half_precision,
    limits.no_mask,
    limits.causal_only_square,
    limits.same_value_dim,
)


@dataclass(frozen=True)
class HubKernel:
    """Kernel of the Hub, with its repository and attention function."""

    repository: str
    function: str
    is_flash: bool
    """True for FlashAttention's arguments and BSHD; False for SageAttention's and BHSD."""
    about: str
    limits: tuple[Constraint, ...]
    accuracy_class: AccuracyClass = "exact"
    runs_on: Callable[[Capability], bool] = lambda capability: capability >= (8, 0)
    needs: str = "8.0 or higher"

    @property
    def library(self) -> Library:
        return Library(
            module="kernels",
            package="kernels",
            install="pip install kernels",
            functions=("get_kernel",),
            runs_on=self.runs_on,
            needs=self.needs,
        )

    def unavailable(self, device: torch.device) -> str | None:
        if reason := self.library.unavailable(device):
            return reason
        found = _fetch(self.repository)
        if isinstance(found, str):
            return found
        if not hasattr(found, self.function):
            return f"{self.repository} has no {self.function}"
        return None

    def run(self, call: Arguments) -> Tensor:
        found = _fetch(self.repository)
        if isinstance(found, str):
            raise ImportError(found)
        if self.is_flash:
            options = flash_attention.options(call)
        else:
            options = {"tensor_layout": "HND", "sm_scale": call.scale, "is_causal": call.is_causal}
        returned = getattr(found, self.function)(call.query, call.key, call.value, **options)
        return flash_attention.output_of(returned)


@functools.cache
def _fetch(repository: str) -> ModuleType | str:
    """Return the kernel as a module, or the reason why the kernel is missing."""
    import huggingface_hub.constants as hub

    kernels = importlib.import_module("kernels")
    offline = hub.HF_HUB_OFFLINE
    unreachable = "" if offline else _unreachable()
    try:
        # Set offline mode, because otherwise every attempt would wait for the missing network.
        hub.HF_HUB_OFFLINE = bool(offline or unreachable)
        return kernels.get_kernel(repository, revision="main")
    except Exception as error:  # no build for this PyTorch, not cached, broken build …
        reason = str(error).strip().partition("\n")[0] or type(error).__name__
        return f"{unreachable}, and not in the cache: {reason}" if unreachable else reason
    finally:
        hub.HF_HUB_OFFLINE = offline


def _unreachable() -> str:
    """Return the reason why the Hub cannot be reached; empty if it can."""
    import urllib.request

    endpoint = urllib.parse.urlsplit(os.environ.get("HF_ENDPOINT", "https://huggingface.co"))
    host = endpoint.hostname or "huggingface.co"
    port = endpoint.port or (80 if endpoint.scheme == "http" else 443)
    if proxy := urllib.request.getproxies().get(endpoint.scheme):
        through = urllib.parse.urlsplit(proxy)
        host, port = through.hostname or host, through.port or port
    try:
        socket.create_connection((host, port), timeout=PATIENCE_SECONDS).close()
    except OSError as error:
        return f"{host} cannot be reached ({error.strerror or error})"
    return ""


KNOWN = (
    HubKernel(
        "kernels-community/flash-attn2",
        "flash_attn_func",
        is_flash=True,
        about="FlashAttention 2 from the Hugging Face Hub",
        limits=(limits.max_head_dim(256), limits.multiple_of_8),
    ),
    HubKernel(
        "kernels-community/flash-attn3",
        "flash_attn_func",
        is_flash=True,
        about="FlashAttention 3 from the Hugging Face Hub",
        limits=(limits.max_head_dim(256), limits.multiple_of_8),
        runs_on=lambda capability: capability == (9, 0),
        needs="9.0",
    ),
    HubKernel(
        "kernels-community/sage-attention",
        "sageattn",
        is_flash=False,
        about="SageAttention 2 from the Hugging Face Hub",
        limits=(limits.max_head_dim(128),),
        accuracy_class="quantised",
    ),
)


def _register(hub_kernel: HubKernel) -> None:
    if hub_kernel.is_flash:
        attend, prepare = on_bshd(hub_kernel.run)
    else:
        attend, prepare = on_bhsd(hub_kernel.run), None
    register_adapted(
        f"hub:{hub_kernel.repository}",
        hub_kernel.library,
        attend,
        (*_limits, *hub_kernel.limits),
        hub_kernel.about,
        prepare=prepare,
        accuracy_class=hub_kernel.accuracy_class,
        unavailable=hub_kernel.unavailable,
        features=flash_attention.KNOWN if hub_kernel.is_flash else (),
        differentiable=hub_kernel.is_flash,
    )


for _known in KNOWN:
    _register(_known)
