"""Function `verify`, which runs the recorded model with each kernel and checks the prediction."""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from attention_replay.errors import Error
from replay.api.choices import joined_names
from replay.api.messages import say
from replay.api.recorded_models import ModelRequest, RecordedModels, recorded_models
from replay.api.replay_calls import call_choice, environments, replay
from replay.workers.environment_options import interpreters

if TYPE_CHECKING:
    from capture.storage.capture_record import CaptureRecord
    from capture.storage.dataset import Dataset
    from replay.end_to_end.model_check import ModelResult
    from replay.end_to_end.model_process import Variant
    from replay.end_to_end.prediction import KernelAt
    from replay.end_to_end.run_pace import RunPace
    from replay.kernels.registry import Kernel
    from replay.plan.plan import Plan
    from replay.rows.row import Row
    from replay.sketches.sketch import ErrorSketch
    from replay.workers.execution import Assignment


class ModelChecks(NamedTuple):
    """Checks of one model; the first one checks the model's own attention."""

    model: str
    checks: list[ModelResult]
    trouble: str = ""
    """Reason why there are no checks; empty if there are any."""


def verify(
    dataset: str | os.PathLike[str] | Dataset,
    rows: Sequence[Row] | None = None,
    *,
    kernels: str | Sequence[str | Kernel] | None = None,
    plan: str | os.PathLike[str] | None = None,
    text: str | os.PathLike[str] | None = None,
    model_rounds: int | None = None,
    trust_code: bool = False,
    any_device: bool = False,
    device: str | None = None,
    env: Mapping[str, str] | Sequence[str] | None = None,
    timeout: float = 300.0,
    save_output: str | os.PathLike[str] | None = None,
    sketch: str | os.PathLike[str] | None = None,
    progress: bool | None = None,
    **options: Any,
) -> list[ModelResult]:
    """Run the recorded model with each kernel, and return its speed-ups and output drift.

    Args:
        dataset: the recording: a directory, an archive, an address or a dataset.
        rows: rows of the recorded calls, used for predictions; None to measure the calls.
        kernels: names and globs of kernels to run; None for the kernels of the rows or the plan, or
            the default kernels.
        plan: path of a plan, which is run in addition to the kernels.
        text: path of a text file on which a language model's perplexity is measured.
        model_rounds: timed runs of the model per kernel; None for as many runs as fit into 6 s.
        trust_code: run code files named by the recording or the plan.
        any_device: use a plan that was made on another type of GPU.
        device: device to build the model on; None for a GPU if present.
        env: interpreters of other Python environments, by name.
        timeout: seconds after which a process that gives no sign of life is killed.
        save_output: directory for the outputs of the kernels and the model.
        sketch: path of a sketch that `foretell` made of this model, from which the drift of the
            kernels and the plan is foretold beside the measured one.
        progress: False to hide progress and hints on stderr.
        **options: options of `replay`, for measuring.

    Returns:
        A check per kernel and model; the first check of a model is of the model's own attention. If
        the recorded function trains, `curves` has the loss and gradient norm of each step.

    Raises:
        Error: an argument cannot be used, or no model can run.

    Example:
        >>> checks = verify("captured_inputs", kernels="torch-flash")
        >>> checks[1].measured["run"].speedup
    """
    from replay.api.chosen_device import device_of
    from replay.end_to_end.run_pace import RunPace
    from replay.report.progress import shown_runs

    request = ModelRequest(
        None if plan is None else os.fspath(plan),
        None if text is None else os.fspath(text),
        model_rounds,
        trust_code,
        any_device,
        timeout,
        None if sketch is None else os.fspath(sketch),
    )
    request.check()
    where = device_of(device)
    with call_choice(dataset) as choice:
        opened = choice.opened(quiet=progress is False)
    models = recorded_models(request, opened, str(dataset), where)
    outputs = None if save_output is None else Path(save_output).absolute()
    names = joined_names(kernels)
    if rows is None:
        rows = replay(
            opened or dataset,
            kernels=request.plan_kernels if names is None else names,
            device=str(where),
            env=env,
            timeout=timeout,
            save_output=save_output,
            progress=progress,
            for_model=True,
            **options,
        )
    found: list[ModelResult] = []
    troubles = []
    assigned = assignment_of(rows, names)
    pythons = interpreters(environments(env))
    pace = RunPace()
    with shown_runs(pace, "starting the model", quiet=progress is False):
        for result in check_models(models, rows, assigned, pythons, save_output=outputs, pace=pace):
            found += result.checks
            if result.trouble:
                troubles.append(f"{result.model}: {result.trouble}")
    if troubles and not found:
        raise Error("; ".join(troubles))
    for trouble in troubles:
        say(trouble)
    return found


