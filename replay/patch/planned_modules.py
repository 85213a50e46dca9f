"""Finds the modules that a plan names, and the kernel of the module that makes a call.

The lookup is cheap and works under `torch.compile`.

The `forward` of each module in a plan is wrapped, on the instance, and sets the kernels for its
calls while it runs. Hooks would not work: `torch.compile` overlooks hooks that are added to a model
after compilation, and recompiles for each new hook that it does notice. Dynamo notices
an instance's `forward`, and guards by value the variables that a wrapper reads. Entering the same
plan again, or another block with the same choices, therefore reuses the existing graph.

The phase is determined as in `capture`, except inside a compiled language model, whose cache cannot
be queried during tracing: there, a call with one query is `decode` and any other call is `prefill`.
"""

from __future__ import annotations

import contextlib
import functools
import gc
import itertools
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import nn

from attention_replay.errors import Error
from capture.call.pages import kv_len as length_in_pages
from capture.hooks.interceptor import Arguments
from capture.hooks.modules import roots_of
from capture.hooks.phases import ModuleRole, deciding
from replay.patch.wrapped_forward import child, is_compiled, uncompiled, wrapped
from replay.plan.key_lengths import KernelsByLength, kernel_for

Choices = Mapping[str, KernelsByLength]
"""Kernels of each phase at one module."""

NOT_PLANNED = "not in the plan"
BY_LENGTH = "prefill or decode"

ADAPTERS = ("base_model.model.", "base_model.")
"""Beginnings of paths below a wrapper of peft: of adapted layers, and of learned prompts."""


class _Running(threading.local):
    """Phase, and choices of the modules that the calling thread is currently in."""

    def __init__(self) -> None:
        self.choices: list[Choices] = []
        self.phase: str | None = None


_running = _Running()


def kernel_here(arguments: Arguments) -> str | None:
    """Return the current module's kernel for a call, or `NOT_PLANNED`; None outside modules.

    `torch.compile` can trace this function.
    """
    if not _running.choices:
        return None
    phase = _running.phase or "encode"
    if phase == BY_LENGTH:
        one_query = arguments.query.shape[-2] == 1 and arguments.key.shape[-2] > 1
        phase = "decode" if one_query else "prefill"
    kernels = _running.choices[-1].get(phase)
    if not kernels:
        return NOT_PLANNED
    # Nested tensors have no single length; the only or the first kernel refuses them.
    return kernel_for(key_length(arguments), kernels) if len(kernels) > 1 else kernels[0][1]


def key_length(arguments: Arguments) -> int:
    """Return a call's number of keys as a recording counts it; 0 for nested tensors."""
    if arguments.key.is_nested:
        return 0
    length = arguments.key.shape[-2]
    if arguments.page_table is None:
        return length
    is_packed = arguments.cu_seqlens_q is not None
    return length_in_pages(arguments.page_table.shape, length, is_packed=is_packed)


@contextlib.contextmanager
def chosen_inside(watched: Any, kernel: str) -> Iterator[None]:
    """Choose one kernel for all calls from inside a module, in any thread.

    Args:
        watched: a module, a pipeline, or a dict of name → module.
        kernel: name of the kernel that `kernel_here` returns.

    Raises:
        TypeError: `watched` contains no module.
    """
    # Methods other than `forward`, such as a VAE's `decode`, call only inner modules' forwards.
    modules = {
        module: None
        for root in roots_of(watched).values()
        for module in uncompiled(root).modules()
        if _may_attend(module)
    }
    choices = {"encode": ((0, kernel),)}  # the phase of all calls, because no phase is entered
    with contextlib.ExitStack() as stack:
        for module in modules:
            stack.enter_context(wrapped(module, functools.partial(_choosing, choices)))
        yield


class PlanMismatch(Error):
    """Reason why a plan does not fit the model; the message gives the remedy."""


class PlannedModules:
    """Modules of a model that a plan names.

    Args:
        choices: the kernels of each phase, by module path.
        watched: a module, a pipeline, or a dict of name → module; by default, all live modules
            with these paths. Paths match with or without a leading component name, and with or
            without a wrapper of peft.

    Raises:
        PlanMismatch: none of the modules was found.
        TypeError: `watched` contains no module.

    Attributes:
        missing: paths that the model does not have.
    """

    def __init__(self, choices: Mapping[str, Choices], watched: Any = None) -> None:
        if not choices:
            raise PlanMismatch("the plan names no module: make a new plan")
        if watched is None:
            gc.collect()  # a deleted model may survive in a cycle, with the same paths
            live = gc.get_objects()
            named = [("", each) for each in live if issubclass(type(each), nn.Module)]
        else:
            named = list(roots_of(watched).items())
        self._roots, found = _find(choices, [(name, uncompiled(root)) for name, root in named])
        if not found:
            where = "this process" if watched is None else type(watched).__name__
            raise PlanMismatch(
                f"{where} has no module {next(iter(choices))!r} and no other module of the plan: "
                "build the model it was made for first, and pass it as `module`"
            )
        self._deciding = {
            module: role for root in self._roots for module, role in deciding(root).items()
        }
        self._choices = {module: choices[path] for module, path in found.items()}
        self.missing = [path for path in choices if path not in found.values()]

    @property
    def denoisers(self) -> dict[nn.Module, ModuleRole]:
        """Modules around planned ones, or planned themselves, whose forward takes a time step."""
        return {module: role for module, role in self._deciding.items() if role.time_steps}

    @property
    def devices(self) -> set[torch.device]:
        """Devices of the modules' weights."""
        firsts = (next(module.parameters(), None) for module in self._choices)
        return {weight.device for weight in firsts if weight is not None}

    @contextlib.contextmanager
    def followed(self) -> Iterator[None]:
        """Wrap the forwards of the modules; restore them on exit."""
        with contextlib.ExitStack() as stack:
            for module, choices in self._following().items():
                stack.enter_context(wrapped(module, functools.partial(_choosing, choices)))
            for module, role in self._deciding.items():
                stack.enter_context(wrapped(module, functools.partial(_in_phase, role)))
            yield

    def _following(self) -> dict[nn.Module, Choices]:
        """Return the planned modules, and inner modules that may call attention unplanned."""
        below = {inner for module in self._choices for inner in module.modules()}
        unplanned = [inner for inner in below if inner not in self._choices and _may_attend(inner)]
        return {**self._choices, **{inner: {} for inner in unplanned}}


