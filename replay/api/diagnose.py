"""Function `doctor`, which finds out why kernels are wrong, where, and which to use instead."""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Iterable, Sequence
from contextlib import AbstractContextManager
from dataclasses import replace
from typing import TYPE_CHECKING, Any, Protocol, overload

from replay.api.choices import joined_names, thresholds
from replay.api.chosen_device import ChoiceError, device_of
from replay.api.chosen_kernels import check_importable
from replay.api.messages import say
from replay.api.replay_calls import call_choice

if TYPE_CHECKING:
    import torch
    from torch import Tensor

    from capture.call.attention_call import AttentionCall
    from capture.storage.dataset import Dataset
    from replay.accuracy.thresholds import Thresholds
    from replay.diagnosis.diagnosis import Diagnosis
    from replay.diagnosis.examinations import Diagnoses
    from replay.kernels.registry import Kernel
    from replay.workers.environments import ProbeResult
    from replay.workers.execution import Progress
    from replay.workloads.workload import Workload


REPLACEMENTS = "another kernel"
"""Task that follows the examinations: to find a right kernel for calls with a wrong one."""


class Pipeline(Protocol):
    """The interface of a diffusers pipeline that `doctor` requires."""

    components: Any


class ExaminationInterrupted(KeyboardInterrupt):
    """Raised when Ctrl-C interrupts an examination; `found` has the results up to then."""

    def __init__(self, found: Diagnoses, total: int) -> None:
        super().__init__()
        self.found = found
        self.total = total
        """Number of (kernel, call) pairs that the whole examination would have covered."""


@overload
def doctor(
    subject: str | os.PathLike[str] | Dataset | Sequence[AttentionCall],
    kernels: str | Sequence[str] | None = None,
    **options: Any,
) -> Diagnoses: ...
@overload
def doctor(
    subject: torch.nn.Module | dict[str, Any] | Pipeline,
    kernels: str | Callable[..., Tensor] | Sequence[str | Callable[..., Tensor]] | None = None,
    **options: Any,
) -> AbstractContextManager[Diagnoses]: ...
def doctor(subject: Any, kernels: Any = None, **options: Any) -> Any:
    """Find out why kernels are wrong: the layer, step and head, and the cause.

    With a recording, kernels are examined on its calls. With a model, use the function in a `with`
    statement: the calls of the block are recorded, and kernels are examined on these calls when the
    block ends.

    Args:
        subject: a directory that `capture` wrote, an archive of one, an address, a dataset or
            calls; or a model: a `torch.nn.Module`, a diffusers pipeline, or a dict of modules.
        kernels: names and globs, as a list or comma-separated; `captured` for the recorded outputs.
            By default the kernels of a plain replay, or the kernels that the model itself called.
            With a model, functions with SDPA's arguments are also accepted.
        **options: `timeout`, seconds after which a kernel's process without a sign of life is
            killed; and `inside`, modes to examine besides eager mode: `graph` (a CUDA graph that is
            captured once and replayed) and `compile` (`torch.compile`). For a recording also
            `calls`, names and globs of the calls to examine; `device`; `workers`, False to run
            kernels in this process; `tolerances`, constants to judge accuracy by, or a TOML file of
            constants; and `progress`, False to hide progress on stderr. For a model also `max`, the
            number of calls to record; `sample`, the choice of calls as for `record`; and `out`, a
            directory to keep the recording in.

    Returns:
        For a recording, `Diagnoses`: print it, or read `found`. For a model, a context manager that
        yields `Diagnoses`, which are empty until the block ends.

    Raises:
        Error: an argument cannot be used, no kernel can run, or nothing was recorded.

    Example:
        >>> print(doctor("captured_inputs", "sage2"))
        >>> with doctor(pipe.transformer, "sage2") as diagnoses:
        ...     pipe("a panda playing guitar")
        >>> print(diagnoses)
    """
    from capture.storage.dataset import Dataset

    if isinstance(subject, str | os.PathLike | Dataset | list | tuple):
        return examine_recording(subject, kernels, **options)
    from replay.diagnosis.around_run import examine_run

    return examine_run(subject, kernels, **options)