def check_models(
    models: RecordedModels,
    rows: Sequence[Row],
    assigned: Assignment,
    pythons: Mapping[str, str],
    *,
    pace: RunPace,
    save_output: Path | None = None,
) -> Iterator[ModelChecks]:
    """Yield the checks of each model.

    Args:
        assigned: the kernels to run, by environment.
        pythons: the interpreters of the other environments.
        pace: receives each stage, and the time of each run.
    """
    from replay.end_to_end.model_check import MOST_ROUNDS
    from replay.end_to_end.model_process import BASELINE
    from replay.end_to_end.run_pace import expected_runs

    works = [_work(models, capture, rows, assigned, pythons) for capture in models.captures]
    expected = [
        [
            expected_runs(
                [BASELINE.name, *(each.name for each in variants)],
                models.request.model_rounds or MOST_ROUNDS,
                is_new=True,
            )
            for variants in work.groups
        ]
        for work in works
    ]
    for number, (work, build) in enumerate(zip(works, models.builds, strict=True)):
        pace.left_by_process = [runs for later in expected[number:] for runs in later]
        pace.model = model = work.capture.model
        try:
            checks = _checks(models, work, build, save_output, pace)
        except Error as error:
            yield ModelChecks(model, [], str(error))
            continue
        yield ModelChecks(model, checks)


def assignment_of(rows: Sequence[Row], names: str | None = None) -> Assignment:
    """Return the kernels that ran the rows, by environment.

    Args:
        names: names and globs of the kernels to keep; None for all.

    Raises:
        KernelNameError: a name matches no kernel that exists here.
    """
    from replay.kernels.registry import find, select
    from replay.rows.row import HERE

    chosen = None if names is None else {kernel.name for kernel in select(names)[0]}
    found: dict[str, dict[str, None]] = {HERE: {}}
    for row in rows:
        if row.kernel and (chosen is None or row.kernel in chosen):
            found.setdefault(row.environment, {})[row.kernel] = None
    return {environment: [find(name) for name in names] for environment, names in found.items()}


def as_json(checked: ModelResult) -> dict[str, Any]:
    """Return a check as plain JSON, in which non-finite figures are null."""
    from replay.rows.row_files import plain

    errors = {span: checked.prediction_error(span) for span in checked.measured}
    tree: dict[str, Any] = plain(asdict(checked) | {"prediction_error": errors})
    return tree


class _Work(NamedTuple):
    """Kernels and plan to run in a model."""

    capture: CaptureRecord
    rows: list[Row]
    groups: list[list[Variant]]
    """Variants of each process."""
    failed: list[ModelResult]
    """Results of the kernels that failed in the replay."""
    kernel_at: dict[str, KernelAt]
    plans: dict[str, Plan]
    """The plan by the name of its variant, if there is one."""


def _work(
    models: RecordedModels,
    capture: CaptureRecord,
    rows: Sequence[Row],
    assigned: Assignment,
    pythons: Mapping[str, str],
) -> _Work:
    from replay.end_to_end.model_process import Variant
    from replay.rows.row import KernelId

    rows = [row for row in rows if row.call.model == capture.model]
    groups, failed = _variants(rows, assigned, pythons, capture)
    request = models.request
    kernel_at: dict[str, KernelAt] = {}
    plans: dict[str, Plan] = {}
    if request.plan is not None and models.plan and models.plan.model == capture.model:
        path = Path(request.plan)
        groups[0].append(Variant(path.name, plan=path, trust_code=request.trust_code))
        planned = models.plan.kernel_at
        kernel_at[path.name] = lambda *place: KernelId(planned(*place))
        plans[path.name] = models.plan
    return _Work(capture, rows, groups, failed, kernel_at, plans)


