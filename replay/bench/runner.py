"""The replay of calls in this process: check each kernel, time it, confirm it, make its row."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import NamedTuple

import torch
from torch import Tensor

from capture.call.attention_call import AttentionCall
from capture.call.attention_variant import beyond
from capture.call.batch import Batch
from capture.errors import DatasetError
from capture.hooks.backends import BACKENDS, chosen_backend
from capture.storage.header import dtype_name
from replay.accuracy.nonfinite import nonfinite_inputs
from replay.bench.energy_rows import with_energy
from replay.bench.forms import Forms, refusal
from replay.bench.output_check import Checker, output_of, stderr_apart
from replay.bench.reported_stages import DONE, LOADING, REFERENCE, TIMING
from replay.bench.settings import Settings, WorkerOptions
from replay.bench.shared_inputs import SharedInputs, TimedPart
from replay.bench.speedups import with_speedups
from replay.bench.stages import CheckedKernel, TimedKernel, make_row
from replay.bench.training_step import TrainingStep
from replay.isolation.in_process import InProcessJudge
from replay.isolation.inputs import Inputs
from replay.isolation.judge import OutputJudge
from replay.isolation.process_state import ProcessState
from replay.kernels.failures import ContextLost, Finding, classify
from replay.kernels.registry import Kernel, catalogue, find
from replay.rows.agreement import with_agreement
from replay.rows.row import (
    DEFAULT_BASELINE,
    HERE,
    UNCONFIRMED,
    CallFacts,
    Machine,
    Mask,
    Roof,
    Row,
    Status,
)
from replay.timing.gpu_state import gpu_is_lost
from replay.timing.machine import describe
from replay.timing.roof import measure_roof
from replay.timing.rounds import Turns, alone, measure
from replay.workloads.grad_outputs import with_grad_output
from replay.workloads.workload import Workload

BEYOND_SDPA = ("torch-masked", "eager")
"""Kernels that models call for features that SDPA has no argument for."""

ENGINES = {
    "transformers.sdpa": ("torch-masked",),
    "vllm-flash_attn": (
        *("vllm-flash-attn", "vllm-flash-attn-fp8"),
        *("fa3-kvcache", "fa3-kvcache-fp8"),
    ),
    "vllm-flash_attn_mla": ("fa3-mla",),
    "vllm-flashinfer": ("flashinfer-decode", "flashinfer-paged"),
    "vllm-flashinfer_mla": ("flashinfer-mla",),
    "vllm-flashmla": ("flash-mla",),
    "vllm-triton_attn": ("vllm-triton",),
}
"""Kernels of the same library for each backend of an engine, and PyTorch's SDPA for batches that
transformers passes to it with a mask; the first that runs a call represents the backend."""

IN_PROCESS = f"{UNCONFIRMED}: without a worker, your kernel could change its time and verdict"
"""Flag of a user's kernel that ran without a worker process."""

JudgeFactory = Callable[[AttentionCall, Settings, "Tensor | None"], OutputJudge]
"""Function that makes the judge of a call from the call, the settings, and the output of the kernel
that errors are computed against."""


class Loaded(NamedTuple):
    """Facts about a call before any kernel runs on it."""

    facts: CallFacts
    machine: Machine
    roof: Roof | None = None
    """Measured peaks of the machine; None unless the settings request `roofline`."""
    baseline: str = ""
    """Kernel that speed-ups are relative to."""


