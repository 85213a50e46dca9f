"""Runs one or several kernels inside a live model: `with use_kernel("sage1"): pipe(...)`."""

from __future__ import annotations

import contextlib
import sys
import threading
import warnings
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from attention_replay.errors import Error
from capture.call.attention_call import AttentionCall
from capture.call.attention_variant import beyond_arguments
from capture.hooks.autocast import autocast_dtype, cast, is_any_enabled
from capture.hooks.entry_points import follow_entry_points
from capture.hooks.entry_points.wrapper import tracing_reported
from capture.hooks.interceptor import Arguments, answer, intercept
from capture.text.counted import counted
from replay.isolation.output_form import malformed
from replay.kernels.registry import Kernel, KernelNameError, find
from replay.patch.custom_op import answering, calling_operator, costs_reshape, laid_out
from replay.patch.routing import NOT_PLANNED, PlannedModules, kernel_here
from replay.plan.plan import Plan, PlanError
from replay.plan.plan_device import mismatch, types_at_hand

PlanFile = str | Path | Plan

MOST_KNOWN = 1024
"""Maximum number of call forms for which the kernel's support is cached."""


class KernelOutputError(Error):
    """Output of a kernel that does not fit the call; the message states why."""


@dataclass
class CallCounts:
    """Counts of the calls routed to one kernel."""

    hits: int = 0
    """Calls that the kernel handled."""
    fallbacks: Counter[str] = field(default_factory=Counter)
    """Calls that fell back to the model's own attention, by reason."""
    layout_copies: int = 0
    """Outputs that had to be copied into the query's memory layout: by the operator in a compiled
    model, otherwise by the model's own reshape after attention."""

    def __str__(self) -> str:
        """Format as `90 calls, 48 fell back (48 × takes no mask), 90 layout copies`."""
        text = counted(self.hits, "call")
        if self.fallbacks:
            reasons = ", ".join(f"{count} × {reason}" for reason, count in self.fallbacks.items())
            text += f", {self.fallbacks.total()} fell back ({reasons})"
        return text + (f", {self.layout_copies} layout copies" if self.layout_copies else "")


@dataclass
class Swap:
    """Counts of all calls while kernels were in use."""

    kernels: dict[str, CallCounts]
    """Counts by kernel name."""
    entry_points: dict[str, CallCounts] = field(default_factory=dict)
    """Counts of the same calls by entry point, such as `sdpa` or `transformers`."""
    in_graphs: Counter[str] = field(default_factory=Counter)
    """Functions other than SDPA that compiled graphs call directly, counted once per graph."""
    not_planned: int = 0
    """Calls by modules outside the plan, which the model's own attention handled."""
    missing: list[str] = field(default_factory=list)
    """Modules that the plan names but the model does not have."""

    @property
    def hits(self) -> int:
        return sum(tally.hits for tally in self.kernels.values())

    @property
    def fallbacks(self) -> Counter[str]:
        """Fallbacks of all kernels, and calls that are not in the plan."""
        counts = Counter({NOT_PLANNED: self.not_planned} if self.not_planned else {})
        for tally in self.kernels.values():
            counts += tally.fallbacks
        return counts

    @property
    def layout_copies(self) -> int:
        return sum(tally.layout_copies for tally in self.kernels.values())

    def __str__(self) -> str:
        """Format one line per kernel: `sage1: 90 calls, 48 fell back (48 × takes no mask)`."""
        lines = [f"{name}: {tally}" for name, tally in self.kernels.items()]
        if self.not_planned:
            lines.append(f"{NOT_PLANNED}: {counted(self.not_planned, 'call')}")
        if self.entry_points.keys() - {"sdpa"}:
            lines += [f"of these by {name}: {tally}" for name, tally in self.entry_points.items()]
        if self.in_graphs:
            calls = ", ".join(f"{count} × {name}" for name, count in self.in_graphs.items())
            lines.append(f"in compiled graphs, not answered: {calls}")
        if self.missing:
            lines.append(f"not in the model: {', '.join(self.missing)}")
        return "\n".join(lines)


Around = Callable[[], contextlib.AbstractContextManager[object]]


