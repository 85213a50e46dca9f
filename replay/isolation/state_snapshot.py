"""The snapshot of a process's settings, to restore them and to name the changed settings.

A kernel's library may switch PyTorch's backends or threads when it is imported or called, which
would change the measurements of every other kernel.
"""

from __future__ import annotations

import contextlib
import gc
import os
import random
import signal
import sys
from collections.abc import Callable, Iterator, Mapping
from typing import Any, NamedTuple

import torch

from replay.timing import hooks


class Setting(NamedTuple):
    """Setting of the process that can be read and written."""

    read: Callable[[], Any]
    write: Callable[[Any], None]


def _attribute(owner: Any, name: str) -> Setting:
    return Setting(lambda: getattr(owner, name), lambda value: setattr(owner, name, value))


def _collect(on: bool) -> None:
    (gc.enable if on else gc.disable)()


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


_RECURSION_LIMIT = sys.getrecursionlimit()


def _recursion_limit() -> int:
    """Return the recursion limit, but at most its first value: compilers may raise the limit."""
    return min(sys.getrecursionlimit(), _RECURSION_LIMIT)


def _default_device() -> Any:
    context = getattr(torch._GLOBAL_DEVICE_CONTEXT, "device_context", None)
    return None if context is None else context.device


_ENTERED: list[Any] = []
"""Entered modes, kept because a mode ends when it is garbage collected."""


def _set_inference_mode(on: bool) -> None:
    grad = torch.is_grad_enabled()
    _ENTERED.append(torch.inference_mode(on))
    _ENTERED[-1].__enter__()
    torch.set_grad_enabled(grad)


def _set_grad(on: bool) -> None:
    torch.set_grad_enabled(on)


_TIMERS = [
    getattr(signal, name)
    for name in ("ITIMER_REAL", "ITIMER_VIRTUAL", "ITIMER_PROF")
    if hasattr(signal, name)
]
_SIGNALS = [
    getattr(signal, name)
    for name in ("SIGINT", "SIGTERM", "SIGCHLD", "SIGALRM", "SIGVTALRM", "SIGPROF")
    if hasattr(signal, name)
]


def _timers_run() -> list[bool]:
    return [signal.getitimer(timer) != (0.0, 0.0) for timer in _TIMERS]


def _stop_timers(ran: list[bool]) -> None:
    for timer, did in zip(_TIMERS, ran, strict=True):
        if not did:
            signal.setitimer(timer, 0)


def _set_handlers(handlers: list[Any]) -> None:
    for number, handler in zip(_SIGNALS, handlers, strict=True):
        if handler is not None:  # None for a handler that was not set from Python
            signal.signal(number, handler)


_BINDS_THREADS = any(
    name in os.environ
    for name in ("GOMP_CPU_AFFINITY", "KMP_AFFINITY", "OMP_PLACES", "OMP_PROC_BIND")
)
"""True if OpenMP binds this thread to cores at the first parallel loop of any kernel."""


def _by_name(module: Any, *names: str) -> tuple[Callable[..., Any], ...] | None:
    """Return the named functions of a module; None if this system or version lacks any function."""
    found = tuple(getattr(module, name, None) for name in names)
    return None if None in found else found  # type: ignore[return-value]


_PRIORITY = _by_name(os, "getpriority", "setpriority")
_AFFINITY = None if _BINDS_THREADS else _by_name(os, "sched_getaffinity", "sched_setaffinity")
_ORDER = _by_name(torch._C, "_get_sdp_priority_order", "_set_sdp_priority_order")


class _BackendOrder:
    """Order in which SDPA tries its backends.

    On some GPUs, PyTorch itself moves cuDNN to the front at the first call of SDPA, and only then.
    """

    def __init__(self, read: Callable[[], list[int]], write: Callable[[list[int]], None]) -> None:
        self._read, self._write = read, write
        self._pytorchs = read()
        first = [
            int(getattr(torch._C._SDPBackend, name))
            for name in ("CUDNN_ATTENTION", "FLASH_ATTENTION", "EFFICIENT_ATTENTION", "MATH")
        ]
        self._known = (
            self._pytorchs,
            first + [backend for backend in self._pytorchs if backend not in first],
        )

    def read(self) -> list[int] | None:
        """Return the order; None for an order that PyTorch itself sets."""
        order = self._read()
        if order not in self._known:
            return order
        self._pytorchs = order
        return None

    def write(self, order: list[int] | None) -> None:
        self._write(self._pytorchs if order is None else order)