def replay_here(
    workloads: Iterable[Workload],
    kernels: Sequence[Kernel],
    settings: Settings,
    on_progress: Callable[[Workload, str], None] | None = None,
    on_loaded: Callable[[Loaded], None] | None = None,
    options: WorkerOptions = WorkerOptions(),  # noqa: B008 - it is immutable
    judge_factory: JudgeFactory | None = None,
    process_state: ProcessState | None = None,
    turns: Turns = alone,
) -> Iterator[Row]:
    """Yield a row for every kernel on every call, in order; an unreadable call gets one error row.

    Everything runs in this process, so a kernel that crashes ends the process
    (`replay.workers.shared_rounds.replay_in_workers` uses workers instead).

    Each output is checked against the reference before anything is timed. All kernels of a call are
    timed together, in shuffled rounds. Afterwards, blocks of calls confirm their times and outputs.
    """
    with torch.no_grad():  # kernels run in this mode, so a change of mode is noticed
        process_state = process_state or ProcessState()
    judge_factory = judge_factory or local_judge
    report = on_progress or (lambda workload, stage: None)
    machine = describe(settings.device)
    roofs: dict[torch.dtype, Roof | None] = {}

    def unreadable(workload: Workload, status: Status, reason: str) -> Row:
        facts = CallFacts(workload.name)
        return Row("", facts, status, reason, options.environment, machine=machine)

    for workload in workloads:
        report(workload, LOADING)
        try:
            call = workload.load_to_judge(settings.device, backward=settings.backward)
            grad_output = ""
            if settings.backward:
                grad_output = "recorded" if call.grad_output is not None else "drawn"
                call = with_grad_output(call, settings.seed)
            forms = Forms.of(call)
            roof = roofs.get(call.dtype)
            if settings.roofline and (call.dtype not in roofs or (roof and roof.interrupted)):
                roof = roofs[call.dtype] = measure_roof(call.dtype, settings.device)
            stage = functools.partial(report, workload)
            loaded = Loaded(
                replace(_facts(workload, forms), grad_output=grad_output),
                machine,
                roof,
                _baseline(call, settings, options, stage),
            )
            if on_loaded is not None:
                on_loaded(loaded)
            with torch.no_grad():  # as in models; inference mode would make launches cheaper
                rows = _replay_call(
                    forms,
                    loaded,
                    kernels,
                    settings,
                    options,
                    stage,
                    judge_factory,
                    process_state,
                    turns,
                )
            if not options.in_worker:  # the parent of workers compares the rows of all workers
                rows = with_speedups(rows, loaded.baseline)
        except DatasetError as error:
            rows = [unreadable(workload, "error", str(error))]
        except (RuntimeError, MemoryError) as error:
            finding = classify(error)
            if gpu_is_lost(settings.device):
                raise ContextLost(finding.reason) from error
            if finding.status != "out-of-memory":
                raise
            reason = f"{workload.name}: {finding.reason}"
            rows = [unreadable(workload, finding.status, reason)]
        report(workload, DONE)
        yield from rows if options.in_worker else with_agreement(rows)


def _replay_call(
    forms: Forms,
    loaded: Loaded,
    kernels: Sequence[Kernel],
    settings: Settings,
    options: WorkerOptions,
    report: Callable[[str], None],
    judge_factory: JudgeFactory,
    process_state: ProcessState,
    turns: Turns,
) -> list[Row]:
    call = forms.call
    everyone = {kernel.name: kernel for kernel in kernels}
    for name in filter(None, (loaded.baseline, settings.compared_kernel)):
        if options.has(special := find(name)):
            everyone.setdefault(name, special)
    # Copy the inputs before any kernel runs, because a kernel may change them.
    inputs = Inputs(*forms.all)
    compared = _compared_output(forms, inputs, process_state, everyone, settings, report)
    report(REFERENCE)
    judge = judge_factory(call, settings, compared)
    save_to = _save_to(settings, options, loaded.facts)
    checker = Checker(forms, inputs, process_state, judge, settings, options, save_to)
    checked = []
    for name, kernel in everyone.items():
        report(name)
        found = checker.check(kernel, functools.partial(report, name))
        if name == DEFAULT_BASELINE:
            found = replace(found, flags=(*found.flags, *_other_choice(call)))
        checked.append(found)
    # Time kernels only after all were checked, so that the rounds contain no compilation.
    report(TIMING)
    controls = []
    if options.control and settings.device.type == "cpu":
        controls = [CheckedKernel(find(options.control), call, Finding("ok"))]
    members = [*checked, *controls]
    observer = SharedInputs(members, inputs, process_state)
    all_timed = time_together(members, observer, settings, options, report, turns)
    for control in (each.samples for each in all_timed[len(checked) :]):
        control_ms = () if control is None or control.error else control.ms
        all_timed = [replace(timed, control_ms=control_ms) for timed in all_timed[: len(checked)]]
    if settings.energy:
        for place, timed in enumerate(all_timed):
            report(timed.checked.kernel.name)
            all_timed[place] = with_energy(timed, inputs, process_state, settings.device)
    rows = []
    for confirmed in checker.confirm(all_timed, loaded.baseline, report, turns):
        row = make_row(confirmed, loaded.facts, settings, options, loaded.machine, loaded.roof)
        if confirmed.timed.checked.kernel.source and not options.in_worker and row.is_correct:
            row = replace(row, flags=(*row.flags, IN_PROCESS))
        rows.append(row)
    return rows