@contextlib.contextmanager
def use_kernel(name: str, *, around: Around = contextlib.nullcontext) -> Iterator[Swap]:
    """Run every attention call of this process with a kernel inside the `with` block.

    This covers all calls of SDPA, and calls through the other entry points that recordings cover
    (`Swap.entry_points`).

    A call that the kernel does not support, or whose caller also requests attention weights, falls
    back to the model's own attention and is counted with the reason: check the counts before
    trusting a timing. A kernel that changes key or value in place (the replay reports it) changes
    the model's own tensors, such as a key/value cache.

    Compiled models run compiled, with the kernel as the operator `attention_replay::attend` in
    their graphs. A model is recompiled when it first runs with a kernel, so run it once before
    timing. Afterwards the graphs with and without the kernel are cached, and leaving the block
    restores the model's own graph. In a compiled graph only calls of SDPA use the kernel. Other
    entry points keep the model's own attention there, and `Swap.in_graphs` names them when the
    graph is made (except for transformers' functions in an earlier graph). Two kinds of calls are
    counted less often than they happen. A call that needs gradients stays PyTorch's own in the
    graph and is counted once, at compilation. A CUDA graph (`mode="reduce-overhead"`) replays its
    kernels without calling this package, so its calls are counted once, when it is recorded.

    Args:
        name: a registered kernel, or `file.py:function`.
        around: a context manager to enter for each call, such as a timer.

    Yields:
        A `Swap`, whose counts are live.

    Raises:
        KernelNameError: no kernel has that name, or it cannot run on this machine.
        KernelOutputError: inside the block, a kernel's output has the wrong shape, dtype or device.
        RuntimeError: another swap, or a recording, is active.

    Example:
        >>> with use_kernel("sage1") as swap:
        ...     pipe("a panda playing guitar")
        >>> print(swap)
    """

    def everywhere(arguments: Arguments) -> str:
        return name

    kernels = _loaded([name])
    swap = Swap({name: CallCounts()})
    with _in_place(swap, kernels, everywhere, around):
        yield swap


@contextlib.contextmanager
def use_plan(
    plan: PlanFile | Sequence[PlanFile],
    module: Any = None,
    *,
    any_device: bool = False,
    trust_code: bool = False,
    around: Around = contextlib.nullcontext,
) -> Iterator[Swap]:
    """Run attention calls with the kernel that a plan chose for their module and phase.

    In all other respects, this function works like `use_kernel`. Calls from other modules go to the
    model's own attention and are counted as not in the plan. The model must already be built, and
    must not run in `nn.DataParallel`. In a compiled language model, a call with one query is
    `decode` and any other call is `prefill`. A model that `torch.compile` split at graph breaks
    must be retraced before calls can be assigned to modules: if its calls are counted as not in the
    plan, call `torch.compiler.reset()` first.

    Args:
        plan: a file written by `replay plan`, or a `Plan`. Of several plans for different types of
            GPU, the one that fits is used.
        module: the model, needed if several in this process have modules of these names: a
            `torch.nn.Module`, a diffusers pipeline, or a dict of name → module.
        any_device: use the plan on a type of GPU other than the one it was made on, or on a CPU.
        trust_code: allow kernels that the plan names as `file.py:function`, whose code runs.
        around: a context manager to enter for each call.

    Yields:
        A `Swap`, whose counts are live.

    Raises:
        PlanError: the file is not a plan, is for another type of GPU, or names code that
            `trust_code` does not allow.
        PlanMismatch: no module has a name in the plan.
        KernelNameError: the plan names a kernel that does not exist, or cannot run on this machine.
        RuntimeError: another swap, or a recording, is active.

    Example:
        >>> with use_plan("plan.json") as swap:
        ...     pipe("a panda playing guitar")
        >>> print(swap)
    """
    plan, places = _fitting(plan, module, any_device=any_device)
    if plan.code and not trust_code:
        raise PlanError(
            f"the plan names kernels whose code would run, {', '.join(plan.code)}: read it, and "
            "allow it to run with trust_code=True"
        )
    kernels = _loaded(dict.fromkeys(choice.kernel for choice in plan.choices))
    swap = Swap({name: CallCounts() for name in kernels}, missing=places.missing)
    with _in_place(swap, kernels, kernel_here, around), places.followed():
        yield swap