def examine_recording(
    dataset: str | os.PathLike[str] | Iterable[AttentionCall],
    kernels: str | Sequence[str] | None = None,
    *,
    calls: str | Sequence[str] | None = None,
    device: str | torch.device | None = None,
    workers: bool = True,
    timeout: float = 300.0,
    inside: str | Sequence[str] | None = None,
    tolerances: str | os.PathLike[str] | Thresholds | None = None,
    progress: bool | None = None,
) -> Diagnoses:
    """Examine kernels on recorded calls; see `doctor`.

    Raises:
        ChoiceError: a named kernel cannot run here, or no kernel can.
        DatasetError: the recording cannot be read.
        ExaminationInterrupted: Ctrl-C was pressed.
        ModeError: a mode is unknown or cannot be used here.
    """
    from capture.storage.capture_record import first_nonfinite
    from replay.bench.settings import Settings
    from replay.diagnosis.examinations import Diagnoses, diagnose
    from replay.diagnosis.modes import chosen_modes
    from replay.distribution.pace import Pace
    from replay.report.progress import shown_progress

    quiet = progress is False
    place = device_of(None if device is None else str(device))
    modes = chosen_modes(inside, has_gpu=place.type == "cuda", in_process=not workers)
    settings = Settings(place, "warm", tolerances=thresholds(tolerances))
    found, tasks = Diagnoses(), []
    try:
        with call_choice(dataset, joined_names(calls)) as choice:
            recording = choice.opened(quiet=quiet)
            chosen = choice.found(recording, quiet=quiet)
            found.note = chosen.note
            found.first_nonfinite = first_nonfinite(recording.captures if recording else [])
            if not quiet:
                found.tell = _first_of_each_kind()
            able = able_kernels(joined_names(kernels), place, timeout, workers=workers)
            tasks = [f"{call.name}, {kernel.name}" for call in chosen.workloads for kernel in able]
            pace = Pace(dict.fromkeys([*tasks, REPLACEMENTS], 1.0))
            with shown_progress(pace, quiet=quiet) as report:
                return diagnose(
                    chosen.workloads,
                    able,
                    settings,
                    timeout,
                    one_by_one(report, tasks),
                    in_process=not workers,
                    inside=modes,
                    found=found,
                )
    except KeyboardInterrupt:
        raise ExaminationInterrupted(found, len(tasks)) from None


def _first_of_each_kind() -> Callable[[Diagnosis], None]:
    """Return a function that prints a diagnosis, if it is the first of its kernel and cause."""
    known = set()

    def tell(diagnosis: Diagnosis) -> None:
        if (kind := (diagnosis.kernel, diagnosis.cause)) not in known:
            known.add(kind)
            kernel, cause = kind
            say(f"{kernel}: {cause}: {diagnosis.call}: {diagnosis.place}: {diagnosis.sentence}")

    return tell


def able_kernels(
    names: str | None, device: torch.device, timeout: float, *, workers: bool
) -> list[Kernel]:
    """Return the kernels of these names and globs that can run here.

    Raises:
        ChoiceError: a named kernel cannot run, or no kernel can.
        KernelNameError: a name or glob matches no kernel.
    """
    from replay.diagnosis import captured
    from replay.kernels.registry import find, select

    parts = [] if names is None else [part.strip() for part in names.split(",")]
    own = [captured.CAPTURED] if captured.NAME in parts else []
    if own and set(parts) == {captured.NAME}:
        return own
    if own:
        names = ",".join(part for part in parts if part != captured.NAME)
    kernels, named = select(names)
    if workers:
        check_importable(kernels)
    # Do not probe a user's kernel, because its failure would be a finding.
    ours = [kernel for kernel in map(find, [each.name for each in kernels]) if not kernel.source]
    probed = _probed(ours, device, timeout, workers=workers) if ours else {}
    absent = {name: found.reason for name, found in probed.items() if found.reason is not None}
    for name in named:
        if name in absent:
            raise ChoiceError(f"{name} cannot run on {device}: {absent[name]}")
    able = [kernel for kernel in kernels if kernel.name not in absent]
    if not able:
        raise ChoiceError(f"no kernel of --kernels {names} can run on {device}")
    return own + able


def _probed(
    kernels: list[Kernel], device: torch.device, timeout: float, *, workers: bool
) -> dict[str, ProbeResult]:
    """Return the probe result of each kernel in this environment, by name."""
    from replay.rows.row import HERE
    from replay.workers.environments import Environment
    from replay.workers.execution import InProcess

    if not workers:
        return InProcess().probe(kernels, device)[HERE]
    environment = Environment(HERE, sys.executable, timeout)
    try:
        return environment.probe(kernels, str(device))
    finally:
        environment.close()


def one_by_one(report: Progress, tasks: Sequence[str]) -> Callable[[Workload, str], None]:
    """Return a progress function for tasks (a kernel on a call), which run one at a time.

    All other work is reported as the task `REPLACEMENTS`.
    """
    from replay.bench.reported_stages import DONE

    at_work: list[Workload] = []

    def reached(workload: Workload, kernel: str) -> None:
        for task in at_work:
            report(task, DONE)
        task = replace(workload, name=f"{workload.name}, {kernel}")
        at_work[:] = [task] if task.name in tasks else []
        if at_work:
            report(task, "examining")
        else:
            report(replace(workload, name=REPLACEMENTS, on=""), workload.name)

    return reached
