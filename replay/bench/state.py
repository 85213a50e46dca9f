"""State of the process that kernels are measured in: taken down, put back, and changes named.

A kernel's library may switch PyTorch's backends or threads when it is imported or called, which
would change what every other kernel is measured with.
"""

from __future__ import annotations

import gc
import os
import sys
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import torch


class Setting(NamedTuple):
    """One thing that can be read and set."""

    read: Callable[[], Any]
    write: Callable[[Any], None]


def _attribute(owner: Any, name: str) -> Setting:
    return Setting(lambda: getattr(owner, name), lambda value: setattr(owner, name, value))


def _collect(on: bool) -> None:
    (gc.enable if on else gc.disable)()


def _set_environment(saved: dict[str, str]) -> None:
    os.environ.clear()
    os.environ.update(saved)


_DENORMAL = torch.tensor(1e-40)

SETTINGS: dict[str, Setting] = {
    **{
        f"torch.backends.cuda.{name}_sdp": Setting(
            getattr(torch.backends.cuda, f"{name}_sdp_enabled"),
            getattr(torch.backends.cuda, f"enable_{name}_sdp"),
        )
        for name in ("flash", "mem_efficient", "math", "cudnn")
    },
    "torch.backends.cuda.allow_fp16_bf16_reduction_math_sdp": Setting(
        torch.backends.cuda.fp16_bf16_reduction_math_sdp_allowed,
        torch.backends.cuda.allow_fp16_bf16_reduction_math_sdp,
    ),
    "torch.get_float32_matmul_precision": Setting(
        torch.get_float32_matmul_precision, torch.set_float32_matmul_precision
    ),
    "torch.backends.cudnn.enabled": _attribute(torch.backends.cudnn, "enabled"),
    "torch.backends.cudnn.benchmark": _attribute(torch.backends.cudnn, "benchmark"),
    "torch.backends.cudnn.deterministic": _attribute(torch.backends.cudnn, "deterministic"),
    "torch.get_num_threads": Setting(torch.get_num_threads, torch.set_num_threads),
    "torch.get_default_dtype": Setting(torch.get_default_dtype, torch.set_default_dtype),
    "torch.are_deterministic_algorithms_enabled": Setting(
        torch.are_deterministic_algorithms_enabled, torch.use_deterministic_algorithms
    ),
    "torch.set_flush_denormal": Setting(
        lambda: float(_DENORMAL * 1) == 0.0,
        torch.set_flush_denormal,  # type: ignore[arg-type]
    ),
    "gc.isenabled": Setting(gc.isenabled, _collect),
    "os.environ": Setting(lambda: dict(os.environ), _set_environment),
    "os.getcwd": Setting(os.getcwd, os.chdir),
}
"""By what a user calls them."""

HOOKS: dict[str, Setting] = {
    "sys.getprofile": Setting(sys.getprofile, sys.setprofile),
    "sys.gettrace": Setting(sys.gettrace, sys.settrace),
}
"""What lets code of a kernel run after it returned, when its time is no longer taken."""


class State:
    """What settings were."""

    def __init__(self, settings: Mapping[str, Setting] = SETTINGS) -> None:
        self._settings = settings
        self._was = {name: setting.read() for name, setting in settings.items()}

    def restore(self) -> list[str]:
        """Put back what changed; its names."""
        changed = []
        for name, setting in self._settings.items():
            if setting.read() != self._was[name]:
                setting.write(self._was[name])
                changed.append(name)
        return changed