def _fitting(
    given: PlanFile | Sequence[PlanFile], module: Any, *, any_device: bool
) -> tuple[Plan, PlannedModules]:
    """Return the plan for this machine, and the modules that it names."""
    several: Sequence[PlanFile] = (
        [given] if isinstance(given, str) or not isinstance(given, Sequence) else given
    )
    if not several:
        raise PlanError("no plan is given: name a file that `replay plan` wrote")
    for each in several:
        if not isinstance(each, str | Path | Plan):
            raise PlanError(
                f"expected a plan, got {type(each).__name__}: name a `replay plan` file, "
                "or several in a list"
            )
    # Modules are looked up before devices, because their weights determine the relevant devices.
    plans = [each if isinstance(each, Plan) else Plan.load(each) for each in several]
    found = [PlannedModules(_choices(plan), module) for plan in plans]
    misfits = [
        mismatch(plan.device, types_at_hand(places.devices))
        for plan, places in zip(plans, found, strict=True)
    ]
    names = [f"the plan {each}" if not isinstance(each, Plan) else "the plan" for each in several]
    # A single plan may be used elsewhere on request; of several plans, one must fit.
    if len(plans) == 1:
        if misfits[0] and not any_device:
            raise PlanError(
                f"{names[0]} {misfits[0]}: make one here with `replay plan --dir DIR`, or "
                "use it anyway with any_device=True"
            )
        if not plans[0].device and not isinstance(given, Plan):
            warnings.warn(
                f"{names[0]} does not name the type of GPU that it was made on: make it again to "
                "be sure that its kernels are the fastest on this machine",
                stacklevel=4,
            )
        return plans[0], found[0]
    fitting = [at for at, plan in enumerate(plans) if plan.device and not misfits[at]]
    if len(fitting) != 1:
        devices = ", ".join(
            f"{name} was made on {plan.device or 'an unknown type of GPU'}"
            for name, plan in zip(names, plans, strict=True)
        )
        machine = " or ".join(types_at_hand(found[0].devices))
        count = "several plans fit" if fitting else "no plan fits"
        raise PlanError(f"{count} this machine, {machine}: {devices}; name one that does")
    return plans[fitting[0]], found[fitting[0]]


def _choices(plan: Plan) -> dict[str, dict[str, str]]:
    """Return the kernel of each phase, by module."""
    choices: dict[str, dict[str, str]] = {}
    for choice in plan.choices:
        choices.setdefault(choice.module, {})[choice.phase] = choice.kernel
    return choices


def _loaded(names: Iterable[str]) -> dict[str, Kernel]:
    """Load kernels by name."""
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    kernels = {name: find(name).loaded() for name in names}
    for name, kernel in kernels.items():
        if reason := kernel.unavailable(device):
            raise KernelNameError(f"{name} cannot run on {device}: {reason}")
    return kernels


@contextlib.contextmanager
def _in_place(
    swap: Swap,
    kernels: Mapping[str, Kernel],
    choose: Callable[[Arguments], str | None],
    around: Around,
) -> Iterator[None]:
    dispatcher = _Dispatcher(swap, kernels, choose, around)
    with (
        intercept(dispatcher.handle, calling_operator(choose)),
        follow_entry_points(dispatcher.handle),
        tracing_reported(dispatcher.traced),
        answering(dispatcher),
        _raised_recompile_limit(kernels),
    ):
        yield


class _Known:
    """Cached facts shared by calls that differ only in their values."""

    __slots__ = ("costs_reshape", "output", "reason")

    def __init__(self, reason: str | None) -> None:
        self.reason = reason
        """Reason why the kernel cannot run these calls; None if it can."""
        self.output: object = None
        """Shape, strides, dtype and device of the last output that was checked."""
        self.costs_reshape = False
        """True if the model's own reshape copies this output."""