class _Overrides:
    """Kernels that Python code registered with `torch.library` in place of PyTorch's own.

    Compilers' registrations for meta tensors and transforms are left out: they compute nothing.
    """

    KEYS = ("CPU", "CUDA", "Autograd", "CompositeImplicit", "CompositeExplicit")

    def __init__(self, registered: set[str]) -> None:
        self._registered = registered
        self._count, self._found = -1, frozenset[str]()

    def read(self) -> frozenset[str]:
        """Return names such as `aten/bmm/CPU`; search only if the number of names has changed."""
        if len(self._registered) != self._count:
            self._count = len(self._registered)
            self._found = frozenset(name for name in self._registered if self._computes(name))
        return self._found

    def write(self, wanted: frozenset[str]) -> None:
        """Undo all registrations except those in `wanted`."""
        for found in gc.get_objects():
            if type(found) is torch.library.Library and any(
                self._computes(name) and name not in wanted for name in found._op_impls
            ):
                found._destroy()

    def _computes(self, name: str) -> bool:
        namespace, *_, key = name.split("/")
        return namespace == "aten" and (not key or key.startswith(self.KEYS))


def _overrides() -> dict[str, Setting]:
    registered = getattr(torch.library, "_impls", None)
    if not isinstance(registered, set) or not hasattr(torch.library.Library, "_destroy"):
        return {}
    overrides = _Overrides(registered)
    return {
        "torch.library's kernels for PyTorch's operators": Setting(overrides.read, overrides.write)
    }


def _set_seed(seed: int) -> None:
    """Set the seed; `RandomState` restores the position in the sequence of random numbers."""
    torch.default_generator.manual_seed(seed)


def _scheduling() -> dict[str, Setting]:
    """Return settings of this thread that its new threads inherit.

    Only a privileged process can lower a raised niceness again.
    """
    found = {}
    if _AFFINITY is not None:
        cores, pin = _AFFINITY
        found["os.sched_getaffinity"] = Setting(lambda: cores(0), lambda was: pin(0, was))
    if _PRIORITY is not None:
        niceness, renice = _PRIORITY
        found["os.getpriority"] = Setting(
            lambda: niceness(os.PRIO_PROCESS, 0), lambda was: renice(os.PRIO_PROCESS, 0, was)
        )
    return found


def _sdpa_order() -> dict[str, Setting]:
    if _ORDER is None:
        return {}
    order = _BackendOrder(*_ORDER)
    return {"the order of SDPA's backends": Setting(order.read, order.write)}


_DENORMAL = torch.tensor(1e-40)

