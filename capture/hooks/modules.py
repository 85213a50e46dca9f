"""Tracks the running module with forward hooks, to attribute every attention call to a module."""

from __future__ import annotations

import contextlib
import fnmatch
import threading
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any, NamedTuple, Protocol

import torch
from torch import nn
from torch.compiler import is_compiling
from torch.jit._trace import TopLevelTracedModule

from capture.hooks.attributes import attribute
from capture.hooks.phases import RECOMPUTE, ModuleRole, in_backward, roles, takes_time_step
from capture.hooks.step_clock import SchedulerCalls, StepCounter, scheduler_types


class CallSite(NamedTuple):
    """Place in the model where a call was made."""

    module: str = ""
    """Dotted path of the innermost watched module; empty outside all watched modules."""
    step: int = 0
    """Index of the denoising step, or else the forward index."""
    phase: str = "encode"
    forward_index: int = 0
    """Index of the forward pass of the module that decides the phase, from 0."""


@dataclass(eq=False, slots=True)
class WatchedModule:
    """A module whose forward passes are tracked."""

    path: str
    module: nn.Module
    role: ModuleRole | None
    """Role of the module; None if the module always has its caller's phase."""
    forwards: int = 0
    """Number of forward passes so far, without recomputations in backward passes."""
    site: CallSite = field(default_factory=CallSite)
    """Site of the latest forward pass."""
    steps: StepCounter = field(default_factory=StepCounter)
    """Denoising steps of the module, if no scheduler is known."""
    is_script: bool = False
    """True for TorchScript, which does not support hooks."""


class Outermost(Protocol):
    """Receiver of forward passes that no other watched module surrounds."""

    def enter(self, watched: WatchedModule, site: CallSite) -> None: ...
    def leave(self) -> None: ...


class RunningModules(threading.local):
    """Modules that the calling thread is running, outermost first."""

    def __init__(self, outermost: list[Outermost], schedulers: SchedulerCalls) -> None:
        self.stack: list[tuple[nn.Module, CallSite]] = []
        """Each module and its site."""
        self.outermost = outermost
        self.schedulers = schedulers


class _Hook:
    """A forward hook that does nothing in a copied, pickled or exported model."""

    __slots__ = ("_running", "_watched")

    def __init__(self, running: RunningModules, watched: WatchedModule) -> None:
        self._running, self._watched = running, watched

    def __reduce__(self) -> tuple[Any, ...]:
        # A function that accepts any arguments, does nothing, and does not need this package.
        return getattr, (contextlib.nullcontext(), "__exit__")


