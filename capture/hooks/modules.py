"""Tracks the running module, to attribute every attention call to a module."""

from __future__ import annotations

import contextlib
import fnmatch
import functools
import threading
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any, NamedTuple, Protocol

from torch import nn
from torch.compiler import is_compiling

from capture.hooks.attributes import attribute
from capture.hooks.module_calls import replaced_calls, running_forward
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


class Outermost(Protocol):
    """Receiver of forward passes that no other watched module surrounds."""

    def enter(self, watched: WatchedModule, site: CallSite) -> None: ...
    def leave(self) -> None:
        """End the calling thread's pass, even if `enter` raised an exception or was interrupted."""


class TensorReceiver(Protocol):
    """Receiver of the inputs of outermost modules and the outputs of all watched modules."""

    def inputs(self, site: CallSite, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> None: ...
    def output(self, site: CallSite, output: Any) -> None: ...


class RunningModules(threading.local):
    """Modules that the calling thread is running, outermost first."""

    def __init__(self) -> None:
        self.stack: list[tuple[nn.Module, CallSite]] = []
        """Each module and its site."""
        self.unfollowed = ""
        """Path of the module around the outermost one, if it ran as `.forward(...)`."""


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
        self._by_id: dict[int, WatchedModule] = {}
        """Modules that are tracked now, by their id and that of their dictionary of hooks."""
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
        self._components = frozenset(roots)
        self.outermost: list[Outermost] = []
        """Receivers of the forward passes of outermost watched modules, in each thread."""
        self.tensors: list[TensorReceiver] = []
        """Receivers of the tensors that watched modules receive and return."""
        self.unfollowed = ""
        """Path of a module around attention whose passes as `.forward(...)` are not followed."""
        self._schedulers = SchedulerCalls(scheduler_types(pipeline))
        self.running = RunningModules()

    def component(self, path: str) -> str:
        """Return the name of the root at the start of a path; empty if there is none."""
        name = path.partition(".")[0]
        return name if name in self._components else ""

    @property
    def watched(self) -> list[WatchedModule]:
        return list(self._watched.values())

    @property
    def site(self) -> CallSite:
        """Current site of the calling thread; its module may run as `module.forward(...)`."""
        running = self.running
        stack = running.stack
        site = stack[-1][1] if stack else outside()
        if _named.site is not None:
            module, phase = _named.site
            return site._replace(module=module, phase=phase)
        watched = running_forward(self._find)
        if watched is not None and watched.path != site.module:
            site = site._replace(module=watched.path)
        if unfollowed := running.unfollowed if stack else site.module:
            self.unfollowed = unfollowed
        return site

    @property
    def module(self) -> nn.Module | None:
        """Module of the current site; None outside all watched modules."""
        watched = running_forward(self._find)
        return None if watched is None else watched.module

    @property
    def may_have_run(self) -> bool:
        """True if a watched module has run."""
        return any(watched.forwards for watched in self.watched)

    def forget(self) -> None:
        """Release the modules at the end of a recording."""
        self._watched = {}

    @contextlib.contextmanager
    def watch(self) -> Iterator[None]:
        """Track the forward passes that begin in the block, each to its end.

        `nn.Module._call_impl` is replaced, because hooks would be copied with a module, would miss
        the end of a pass that Ctrl-C interrupts or that outlasts the block, and would keep
        `TransformerEncoderLayer` from its fused path, which computes other bits.
        """
        for module, watched in self._watched.items():
            self._by_id[id(module)] = self._by_id[id(module._forward_hooks)] = watched

        def follow(call: Callable[..., Any]) -> Callable[..., Any]:
            @functools.wraps(call)
            def followed(module: nn.Module, /, *args: Any, **kwargs: Any) -> Any:
                if is_compiling():  # checked first, because the code below cannot be traced
                    return call(module, *args, **kwargs)
                watched = self._find(module)
                if watched is None:
                    return call(module, *args, **kwargs)
                stack = self.running.stack
                depth = len(stack)
                try:
                    self._enter(watched, module, args, kwargs)
                    output = call(module, *args, **kwargs)
                    for receiver in self.tensors:
                        receiver.output(stack[depth][1], output)
                    return output
                finally:
                    del stack[depth:]
                    if not depth:
                        for each in self.outermost:
                            each.leave()

            return followed

        with replaced_calls(self._watched, follow), self._schedulers.count():
            try:
                yield
            finally:
                self._by_id.clear()

    def _find(self, module: nn.Module) -> WatchedModule | None:
        # A replica of DataParallel shares the dictionary of hooks with its original.
        original = module._forward_hooks if "_is_replica" in vars(module) else module
        return self._by_id.get(id(original))

    def _enter(
        self,
        watched: WatchedModule,
        module: nn.Module,
        args: tuple[Any, ...],
        kwargs: Mapping[str, Any],
    ) -> None:
        """Push a forward pass onto the stack."""
        stack = self.running.stack
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
                    step = self._schedulers.denoising_step(watched.steps, time_step)
                site = CallSite(watched.path, step, phase or "encode", forwards)
            watched.site = site
        stack.append((module, site))
        if outer is None:
            caller = None if watched.role else running_forward(self._find)
            self.running.unfollowed = caller.path if caller and caller.role else ""
            for receiver in self.tensors:
                receiver.inputs(site, args, kwargs)
            for each in self.outermost:
                each.enter(watched, site)


class _Named(threading.local):
    site: tuple[str, str] | None = None


_named = _Named()


@contextlib.contextmanager
def named_site(module: str, phase: str) -> Iterator[None]:
    """Attribute this thread's calls in the `with` block to a layer and a phase.

    An engine knows them, while compiled code runs no module, and a batch may mix phases.
    """
    outer, _named.site = _named.site, (module, phase)
    try:
        yield
    finally:
        _named.site = outer


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
