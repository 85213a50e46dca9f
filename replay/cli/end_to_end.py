"""`replay --e2e`: which models, with which kernels, and what is done with the results."""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from typing import Any, TextIO

from attention_replay import Error
from capture.dataset import CaptureRecord, Dataset
from replay.bench.settings import Settings
from replay.end_to_end.check import Checked, check
from replay.end_to_end.model_process import OWN, ModelProcess, ModelRefused, Variant, import_path
from replay.end_to_end.rebuild import load_arguments
from replay.kernels.registry import Kernel
from replay.plan.plan import Budget, Plan, parse_budget
from replay.rows.row import HERE, KernelId, Row
from replay.workers.execution import Assignment


class CheckError(Error):
    """What was asked of whole models cannot be done: one sentence that names the remedy."""


@dataclass(frozen=True)
class Wanted:
    """What `--e2e` and `--plan` need, read before anything is measured."""

    captures: list[CaptureRecord]
    builds: list[dict[str, Any]]
    """Of each capture, the arguments that build its model; with `--e2e`."""
    text: str | None
    budget: Budget | None
    plan: Plan | None
    """The plan to use."""


def understand(arguments: argparse.Namespace, device: str) -> Wanted:
    """Read what the arguments name; models will be built on a device.

    Raises:
        CheckError: the text or the recording is not fit for it.
        PlanError: the budget or the plan is not.
        DatasetError: there is no recording.
        NotRebuildable: the recording does not say how to build its model.
    """
    budget = None if arguments.budget is None else parse_budget(arguments.budget)
    plan = None if arguments.use_plan is None else Plan.load(arguments.use_plan)
    captures = Dataset.open(arguments.dir).captures
    models = ", ".join(capture.model for capture in captures)
    if not captures or not all(capture.census.get("rows") for capture in captures):
        raise CheckError(
            f"{arguments.dir} has no manifest that says which model was recorded and counts its "
            "calls: capture again"
        )
    if arguments.plan is not None and len(captures) > 1:
        raise CheckError(
            f"a plan is for one model and {arguments.dir} holds {models}: record each into a "
            "directory of its own (capture --out DIR)"
        )
    if arguments.plan is not None and not Path(arguments.plan).absolute().parent.is_dir():
        raise CheckError(f"cannot write {arguments.plan}: there is no such directory")
    if plan is not None and plan.model not in [capture.model for capture in captures]:
        raise CheckError(
            f"{arguments.use_plan} is a plan for {plan.model} and {arguments.dir} holds {models}: "
            "use the plan of this model"
        )
    builds = [load_arguments(capture, device) for capture in captures] if arguments.e2e else []
    return Wanted(captures, builds, _text(arguments.text, captures), budget, plan)


def _text(path: str | None, captures: Sequence[CaptureRecord]) -> str | None:
    if path is None:
        return None
    language = [
        capture
        for capture in captures
        if any(row["phase"] == "prefill" for row in capture.census["rows"])
    ]
    if not language:
        raise CheckError("--text is for language models, and none is recorded here: leave it out")
    if all(".py:" in capture.settings["model"] for capture in language):
        raise CheckError(
            "--text needs a model whose tokenizer is known, and a function does not say which it "
            "has: leave it out, or capture the model's directory or name"
        )
    try:
        text = Path(path).read_text("utf-8")
    except OSError as error:
        raise CheckError(f"cannot read --text {path}: {error.strerror}") from error
    except ValueError as error:
        raise CheckError(f"--text {path} is not a text in UTF-8") from error
    if not text.strip():
        raise CheckError(f"--text {path} is empty: give some hundred words")
    return text


def check_models(
    wanted: Wanted,
    arguments: argparse.Namespace,
    rows: Sequence[Row],
    assigned: Assignment,
    pythons: Mapping[str, str],
    settings: Settings,
    report: Callable[[str], None],
) -> Iterator[list[Checked]]:
    """The checks of every recorded model, one after another; the first of each is the model's own.

    Raises:
        ModelRefused: a model cannot be built.
        RunFailed: a model does not run with its own attention either.
    """
    for capture, build in zip(wanted.captures, wanted.builds, strict=True):
        of_model = [row for row in rows if row.call.model == capture.model]
        groups, failed = _variants(of_model, assigned, pythons, capture)
        kernel_at = {}
        if wanted.plan is not None and wanted.plan.model == capture.model:
            path = Path(arguments.use_plan)
            groups[0].append(Variant(path.name, plan=path))
            kernel_at[path.name] = partial(_planned, wanted.plan)
        found: list[Checked] = []
        for variants in groups:
            process = ModelProcess(
                sys.executable,
                build,
                arguments.timeout,
                partial(_report, report, capture.model),
            )
            checks = check(
                capture,
                of_model,
                variants,
                process,
                rounds=arguments.model_rounds,
                seed=settings.seed,
                text=wanted.text,
                kernel_at=kernel_at,
                save_output=settings.save_output,
            )
            # Each was held against the model's own attention in its process; one is shown.
            found += checks[1:] if found else checks
        yield [*found, *failed]


def _planned(plan: Plan, module: str, phase: str) -> KernelId:
    return KernelId(plan.kernel_at(module, phase))


def _report(report: Callable[[str], None], model: str, stage: str) -> None:
    report(f"{model}: {stage}")


def _variants(
    rows: Sequence[Row],
    assigned: Assignment,
    pythons: Mapping[str, str],
    capture: CaptureRecord,
) -> tuple[list[list[Variant]], list[Checked]]:
    """The kernels to put into a model, by the process they share, and those that need no trying.

    Libraries of different environments share no process, nor do kernels that want their own. What
    could run no call of the model at all is left out, as the replay says why.
    """
    groups: dict[tuple[str, str], list[Variant]] = {(HERE, ""): []}
    failed = []
    for environment, kernels in assigned.items():
        path: tuple[str, ...] = ()
        refused = ""
        if environment != HERE and kernels:
            try:
                path = import_path(pythons[environment])
            except ModelRefused as error:
                refused = str(error)
        for kernel in kernels:
            own_rows = _tried(rows, environment, kernel)
            if not own_rows or kernel.name == OWN:
                continue
            name = str(own_rows[0].id)
            if all(row.status in ("crash", "timeout", "error") for row in own_rows):
                status, reason = own_rows[0].status, own_rows[0].reason
                reason = f"not tried in the model, since it failed in the replay: {reason}"
                failed.append(Checked(name, capture.model, capture.weights, status, reason))
                continue
            process = (environment, kernel.name if kernel.own_process else "")
            variant = Variant(
                name, kernel.name, environment=environment, path=path, refused=refused
            )
            groups.setdefault(process, []).append(variant)
    return list(groups.values()), failed


def _tried(rows: Sequence[Row], environment: str, kernel: Kernel) -> list[Row]:
    return [
        row
        for row in rows
        if (row.environment, row.kernel) == (environment, kernel.name)
        and row.status not in ("unavailable", "unsupported")
    ]


def write_json(checks: Sequence[Checked], file: TextIO) -> None:
    """A line for each kernel in each model; NaN and infinities do not occur."""
    for checked in checks:
        data = asdict(checked)
        data["prediction_error"] = {
            span: checked.prediction_error(span) for span in checked.measured
        }
        file.write(json.dumps(data) + "\n")
