"""The snapshot of a process's settings, which restores and names changed settings.

When a kernel's library is imported or called, it may change PyTorch's backends or threads. That
would change the measurements of every other kernel.
"""

from __future__ import annotations

import contextlib
import gc
import os
import random
import sys
from collections.abc import Callable, Iterator
from functools import lru_cache
from typing import Any, NamedTuple

import torch


class Setting(NamedTuple):
    """Setting of the process that can be read and written."""

    read: Callable[[], Any]
    write: Callable[[Any], object]


def _attributes(place: str, owner: Any, *names: str) -> dict[str, Setting]:
    def setting(name: str) -> Setting:
        return Setting(lambda: getattr(owner, name), lambda was: setattr(owner, name, was))

    return {f"{place}.{name}": setting(name) for name in names}


def _functions(*names: str) -> dict[str, Setting]:
    """Return settings of PyTorch that have a `get_` and a `set_` function."""
    return {
        f"torch.get_{name}": Setting(getattr(torch, f"get_{name}"), getattr(torch, f"set_{name}"))
        for name in names
    }


COMPILERS_OWN = {
    "CUDA_HOME",
    "KMP_DUPLICATE_LIB_OK",
    "TORCHINDUCTOR_CACHE_DIR",
    "TORCH_WARM_POOL",
    "TRITON_CACHE_DIR",
    "TRITON_LIBDEVICE_PATH",
    "TRITON_PTXAS_PATH",
    "_TORCHINDUCTOR_PYOBJECT_TENSOR_DATA_PTR",
}
"""Variables that `torch.compile` sets for its compilers; they do not affect measurements."""


def _environment() -> dict[str, str]:
    return {name: value for name, value in os.environ.items() if name not in COMPILERS_OWN}


def _set_environment(saved: dict[str, str]) -> None:
    for name in _environment().keys() - saved.keys():
        del os.environ[name]
    os.environ.update(saved)


def _default_device() -> Any:
    context = getattr(torch._GLOBAL_DEVICE_CONTEXT, "device_context", None)
    return None if context is None else context.device


def _cores() -> dict[str, Setting]:
    """Return the setting of this thread's cores, which its new threads inherit.

    It is left out if OpenMP binds threads to cores, because then any parallel loop changes it.
    """
    binding = {"GOMP_CPU_AFFINITY", "KMP_AFFINITY", "OMP_PLACES", "OMP_PROC_BIND"}
    if binding & os.environ.keys() or not hasattr(os, "sched_setaffinity"):
        return {}
    cores = Setting(lambda: os.sched_getaffinity(0), lambda was: os.sched_setaffinity(0, was))
    return {"os.sched_getaffinity": cores}


_REGISTERED: set[str] = getattr(torch.library, "_impls", set())
"""Names such as `aten/bmm/CPU` of kernels that Python code registered with `torch.library`."""
_COMPUTING = ("CPU", "CUDA", "Autograd", "CompositeImplicit", "CompositeExplicit")


def _replaces_pytorchs(name: str) -> bool:
    """Return whether a registered kernel computes one of PyTorch's operators.

    Compilers also register kernels for meta tensors and transforms, which compute nothing.
    """
    namespace, *_, key = name.split("/")
    return namespace == "aten" and (not key or key.startswith(_COMPUTING))


@lru_cache(maxsize=1)
def _replacements(registered: int) -> set[str]:
    """Return names of replaced operators. The number of registered names is the cache key."""
    return set(filter(_replaces_pytorchs, _REGISTERED))


def _undo_replacements(wanted: set[str]) -> None:
    for found in gc.get_objects():
        if type(found) is torch.library.Library and any(
            _replaces_pytorchs(name) and name not in wanted for name in found._op_impls
        ):
            found._destroy()


def _backend_order() -> dict[str, Setting]:
    """Return the setting of the order in which SDPA tries its backends.

    On some GPUs, PyTorch itself moves cuDNN to the front at the first call of SDPA, and only then.
    """
    if not hasattr(torch._C, "_set_sdp_priority_order"):
        return {}
    order, cudnn = torch._C._get_sdp_priority_order(), int(getattr(torch._C._SDPBackend, CUDNN))
    pytorchs = [order, [cudnn, *(each for each in order if each != cudnn)]]
    last = [order]

    def read() -> list[int] | None:
        """Return the order; None if PyTorch itself has set it."""
        if (now := torch._C._get_sdp_priority_order()) not in pytorchs:
            return now
        last[0] = now
        return None

    def write(was: list[int] | None) -> None:
        torch._C._set_sdp_priority_order(was or last[0])

    return {"the order of SDPA's backends": Setting(read, write)}