def _checks(
    models: RecordedModels,
    work: _Work,
    build: dict[str, Any],
    save_output: Path | None,
    pace: RunPace,
) -> list[ModelResult]:
    """Check a recorded model; the first result is for the model's own attention.

    Raises:
        ModelRefused: the model cannot be built.
        RunFailed: the model fails even with its own attention.
    """
    from replay.end_to_end.model_check import check, own_kernel_of
    from replay.end_to_end.model_process import ModelProcess

    request = models.request
    found: list[ModelResult] = []
    for variants in work.groups:
        checks = check(
            work.capture,
            work.rows,
            variants,
            ModelProcess(sys.executable, build, request.timeout, pace),
            rounds=request.model_rounds,
            text=models.text,
            kernel_at=work.kernel_at,
            own_kernel=own_kernel_of(work.rows),
            save_output=save_output,
        )
        pace.close_process()
        # Each process runs the baseline too; keep only the first baseline's result.
        found += checks[1:] if found else checks
    if request.loaded_sketch is not None:
        _foretell(request.loaded_sketch, found[1:], work)
    return [*found, *work.failed]


def _foretell(sketch: ErrorSketch, checks: Sequence[ModelResult], work: _Work) -> None:
    """Add the foretold drift to the checks of kernels that the sketch has, and of the plan."""
    from replay.sketches.worst_places import foretold_drift

    if sketch.model != work.capture.model:
        say(f"the sketch is of {sketch.model}, so no drift of {work.capture.model} is foretold")
        return
    for checked in checks:
        if checked.kernel in work.plans:
            checked.foretold = foretold_drift(sketch, work.plans[checked.kernel])
        elif checked.kernel in sketch.kernels:
            checked.foretold = foretold_drift(sketch, lambda *place, name=checked.kernel: name)


def _variants(
    rows: Sequence[Row],
    assigned: Assignment,
    pythons: Mapping[str, str],
    capture: CaptureRecord,
) -> tuple[list[list[Variant]], list[ModelResult]]:
    """Group the kernels to run in a model by process; also return results of kernels that failed.

    Different environments never share a process, nor do kernels that require their own. Kernels
    that refused every call of the replay do not run either.
    """
    from replay.end_to_end.model_check import ModelResult
    from replay.end_to_end.model_process import OWN, ModelRefused, Variant, import_path
    from replay.rows.row import HERE

    groups: dict[tuple[str, str], list[Variant]] = {(HERE, ""): []}
    failed = []
    is_sdpa = all(row.call.entry_point == "sdpa" for row in rows)
    for environment, kernels in assigned.items():
        path: tuple[str, ...] = ()
        refused = ""
        if environment != HERE and kernels:
            try:
                path = import_path(pythons[environment])
            except ModelRefused as error:
                refused = str(error)
            except KeyError:
                refused = f"the interpreter of {environment} is not named: give --env"
        for kernel in kernels:
            own_rows = [
                row
                for row in rows
                if (row.environment, row.kernel) == (environment, kernel.name)
                and row.status != "unavailable"
            ]
            if not own_rows or (kernel.name == OWN and is_sdpa):
                continue
            name = str(own_rows[0].id)
            tried = [row for row in own_rows if row.status != "unsupported"]
            if all(row.status in ("crash", "timeout", "error") for row in tried):
                why = "not run in the model because it failed in the replay"
                why = why if tried else "refuses every recorded call"
                first = (tried or own_rows)[0]
                failed.append(
                    ModelResult(
                        *(name, capture.model, capture.weights, first.status),
                        f"{why}: {first.reason}",
                    )
                )
                continue
            process = (environment, kernel.name if kernel.own_process else "")
            variant = Variant(
                name, kernel.name, environment=environment, path=path, refused=refused
            )
            groups.setdefault(process, []).append(variant)
    return list(groups.values()), failed