SETTINGS: dict[str, Setting] = {
    **{
        f"torch.backends.cuda.{name}_sdp": Setting(
            getattr(torch.backends.cuda, f"{name}_sdp_enabled"),
            getattr(torch.backends.cuda, f"enable_{name}_sdp"),
        )
        for name in ("flash", "mem_efficient", "math", "cudnn")
    },
    **_sdpa_order(),
    "torch.backends.cuda.allow_fp16_bf16_reduction_math_sdp": Setting(
        torch.backends.cuda.fp16_bf16_reduction_math_sdp_allowed,
        torch.backends.cuda.allow_fp16_bf16_reduction_math_sdp,
    ),
    "torch.get_float32_matmul_precision": Setting(
        torch.get_float32_matmul_precision, torch.set_float32_matmul_precision
    ),
    **{
        f"torch.backends.cuda.matmul.{name}": _attribute(torch.backends.cuda.matmul, name)
        for name in (
            "allow_bf16_reduced_precision_reduction",
            "allow_fp16_reduced_precision_reduction",
        )
    },
    **{
        f"torch.backends.cudnn.{name}": _attribute(torch.backends.cudnn, name)
        for name in ("enabled", "benchmark", "deterministic", "allow_tf32")
    },
    "torch.backends.mkldnn.enabled": _attribute(torch.backends.mkldnn, "enabled"),
    "torch.get_num_threads": Setting(torch.get_num_threads, torch.set_num_threads),
    "torch.get_default_dtype": Setting(torch.get_default_dtype, torch.set_default_dtype),
    "torch.are_deterministic_algorithms_enabled": Setting(
        torch.are_deterministic_algorithms_enabled, torch.use_deterministic_algorithms
    ),
    "torch.set_flush_denormal": Setting(
        lambda: float(_DENORMAL * 1) == 0.0,
        torch.set_flush_denormal,  # type: ignore[arg-type]
    ),
    "torch.get_default_device": Setting(_default_device, torch.set_default_device),
    "torch.is_inference_mode_enabled": Setting(
        torch.is_inference_mode_enabled, _set_inference_mode
    ),
    "torch.is_grad_enabled": Setting(torch.is_grad_enabled, _set_grad),
    "torch.manual_seed": Setting(torch.initial_seed, _set_seed),
    "gc.isenabled": Setting(gc.isenabled, _collect),
    "gc.get_threshold": Setting(gc.get_threshold, lambda was: gc.set_threshold(*was)),
    "sys.getrecursionlimit": Setting(_recursion_limit, sys.setrecursionlimit),
    "signal.getitimer": Setting(_timers_run, _stop_timers),
    "signal.getsignal": Setting(
        lambda: [signal.getsignal(number) for number in _SIGNALS], _set_handlers
    ),
    "os.environ": Setting(_environment, _set_environment),
    "os.getcwd": Setting(os.getcwd, os.chdir),
    **_scheduling(),
    **_overrides(),
}
"""Settings, keyed by the names that messages use."""

HOOKS: dict[str, Setting] = {
    "sys.getprofile": Setting(sys.getprofile, sys.setprofile),
    "sys.gettrace": Setting(sys.gettrace, sys.settrace),
    "the stack of torch function modes": Setting(hooks.function_modes, hooks.set_function_modes),
    "the stack of torch dispatch modes": Setting(hooks.dispatch_modes, hooks.set_dispatch_modes),
}
"""Hooks that could run a kernel's code after the kernel returned, outside the timed interval."""

REFUSALS = (RuntimeError, OSError, ValueError)
"""Errors from contradictory settings, a removed directory, and signals outside the main thread."""


class SettingsSnapshot:
    """Values of settings at construction."""

    def __init__(self, settings: Mapping[str, Setting] = SETTINGS) -> None:
        self._settings = settings
        self._was = {name: setting.read() for name, setting in settings.items()}

    def restore(self) -> list[str]:
        """Restore changed settings; return their names."""
        changed = []
        for name, setting in self._settings.items():
            if self._holds(name, setting):
                continue
            changed.append(name)
            with contextlib.suppress(*REFUSALS):
                setting.write(self._was[name])
            if not self._holds(name, setting):  # a permanent change: do not blame the next kernel
                with contextlib.suppress(*REFUSALS):
                    self._was[name] = setting.read()
        return changed

    def _holds(self, name: str, setting: Setting) -> bool:
        try:
            return bool(setting.read() == self._was[name])
        except REFUSALS:
            return False


_PYTHON_RANDOM = Setting(random.getstate, random.setstate)


def _random_numbers() -> Iterator[tuple[Any, Setting]]:
    yield "python", _PYTHON_RANDOM
    generators = [torch.default_generator]
    if torch.cuda.is_initialized():
        generators += torch.cuda.default_generators
    for generator in generators:
        state = Setting(generator.get_state, generator.set_state)  # type: ignore[arg-type]
        yield generator.device, state
    if (numpy := sys.modules.get("numpy.random")) is not None:
        yield "numpy", Setting(lambda: numpy.get_state(legacy=False), numpy.set_state)


class RandomState:
    """States of the random generators of Python, PyTorch and NumPy.

    Kernels may draw random numbers, so a change is undone without a flag. Restoring takes a few
    microseconds, or about 30 with NumPy. The state of a new generator is saved when the generator
    is first seen.
    """

    def __init__(self) -> None:
        self._was: dict[Any, Any] = {}
        self.restore()

    def restore(self) -> None:
        """Restore the generators, so that every kernel draws the same numbers."""
        for name, generator in _random_numbers():
            with contextlib.suppress(*REFUSALS):
                if name in self._was:
                    generator.write(self._was[name])
                else:
                    self._was[name] = generator.read()