CUDNN = "CUDNN_ATTENTION"
_DENORMAL = torch.tensor(1e-40)
_CUDA = torch.backends.cuda

SETTINGS: dict[str, Setting] = {
    **{
        f"torch.backends.cuda.{name}_sdp": Setting(
            getattr(_CUDA, f"{name}_sdp_enabled"), getattr(_CUDA, f"enable_{name}_sdp")
        )
        for name in ("flash", "mem_efficient", "math", "cudnn")
    },
    **_backend_order(),
    "torch.backends.cuda.allow_fp16_bf16_reduction_math_sdp": Setting(
        _CUDA.fp16_bf16_reduction_math_sdp_allowed, _CUDA.allow_fp16_bf16_reduction_math_sdp
    ),
    **_functions("float32_matmul_precision", "num_threads", "default_dtype"),
    **_attributes(
        "torch.backends.cuda.matmul",
        _CUDA.matmul,
        "allow_bf16_reduced_precision_reduction",
        "allow_fp16_reduced_precision_reduction",
    ),
    **_attributes(
        "torch.backends.cudnn",
        torch.backends.cudnn,
        *("enabled", "benchmark", "deterministic", "allow_tf32"),
    ),
    **_attributes("torch.backends.mkldnn", torch.backends.mkldnn, "enabled"),
    "torch.are_deterministic_algorithms_enabled": Setting(
        torch.are_deterministic_algorithms_enabled, torch.use_deterministic_algorithms
    ),
    "torch.set_flush_denormal": Setting(
        lambda: float(_DENORMAL * 1) == 0.0, torch.set_flush_denormal
    ),
    "torch.get_default_device": Setting(_default_device, torch.set_default_device),
    "torch.is_grad_enabled": Setting(torch.is_grad_enabled, torch.set_grad_enabled),
    # `RandomState` restores the position in the sequence of random numbers.
    "torch.manual_seed": Setting(torch.initial_seed, torch.default_generator.manual_seed),
    "torch.library's kernels for PyTorch's operators": Setting(
        lambda: _replacements(len(_REGISTERED)), _undo_replacements
    ),
    "gc.isenabled": Setting(gc.isenabled, lambda was: gc.enable() if was else gc.disable()),
    "gc.get_threshold": Setting(gc.get_threshold, lambda was: gc.set_threshold(*was)),
    "os.environ": Setting(_environment, _set_environment),
    "os.getcwd": Setting(os.getcwd, os.chdir),
    **_cores(),
}
"""Settings that honest libraries change, keyed by the names that messages use."""

REFUSALS = (RuntimeError, OSError, ValueError)
"""Errors for settings that contradict others, a removed directory, or unavailable cores."""


class SettingsSnapshot:
    """Values of settings at construction."""

    def __init__(self) -> None:
        self._was = {name: setting.read() for name, setting in SETTINGS.items()}

    def restore(self) -> list[str]:
        """Restore changed settings; return their names."""
        changed = []
        for name, setting in SETTINGS.items():
            if self._holds(name):
                continue
            changed.append(name)
            with contextlib.suppress(*REFUSALS):
                setting.write(self._was[name])
            if not self._holds(name):  # a permanent change: do not blame the next kernel
                with contextlib.suppress(*REFUSALS):
                    self._was[name] = setting.read()
        return changed

    def _holds(self, name: str) -> bool:
        try:
            return bool(SETTINGS[name].read() == self._was[name])
        except REFUSALS:
            return False


def _generators() -> Iterator[tuple[Any, Setting]]:
    yield "python", Setting(random.getstate, random.setstate)
    of_gpus = torch.cuda.default_generators if torch.cuda.is_initialized() else ()
    for generator in (torch.default_generator, *of_gpus):
        yield generator.device, Setting(generator.get_state, generator.set_state)
    if (numpy := sys.modules.get("numpy.random")) is not None:
        yield "numpy", Setting(lambda: numpy.get_state(legacy=False), numpy.set_state)


class RandomState:
    """States of the random generators of Python, PyTorch and NumPy.

    Kernels may draw random numbers, so a change causes no flag. Restoring takes a few microseconds,
    or about 30 with NumPy. The state of a new generator is saved when the generator is first seen.
    """

    def __init__(self) -> None:
        self._was: dict[Any, Any] = {}
        self.restore()

    def restore(self) -> None:
        """Restore the generators, so that every kernel draws the same numbers."""
        for name, generator in _generators():
            with contextlib.suppress(*REFUSALS):
                if name in self._was:
                    generator.write(self._was[name])
                else:
                    self._was[name] = generator.read()