class _Enter(_Hook):
    __slots__ = ()

    def __call__(self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        if is_compiling():
            return
        watched, stack = self._watched, self._running.stack
        outer = stack[-1][1] if stack else None
        if in_backward():
            site = watched.site._replace(module=watched.path, phase=RECOMPUTE)
        else:
            forwards = watched.forwards
            watched.forwards = forwards + 1
            phase = None if outer else "encode"
            if watched.role is not None:
                with contextlib.suppress(Exception):  # the model's own classes may raise
                    phase = watched.role.phase(outer and outer.phase, args, kwargs, forwards)
            if phase is None and outer is not None:
                site = outer._replace(module=watched.path)
            else:
                step = forwards
                if phase == "denoise" and watched.role is not None:
                    time_step = watched.role.time_step(args, kwargs)
                    step = self._running.schedulers.denoising_step(watched.steps, time_step)
                site = CallSite(watched.path, step, phase or "encode", forwards)
            watched.site = site
        stack.append((module, site))
        if outer is None:
            for each in self._running.outermost:
                each.enter(watched, site)


class _Leave(_Hook):
    __slots__ = ()

    def __call__(self, module: nn.Module, args: tuple[Any, ...], output: Any) -> None:
        if is_compiling():
            return
        stack = self._running.stack
        if not stack or stack[-1][0] is not module:
            if not any(entered is module for entered, _ in stack):
                return  # the module began before it was hooked
            while stack[-1][0] is not module:
                stack.pop()
        stack.pop()
        if not stack:
            for each in self._running.outermost:
                each.leave()


class ModuleTracker:
    """A tracker of the forward passes of the root modules and all modules inside them, per thread.

    The innermost surrounding denoiser or language model decides the phase of a forward pass
    (`capture.hooks.phases`). If there is none, the outermost watched module decides.

    Args:
        roots: modules by the prefix of their paths. The path of a root with an empty prefix is its
            class name.
        pipeline: pipeline of the modules, whose scheduler calls count as steps.
    """

    def __init__(self, roots: Mapping[str, nn.Module], pipeline: Any = None) -> None:
        self._watched: dict[nn.Module, WatchedModule] = {}
        for name, root in roots.items():
            root = _uncompiled(root)
            known = roles(root)
            for path, module in root.named_modules():
                if module not in self._watched:
                    parts = [
                        part for part in (name, *path.split(".")) if part not in ("", "_orig_mod")
                    ]
                    role = known[module] if known[module].decides else None
                    self._watched[module] = WatchedModule(
                        ".".join(parts) or type(module).__name__,
                        module,
                        role,
                    )
        self._unhooked = {
            inner
            for module in self._watched
            if isinstance(module, nn.TransformerEncoderLayer) and not module.training
            for inner in module.modules()
        }
        for module, watched in self._watched.items():
            if isinstance(module, torch.jit.ScriptModule) and module not in self._unhooked:
                self._unhooked.update(inner for inner in module.modules() if inner is not module)
                watched.is_script = not isinstance(module, TopLevelTracedModule)
        self._components = frozenset(roots)
        self.outermost: list[Outermost] = []
        """Receivers of the forward passes of outermost watched modules, in each thread."""
        schedulers = SchedulerCalls(scheduler_types(pipeline))
        self.running = RunningModules(self.outermost, schedulers)

    def component(self, path: str) -> str:
        """Return the name of the root at the start of a path; empty if there is none."""
        name = path.partition(".")[0]
        return name if name in self._components else ""

    @property
    def watched(self) -> list[WatchedModule]:
        return list(self._watched.values())

    @property
    def site(self) -> CallSite:
        """Current site of the calling thread."""
        stack = self.running.stack
        return stack[-1][1] if stack else outside()

    @property
    def may_have_run(self) -> bool:
        """True if a watched module has run, or may have run because it does not support hooks."""
        return any(
            watched.forwards or watched.is_script or watched.module in self._unhooked
            for watched in self.watched
        )

    def forget(self) -> None:
        """Release the modules at the end of a recording."""
        self._watched, self._unhooked = {}, set()

    @contextlib.contextmanager
    def watch(self) -> Iterator[None]:
        """Hook every module, and remove the hooks on exit.

        TorchScript does not support hooks. In evaluation mode, PyTorch's `TransformerEncoderLayer`
        gets no hooks and counts as part of its caller, because with hooks it would not use its
        fused path and would give different results.
        """
        handles = []
        try:
            for module, watched in self._watched.items():
                if watched.is_script or module in self._unhooked:
                    continue
                # The hook holds the module's state, because DataParallel runs replicas of modules.
                enter, leave = _Enter(self.running, watched), _Leave(self.running, watched)
                handles.append(
                    module.register_forward_pre_hook(enter, with_kwargs=True, prepend=True)
                )
                # always_call, so that a forward pass that raises also restores the stack.
                handles.append(module.register_forward_hook(leave, always_call=True))
            with self.running.schedulers.count():
                yield
        finally:
            for handle in handles:
                handle.remove()


def outside() -> CallSite:
    """Return the site of a thread that is outside all watched modules."""
    return CallSite(phase=RECOMPUTE) if in_backward() else CallSite()


def roots_of(watched: Any) -> dict[str, nn.Module]:
    """Return the modules to hook, by name: one module, or the modules of a pipeline or mapping.

    Raises:
        TypeError: `watched` contains no module.
    """
    if isinstance(watched, nn.Module):
        roots = {"": watched}
    else:
        # The components of a diffusers pipeline also include tokenizers and schedulers.
        components = (
            watched if isinstance(watched, Mapping) else attribute(watched, "components", {})
        )
        roots = {name: part for name, part in components.items() if isinstance(part, nn.Module)}
    if not roots:
        raise TypeError(
            f"nothing to watch in {type(watched).__name__}: "
            "pass a torch.nn.Module, a diffusers pipeline, or a dict of name → module"
        )
    return roots


def _uncompiled(module: nn.Module) -> nn.Module:
    """Unwrap a module that `torch.compile` wrapped, so that paths match the original model."""
    inner = attribute(module, "_orig_mod", module)
    return inner if isinstance(inner, nn.Module) else module


def denoisers(roots: Mapping[str, nn.Module]) -> list[str]:
    """Return the names of the components whose forward takes a time step.

    If there are none, `transformer` or `unet` is returned.
    """
    found = [name for name, root in roots.items() if takes_time_step(_uncompiled(root))]
    return found or [name for name in ("transformer", "unet") if name in roots][:1]


def matches(path: str, globs: str) -> bool:
    """Return whether a module's path matches one of the comma-separated globs."""
    return any(fnmatch.fnmatchcase(path, glob.strip()) for glob in globs.split(","))