def _baseline(
    call: AttentionCall, settings: Settings, options: WorkerOptions, report: Callable[[str], None]
) -> str:
    """Return the name of the kernel to compare with: the function that the model called.

    The baseline is usually plain SDPA, whatever backend PyTorch chose during the recording. If the
    model chose the kernel itself (`_pinned`), the baseline is that kernel, if it can run. For calls
    with features beyond SDPA, the baseline is the first that can run of the recorded function, or
    the kernel that represents it (`ENGINES`), and `BEYOND_SDPA`.
    """
    if settings.baseline is not None or options.process or options.environment != HERE:
        return settings.baseline or ""
    if call.features:
        asked = [_represented(call), *BEYOND_SDPA]
        known = [kernel for name in asked if (kernel := catalogue().get(name))]
        able = (kernel.name for kernel in known if not refusal(kernel, call, settings.device))
        return next(able, DEFAULT_BASELINE)
    kernel = catalogue().get(_pinned(call))
    if kernel is None or not options.has(kernel):
        return DEFAULT_BASELINE
    report(kernel.name)
    return DEFAULT_BASELINE if refusal(kernel, call, settings.device) else kernel.name


def _represented(call: AttentionCall) -> str:
    """Return the kernel that represents the recorded backend: usually the one of the same name.

    A kernel that cannot run here represents it only if none can.
    """
    known = [catalogue()[name] for name in ENGINES.get(call.origin.backend, ())]
    takes = [kernel for kernel in known if not kernel.refuses(call)]
    runs = (kernel for kernel in takes if not refusal(kernel, call, call.device))
    kernel = next(runs, next(iter(takes), None))
    return call.origin.backend if kernel is None else kernel.name


def _pinned(call: AttentionCall) -> str:
    """Return the kernel that the model chose itself; empty if plain SDPA runs the same one here."""
    origin = call.origin
    if origin.entry_point != "sdpa":
        return _represented(call)
    is_torchs = origin.backend in ("", *BACKENDS.values())
    is_free = not origin.disabled_backends or chosen_backend(call) == origin.backend
    return "" if is_torchs and is_free else origin.backend


def _other_choice(call: AttentionCall) -> tuple[str, ...]:
    """Return a flag if plain SDPA chooses another backend here than during the recording.

    Calls recorded on another type of device get no flag.
    """
    if call.features:
        return ()
    recorded, here = call.origin.backend, chosen_backend(call)
    alike = call.origin.device_type == call.device.type
    if not alike or recorded not in BACKENDS.values() or here in ("", recorded):
        return ()
    return (f"PyTorch chooses {here} here, and chose {recorded} when the call was recorded",)


def local_judge(call: AttentionCall, settings: Settings, compared: Tensor | None) -> OutputJudge:
    """Make a judge in this process, which protects only against accidents."""
    return InProcessJudge(
        call, settings.errors_against, settings.compare_stats, compared, settings.tolerances
    )


