"""Runs one or several kernels inside a live model: `with use_kernel("sage1"): pipe(...)`."""

from __future__ import annotations

import contextlib
import sys
import threading
import warnings
from collections.abc import Callable, Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

import torch

from capture.hooks.entry_points import follow_entry_points
from capture.hooks.entry_points.wrapper import tracing_reported
from capture.hooks.interceptor import Arguments, intercept
from replay.kernels.registry import Kernel, KernelNameError, find
from replay.patch.call_counts import CallCounts, Swap
from replay.patch.call_dispatcher import Around, CallDispatcher
from replay.patch.custom_op import answering, calling_operator
from replay.patch.denoising_steps import numbered_steps
from replay.patch.planned_modules import (
    NOT_PLANNED,
    Choices,
    PlannedModules,
    chosen_inside,
    kernel_here,
)
from replay.plan.key_lengths import KernelsByLength
from replay.plan.plan import Plan, PlanError
from replay.plan.plan_device import mismatch, types_at_hand
from replay.plan.step_ranges import KernelsByStep


@contextlib.contextmanager
def use_kernel(
    name: str,
    module: Any = None,
    *,
    every_thread: bool = False,
    around: Around = contextlib.nullcontext,
) -> Iterator[Swap]:
    """Run every attention call of this thread with a kernel inside the `with` block.

    This covers all calls of SDPA, and calls through the other entry points that recordings cover
    (`Swap.entry_points`). Other calls are counted as `in another thread` or `not in the module`.

    A call that the kernel does not support, or whose caller also requests attention weights, falls
    back to the model's own attention and is counted with the reason: check the counts before
    trusting a timing. A kernel that changes key or value in place (the replay reports it) changes
    the model's own tensors, such as a key/value cache.

    In training, a kernel with a backward pass handles the calls that need gradients. Before its
    first such call, the kernel runs forward and backward once beside the model. If it returns no
    gradient of a tensor that needs one, its calls fall back with that reason.

    Compiled models run compiled, with the kernel as the operator `attention_replay::attend` in
    their graphs. A model is recompiled when it first runs with a kernel, so run it once before
    timing. Afterwards the graphs with and without the kernel are cached, and leaving the block
    restores the model's own graph. In a compiled graph only calls of SDPA use the kernel. Other
    entry points keep the model's own attention there, and `Swap.in_graphs` names them when the
    graph is made (except for transformers' functions in an earlier graph). Two kinds of calls are
    counted less often than they happen. A call that needs gradients stays PyTorch's own in a
    graph and is counted once, at compilation. A CUDA graph (`mode="reduce-overhead"`) replays its
    kernels without calling this package, so its calls are counted once, at its recording.

    Args:
        name: a registered kernel, or `file.py:function`.
        module: the model whose calls the kernel handles, in any thread, except replicas of
            `nn.DataParallel`: a `torch.nn.Module`, a diffusers pipeline, or a dict of name →
            module. By default, all calls of this thread.
        every_thread: handle calls of all threads of this process, for example of
            `nn.DataParallel` and of a server's workers.
        around: a context manager to enter for each call, such as a timer.

    Yields:
        A `Swap`, whose counts are live.

    Raises:
        KernelNameError: no kernel has that name, or it cannot run on this machine.
        KernelOutputError: inside the block, a kernel's output has the wrong shape, dtype or device.
        RuntimeError: another swap, or a recording, is active.
        TypeError: `module` contains no module.

    Warns:
        UserWarning: at the end of the block, no call was handled by a kernel.

    Example:
        >>> with use_kernel("sage1") as swap:
        ...     pipe("a panda playing guitar")
        >>> print(swap)
    """

    def everywhere(arguments: Arguments) -> str:
        return name

    if module is None:
        thread = None if every_thread else threading.get_ident()
        with _in_place([name], everywhere, around, "in another thread", thread) as swap:
            yield swap
    else:
        with (
            _in_place([name], kernel_here, around, "not in the module") as swap,
            chosen_inside(module, name),
        ):
            yield swap


