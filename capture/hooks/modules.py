"""Tracks which module is running, with forward hooks, to attribute every attention call."""

from __future__ import annotations

import contextlib
import fnmatch
import functools
import inspect
import threading
from collections.abc import Iterator, Mapping
from typing import Any, NamedTuple

from torch import nn

from capture.hooks.signals import is_of_signal_handler


class Site(NamedTuple):
    """Where in the model a call was made."""

    module: str = ""
    """Dotted path of the innermost watched module; empty outside all watched modules."""
    step: int = 0
    """Forward passes of the module's root before the current one."""
    phase: str = "encode"


OUTSIDE = Site()
"""Outside all watched modules."""


class Running(threading.local):
    """The modules that the calling thread is in, from the outermost."""

    def __init__(self) -> None:
        self.stack: list[tuple[nn.Module, Site]] = []


class ModuleTracker:
    """Tracks the forward passes of every module below some roots, per thread.

    The phase of a root's forward pass is `denoise` when the root takes a timestep; `prefill` or
    `decode` when it generates text, by whether its cache already holds tokens; `encode` otherwise.

    Args:
        roots: modules by the prefix of their paths; with an empty prefix, the path of the root
            itself is its class name.
    """

    def __init__(self, roots: Mapping[str, nn.Module]) -> None:
        self._roots = {_uncompiled(root): name for name, root in roots.items()}
        self._paths: dict[nn.Module, str] = {}
        for root, name in self._roots.items():
            for path, module in root.named_modules():
                parts = [part for part in (name, *path.split(".")) if part not in ("", "_orig_mod")]
                self._paths.setdefault(module, ".".join(parts) or type(module).__name__)
        self._steps = dict.fromkeys(self._roots, 0)
        self._lock = threading.Lock()
        self.running = Running()

    @property
    def paths(self) -> list[str]:
        """Paths of all watched modules."""
        return list(self._paths.values())

    @property
    def site(self) -> Site:
        """The current position of the calling thread."""
        stack = self.running.stack
        return stack[-1][1] if stack else OUTSIDE

    @contextlib.contextmanager
    def watch(self) -> Iterator[None]:
        """Hook every module, and unhook on exit."""
        handles = []
        try:
            for module, path in self._paths.items():
                # The hook carries the path: DataParallel runs replicas that are not in our table.
                enter = functools.partial(self._enter, path)
                handles.append(
                    module.register_forward_pre_hook(enter, with_kwargs=True, prepend=True)
                )
                # always_call: a forward that raises must restore the stack.
                handles.append(module.register_forward_hook(self._leave, always_call=True))
            yield
        finally:
            for handle in handles:
                handle.remove()

    def _enter(
        self, path: str, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> None:
        outer = self.site
        step, phase = outer.step, outer.phase
        if module in self._roots:
            with self._lock:
                step = self._steps[module]
                self._steps[module] += 1
            try:
                phase = phase_of(module, args, kwargs, step)
            except Exception as error:  # a model's own classes answer, and may not
                if is_of_signal_handler(error):
                    raise
        self.running.stack.append((module, Site(path, step, phase)))

    def _leave(self, module: nn.Module, args: tuple[Any, ...], output: Any) -> None:
        stack = self.running.stack
        if any(entered is module for entered, _ in stack):
            while stack.pop()[0] is not module:
                pass


def roots_of(watched: Any) -> dict[str, nn.Module]:
    """Return the modules to hook, by name: a single module, a pipeline's modules, or a mapping's.

    Raises:
        TypeError: `watched` contains no module.
    """
    if isinstance(watched, nn.Module):
        return {"": watched}
    # A diffusers pipeline lists tokenizers and schedulers among its components too.
    components = watched if isinstance(watched, Mapping) else getattr(watched, "components", {})
    roots = {name: part for name, part in components.items() if isinstance(part, nn.Module)}
    if not roots:
        raise TypeError(
            f"nothing to watch in {type(watched).__name__}: "
            "pass a torch.nn.Module, a diffusers pipeline, or a dict of name → module"
        )
    return roots


def _uncompiled(module: nn.Module) -> nn.Module:
    """Unwrap a module that `torch.compile` wrapped, so that paths are the model's own."""
    inner = getattr(module, "_orig_mod", module)
    return inner if isinstance(inner, nn.Module) else module


def phase_of(root: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], step: int) -> str:
    """Return the phase of a root's forward pass with these arguments; see `ModuleTracker`.

    Args:
        step: forward passes of the root before this one.
    """
    try:
        given = inspect.signature(root.forward).bind_partial(*args, **kwargs).arguments
    except (TypeError, ValueError):
        given = kwargs
    if isinstance(more := given.get("kwargs"), Mapping):
        given = {**given, **more}
    if any(given.get(name) is not None for name in ("timestep", "timesteps")):
        return "denoise"
    cache = given.get("past_key_values")
    generates = cache is not None or bool(getattr(root, "can_generate", lambda: False)())
    if not generates:
        return "encode"
    if cache is not None and hasattr(cache, "get_seq_length"):
        return "decode" if int(cache.get_seq_length()) > 0 else "prefill"
    tokens = given.get("input_ids")
    one_token = tokens is not None and tokens.ndim == 2 and tokens.shape[1] == 1
    return "decode" if step > 0 and one_token else "prefill"


def matches(path: str, globs: str) -> bool:
    """Whether a module's path matches one of the comma-separated globs."""
    return any(fnmatch.fnmatchcase(path, glob.strip()) for glob in globs.split(","))