def _compared_output(
    forms: Forms,
    inputs: Inputs,
    process_state: ProcessState,
    kernels: dict[str, Kernel],
    settings: Settings,
    report: Callable[[str], None],
) -> Tensor | None:
    compared = kernels.get(settings.compared_kernel or "")
    if compared is None:
        return None
    report(compared.name)
    output = output_of(compared, forms, inputs)
    process_state.restore(compared.name)
    return output


def _save_to(settings: Settings, options: WorkerOptions, facts: CallFacts) -> Path | None:
    if settings.save_output is None:
        return None
    elsewhere = () if options.environment == HERE else (options.environment,)
    return settings.save_output.joinpath(*elsewhere, facts.name)


def time_together(
    checked: Sequence[CheckedKernel],
    observer: SharedInputs,
    settings: Settings,
    options: WorkerOptions,
    report: Callable[[str], None],
    turns: Turns = alone,
) -> list[TimedKernel]:
    """Time the kernels that ran, their cores and their backward passes, in the same rounds."""
    functions: dict[TimedPart, Callable[[], object]] = {}
    cores: dict[str, Callable[[], Tensor]] = {}
    faults: dict[str, str] = {}
    for member in checked:
        name = member.kernel.name
        if not member.ran or member.is_interpreted:
            continue
        functions[TimedPart(name)] = member.run
        if member.gradients is not None:
            steps = [TrainingStep(member.kernel.attention, member.call) for _ in range(2)]
            observer.prepare[TimedPart(name, "backward")] = steps[0].prepare
            functions[TimedPart(name, "backward")] = steps[0].backward
            functions[TimedPart(name, "both")] = steps[1].backward
        if member.kernel.prepare is not None:
            report(name)
            # Prepare the core outside the timed interval: core time excludes the preparation.
            try:
                cores[name] = member.kernel.prepare(member.call)
                functions[TimedPart(name, "core")] = cores[name]
            except BaseException as error:
                faults[name] = classify(error).reason
            observer.restore(name)
    with stderr_apart(options):
        measured = measure(
            functions,
            settings.device,
            cache=settings.cache,
            rounds=settings.rounds,
            calls_before=settings.calls_before,
            seed=settings.seed,
            max_seconds=settings.max_seconds,
            on_sample=lambda part: report(part.kernel),
            synchronous=options.synchronous,
            observer=observer,
            turns=turns,
        )
    return [
        TimedKernel(
            member,
            measured.get(TimedPart(name)),
            cores.get(name),
            measured.get(TimedPart(name, "core")),
            faults.get(name, ""),
            tuple(sorted(observer.changed.get(name, ()))),
            backward_samples=measured.get(TimedPart(name, "backward")),
            both_samples=measured.get(TimedPart(name, "both")),
        )
        for member in checked
        if (name := member.kernel.name)
    ]


def _facts(workload: Workload, forms: Forms) -> CallFacts:
    call = forms.call
    origin, mask, batch = call.origin, call.attn_mask, Batch.of(call)
    described = None
    if mask is not None:
        described = Mask("bool" if mask.dtype == torch.bool else "float", tuple(mask.shape))
    return CallFacts(
        name=workload.name,
        model=origin.model,
        weights=origin.weights,
        module=origin.module,
        phase=origin.phase,
        backend=origin.backend,
        pinned=_pinned(call),
        step=origin.step,
        call_index=origin.call_index,
        shape=call.shape,
        dtype=dtype_name(call.dtype),
        is_causal=call.is_causal,
        mask=described,
        mask_structure=str(forms.structure or ""),
        beyond=beyond(call),
        nonfinite="" if (odd := nonfinite_inputs(call)) is None else odd.sentence,
        entry_point=origin.entry_point,
        batch=None if batch is None else batch.size,
        has_window=None if batch is None else call.variant.window[0] is not None,
    )