@contextlib.contextmanager
def use_plan(
    plan: str | Path | Plan,
    module: Any = None,
    *,
    any_device: bool = False,
    trust_code: bool = False,
    around: Around = contextlib.nullcontext,
) -> Iterator[Swap]:
    """Run attention calls with the kernel that a plan chose for them.

    The choice depends on a call's module, phase and key length, and on its denoising step if the
    plan names steps. Steps begin at 0 in each run of a live pipeline that contains the denoiser,
    or else with the block, so only one run at a time may use such a plan.

    In all other respects, this function works like `use_kernel`. Calls from other modules go to the
    model's own attention and are counted as not in the plan. The model must already be built, and
    must not run in `nn.DataParallel`. In a compiled language model, a call with one query is
    `decode` and any other call is `prefill`. A model that `torch.compile` split at graph breaks
    must be retraced before calls can be assigned to modules: if its calls are counted as not in the
    plan, call `torch.compiler.reset()` first. If the plan names steps, the denoiser itself must be
    compiled, not a function around it, before the block.

    Args:
        plan: a file written by `replay tune` or `replay plan`, or a `Plan`.
        module: the model, needed if several models in this process have modules of these names:
            a `torch.nn.Module`, a diffusers pipeline, or a dict of name → module.
        any_device: use the plan on a type of GPU other than the one it was made on, or on a CPU.
        trust_code: allow kernels that the plan names as `file.py:function`, whose code runs.
        around: a context manager to enter for each call.

    Yields:
        A `Swap`, whose counts are live.

    Raises:
        PlanError: the file is not a plan, is for another type of GPU, or names code that
            `trust_code` does not allow; inside the block, the plan names steps, and the step of a
            call is unknown or a CUDA graph is being captured.
        PlanMismatch: no module has a name in the plan.
        KernelNameError: the plan names a kernel that does not exist, or cannot run on this machine.
        RuntimeError: another swap, or a recording, is active.

    Warns:
        UserWarning: at the first call with a key length that the plan was not made for, which runs
            the kernel of the nearest range; at the first call after the last step that the plan
            names, which runs the model's own attention; and at the end of the block, if no kernel
            handled a call.

    Example:
        >>> with use_plan("plan.json") as swap:
        ...     pipe("a panda playing guitar")
        >>> print(swap)
    """
    if not isinstance(plan, Plan):
        plan = Plan.load(plan)
    # Modules are looked up before the device, because their weights determine it.
    choices, by_step = _choices(plan)
    places = PlannedModules(choices, module)
    misfit = mismatch(plan.device, types_at_hand(places.devices))
    if misfit and not any_device:
        raise PlanError(
            f"the plan {misfit}: make one here with `replay plan --dir DIR`, or use it anyway with "
            "any_device=True"
        )
    if plan.code and not trust_code:
        raise PlanError(
            f"the plan names kernels whose code would run, {', '.join(plan.code)}: read it, and "
            "allow it to run with trust_code=True"
        )
    names = dict.fromkeys(choice.kernel for choice in plan.choices)
    steps = numbered_steps(places.denoisers) if by_step else contextlib.nullcontext()
    swapped = _in_place(names, kernel_here, around, NOT_PLANNED, by_step=by_step)
    with swapped as swap, places.followed(), steps:
        swap.missing, swap.planned_lengths = places.missing, plan.kv_lens
        swap.planned_steps = plan.steps
        yield swap


def _choices(plan: Plan) -> tuple[dict[str, Choices], dict[str, KernelsByStep]]:
    """Return a plan's kernels by module, and the kernels that depend on the step by their text."""
    by_step: dict[str, KernelsByStep] = {}

    def kernels(planned: KernelsByLength | KernelsByStep) -> KernelsByLength:
        if not isinstance(planned, KernelsByStep):
            return planned
        by_step[str(planned)] = planned
        return ((0, str(planned)),)

    choices: dict[str, Choices] = {
        module: {phase: kernels(planned) for phase, planned in phases.items()}
        for module, phases in plan.by_module.items()
    }
    return choices, by_step


@contextlib.contextmanager
def use_own(around: Around = contextlib.nullcontext) -> Iterator[Swap]:
    """Leave every attention call to the model, behind the hook of `use_kernel`.

    Args:
        around: a context manager to enter for each call.

    Yields:
        A `Swap`, which counts all calls as `not_planned`.
    """
    with _followed(Swap({}), {}, _no_kernel, around) as swap:
        yield swap


def _no_kernel(arguments: Arguments) -> None:
    return None


@contextlib.contextmanager
def _in_place(
    names: Iterable[str],
    choose: Callable[[Arguments], str | None],
    around: Around,
    outside: str,
    thread: int | None = None,
    by_step: Mapping[str, KernelsByStep] | None = None,
) -> Iterator[Swap]:
    """Route calls to the kernels of these names, as `choose` decides, in one thread or in all."""
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    kernels = {name: find(name).loaded() for name in names}
    for name, kernel in kernels.items():
        if reason := kernel.unavailable(device):
            raise KernelNameError(f"{name} cannot run on {device}: {reason}")
    swap = Swap({name: CallCounts() for name in kernels}, outside=outside)
    with _followed(swap, kernels, choose, around, thread, by_step):
        yield swap
    if not swap.hits:
        unanswered = dict(swap.fallbacks)
        unanswered |= {f"{name} in a compiled graph": n for name, n in swap.in_graphs.items()}
        reasons = ", ".join(f"{count} × {reason}" for reason, count in unanswered.items()) or (
            "no attention call was seen; programs that were exported or scripted before keep "
            "their own attention"
        )
        warnings.warn(f"{', '.join(kernels)} handled no call: {reasons}", stacklevel=5)


@contextlib.contextmanager
def _followed(
    swap: Swap,
    kernels: Mapping[str, Kernel],
    choose: Callable[[Arguments], str | None],
    around: Around,
    thread: int | None = None,
    by_step: Mapping[str, KernelsByStep] | None = None,
) -> Iterator[Swap]:
    dispatcher = CallDispatcher(swap, kernels, choose, around, thread, by_step)
    with (
        intercept(dispatcher.handle, calling_operator(choose)),
        follow_entry_points(dispatcher.handle),
        tracing_reported(dispatcher.traced),
        answering(dispatcher),
        _raised_recompile_limit([*kernels, *(by_step or ())]),
    ):
        yield swap


_compiled_with: set[str] = set()


@contextlib.contextmanager
def _raised_recompile_limit(kernels: Iterable[str]) -> Iterator[None]:
    """Allow as many recompilations with each kernel as PyTorch allows without one.

    Beyond the limit, a function would silently run eagerly.
    """
    _compiled_with.update(kernels)
    # If dynamo is not imported, nothing has been compiled yet, and the import would take seconds.
    dynamo = sys.modules.get("torch._dynamo")
    if dynamo is None:
        yield
        return
    # PyTorch 2.6 uses the older name.
    name = "recompile_limit" if hasattr(dynamo.config, "recompile_limit") else "cache_size_limit"
    limit = getattr(dynamo.config, name)
    with dynamo.config.patch({name: limit * (1 + len(_compiled_with))}):
        yield