def _choosing(choices: Choices, forward: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(forward)
    def choosing(*args: Any, **kwargs: Any) -> Any:
        _running.choices.append(choices)
        try:
            return forward(*args, **kwargs)
        finally:
            _running.choices.pop()

    return choosing


def _in_phase(role: ModuleRole, forward: Callable[..., Any]) -> Callable[..., Any]:
    steps = itertools.count()
    generates = not role.encodes and (role.generates or role.caches)
    # The arguments of a forward cannot be read during tracing.
    when_traced = "denoise" if role.time_steps else BY_LENGTH if generates else "encode"

    @functools.wraps(forward)
    def in_phase(*args: Any, **kwargs: Any) -> Any:
        outer = _running.phase
        phase: str | None = when_traced
        if not torch.compiler.is_compiling():
            phase = role.phase(outer, args, kwargs, next(steps))
        _running.phase = outer if phase is None else phase
        try:
            return forward(*args, **kwargs)
        finally:
            _running.phase = outer

    return in_phase


def _find(
    choices: Mapping[str, Choices], named: Sequence[tuple[str, nn.Module]]
) -> tuple[list[nn.Module], dict[nn.Module, str]]:
    """Return the roots that contain planned modules, and the plan's path of each such module."""
    found = _below({path: path for path in choices}, named)
    if not found:
        # Either the model that was recorded or this one may be wrapped by peft.
        inner = [(name, _adapted(root)) for name, root in named]
        for prefix in ADAPTERS:
            bare = {path.replace(prefix, "", 1): path for path in choices}
            found = found or _below(bare, inner)
    return list(found), {module: path for at in found.values() for module, path in at.items()}


def _adapted(root: nn.Module) -> nn.Module:
    """Return the model inside a wrapper of peft, or else the model itself."""
    if not hasattr(type(root), "get_base_model"):
        return root
    inner = root.get_base_model()  # type: ignore[operator]
    return uncompiled(inner) if isinstance(inner, nn.Module) else root


def _below(
    paths: Mapping[str, str], named: Sequence[tuple[str, nn.Module]]
) -> dict[nn.Module, dict[nn.Module, str]]:
    """Return the planned modules below each root, with the plan's paths.

    Args:
        paths: the plan's path of each path to look for.
        named: roots with their names, which may be empty.
    """

    def look(ways: Callable[[str], Mapping[str, str]]) -> dict[nn.Module, dict[nn.Module, str]]:
        found = {}
        way_of = {name: ways(name) for name, _ in named}
        for name, root in named:
            below = [(_at(root, path), planned) for path, planned in way_of[name].items()]
            if at := {module: planned for module, planned in below if module is not None}:
                found[root] = at
        return found

    def whole(name: str) -> dict[str, str]:
        """Map paths below a root of this name to the plan's paths."""
        if not name:
            return dict(paths)
        inside = {path for path in paths if f"{path}.".startswith(f"{name}.")}
        return {path[len(name) + 1 :]: paths[path] for path in inside}

    found = look(whole)
    if not found:
        # Paths without their first name may be ambiguous, which does not matter if full paths fit.
        shortened = _shortened(paths)
        found = look(lambda name: shortened)
        without_name = look(lambda name: whole(""))
        if sum(map(len, without_name.values())) > sum(map(len, found.values())):
            found = without_name
    return found


def _shortened(paths: Mapping[str, str]) -> dict[str, str]:
    """Map paths, shortened by their first name, to the plan's paths."""
    short: dict[str, str] = {}
    for written, path in paths.items():
        rest = written.partition(".")[2]
        if rest and short.setdefault(rest, path) != path:
            raise PlanMismatch(
                f"the plan names {path!r} and {short[rest]!r}, which differ only in their "
                "component: pass the pipeline they belong to as `module`"
            )
    return short


def _at(root: nn.Module, path: str) -> nn.Module | None:
    """Return the module below `root`, ignoring the wrappers of compiled blocks in the path."""
    if path in ("", type(root).__name__):  # capture gives an unnamed root the name of its type
        return root
    module: nn.Module | None = root
    for name in path.split("."):
        if module is None:  # `not module` would call `__len__`, which some modules define
            return None
        module = child(module, name)
        while module is not None and is_compiled(module):
            module = module._modules["_orig_mod"]
    return module


def _may_attend(module: nn.Module) -> bool:
    """Return False for PyTorch's own leaf modules, the majority, and wrappers of compiled ones."""
    own = type(module).__module__.startswith("torch.nn.") and not module._modules
    return not own and not is_compiled(module)