class _Dispatcher:
    """Runs kernels on calls and counts the outcomes."""

    def __init__(
        self,
        swap: Swap,
        kernels: Mapping[str, Kernel],
        choose: Callable[[Arguments], str | None],
        around: Around,
    ) -> None:
        self._swap = swap
        self._around = None if around is contextlib.nullcontext else around
        self._kernels = kernels
        self._attentions = {name: kernel.attention for name, kernel in kernels.items()}
        self._known: dict[object, _Known] = {}
        self._choose = choose
        self._own = F.scaled_dot_product_attention
        self._counting = threading.Lock()

    def handle(
        self, arguments: Arguments, proceed: Callable[[], Tensor], sdpa: Callable[..., Tensor]
    ) -> Tensor:
        """Handle a call that is not compiled."""
        name = self._choose(arguments) or NOT_PLANNED
        if is_any_enabled():  # a kernel does not cast its inputs under autocast, as SDPA would
            arguments = cast(arguments, autocast_dtype(arguments.query))
        output, known = self._attend(name, arguments, proceed)
        if known.costs_reshape:
            self._count_copy(name, arguments.entry_point)
        return output

    def answer(self, kernel: str, arguments: Arguments) -> Tensor:
        """Handle a call from a compiled graph."""
        name = kernel or self._choose(arguments) or NOT_PLANNED

        def handle(
            arguments: Arguments, proceed: Callable[[], Tensor], sdpa: Callable[..., Tensor]
        ) -> Tensor:
            output, is_copy = laid_out(self._attend(name, arguments, proceed)[0], arguments.query)
            if is_copy:
                self._count_copy(name, arguments.entry_point)
            return output

        def proceed() -> Tensor:
            return self._own(**_keywords(arguments))

        output = answer(handle, arguments, proceed, self._own)
        return laid_out(output, arguments.query)[0]

    def traced(self, function: str) -> None:
        with self._counting:
            self._swap.in_graphs[function] += 1

    def refuse(self, kernel: str, reason: str) -> None:
        self._count_fallback(kernel or NOT_PLANNED, reason, "sdpa")

    def _attend(
        self, name: str, arguments: Arguments, proceed: Callable[[], Tensor]
    ) -> tuple[Tensor, _Known]:
        """Return the output, and the cached facts about such calls."""
        if self._around is None:
            return self._run(name, arguments, proceed)
        with self._around():
            return self._run(name, arguments, proceed)

    def _run(
        self, name: str, arguments: Arguments, proceed: Callable[[], Tensor]
    ) -> tuple[Tensor, _Known]:
        known = self._known_of(name, arguments)
        if known.reason is not None:
            self._count_fallback(name, known.reason, arguments.entry_point)
            return proceed(), known
        output = self._attentions[name](**_keywords(arguments))
        form: object = None
        if isinstance(output, Tensor):
            form = (output.shape, output.stride(), output.dtype, output.device)
        if form is None or form != known.output:
            if not _fits(output, arguments):
                wrong = malformed(output, AttentionCall(**arguments.fields()))
                raise KernelOutputError(f"{name} {wrong or 'returned no output of this call'}")
            known.output, known.costs_reshape = form, costs_reshape(output, arguments.query)
        with self._counting:
            for tally in self._tallies(name, arguments.entry_point):
                tally.hits += 1
        return output, known

    def _known_of(self, name: str, arguments: Arguments) -> _Known:
        """Return the facts about a call; values of masks and lengths matter if there is padding."""
        kernel = self._kernels.get(name)
        if kernel is None:
            return _Known(NOT_PLANNED)
        if arguments.returns:
            return _Known(f"the model asks for {arguments.returns}")
        if arguments.refusal:
            return _Known(arguments.refusal)
        query, key, value, attn_mask, dropout_p, is_causal, scale, enable_gqa = arguments[:8]
        if query.ndim != 4:
            return _Known("not four-dimensional")
        if query.requires_grad and torch.is_grad_enabled():
            return _Known("gradients are needed")
        if attn_mask is not None or arguments.features:
            return _Known(kernel.refuses(AttentionCall(**arguments.fields())))
        # Written out for speed, because every call passes here.
        signature = (
            *(name, dropout_p, is_causal, scale, enable_gqa, query.device),
            *(query.shape, query.stride(), query.dtype),
            *(key.shape, key.stride(), key.dtype),
            *(value.shape, value.stride(), value.dtype),
        )
        known = self._known.get(signature)
        if known is None:
            if len(self._known) >= MOST_KNOWN:  # a decoder has a new shape for every token
                self._known.clear()
            known = _Known(kernel.refuses(AttentionCall(**arguments.fields())))
            self._known[signature] = known
        return known

    def _count_fallback(self, name: str, reason: str, entry_point: str) -> None:
        with self._counting:
            for tally in self._tallies(name, entry_point):
                tally.fallbacks[reason] += 1
            self._swap.not_planned += name not in self._swap.kernels

    def _count_copy(self, name: str, entry_point: str) -> None:
        with self._counting:
            for tally in self._tallies(name, entry_point):
                tally.layout_copies += 1

    def _tallies(self, name: str, entry_point: str) -> tuple[CallCounts, ...]:
        """Return the counts that a call belongs to."""
        of_entry_point = self._swap.entry_points.get(entry_point)
        if of_entry_point is None:
            of_entry_point = self._swap.entry_points[entry_point] = CallCounts()
        of_kernel = self._swap.kernels.get(name)
        return (of_entry_point,) if of_kernel is None else (of_entry_point, of_kernel)


def _fits(output: object, arguments: Arguments) -> bool:
    """Return True if an output has the expected form; a reshape may not notice a wrong one."""
    query, key, value = arguments[:3]
    if not isinstance(output, Tensor) or output.ndim != 4:
        return False
    if output.shape[2:] != (query.shape[2], value.shape[3]):
        return False
    if (output.dtype, output.device) != (query.dtype, query.device):
        return False
    # With broadcast sizes or paged keys, the query alone does not determine the first two sizes.
    same_batch = query.shape[0] == key.shape[0]
    same_heads = arguments.enable_gqa or query.shape[1] == key.shape[1]
    return output.shape[:2] == query.shape[:2] or not (same_batch and same_heads)


def _keywords(arguments: Arguments) -> dict[str, Any]:
    """Convert to keywords, without unused options, because not every function accepts them."""
    keywords = dict(zip(SDPA_ARGUMENTS, arguments, strict=False))
    if not arguments.enable_gqa:
        del keywords["enable_gqa"]
    if arguments.entry_point != "sdpa":
        keywords.update(beyond_arguments(arguments))
    return keywords


SDPA_ARGUMENTS = Arguments._fields[:8]


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
