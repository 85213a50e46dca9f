"""`replay --e2e`: choose models and kernels, run the check and write the results."""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch

from attention_replay.errors import Error
from capture.storage.capture_record import CaptureRecord
from capture.storage.dataset import Dataset
from capture.storage.joined_calls import is_part, model_of
from capture.storage.plain_files import given_text
from capture.text.printable import printable
from replay.bench.settings import Settings
from replay.end_to_end.model_check import ModelResult, check
from replay.end_to_end.model_process import OWN, ModelProcess, ModelRefused, Variant, import_path
from replay.end_to_end.rebuild import load_arguments
from replay.kernels.registry import Kernel
from replay.plan.plan import Budget, Plan, parse_budget
from replay.plan.plan_device import mismatch, type_of
from replay.rows.row import HERE, KernelId, Row
from replay.rows.row_files import Writable, plain
from replay.workers.execution import Assignment


class CheckError(Error):
    """The arguments do not fit the recording; the message names the remedy."""


@dataclass(frozen=True)
class ModelOptions:
    """The options of `--e2e` and `--plan`, read before anything is measured."""

    captures: list[CaptureRecord]
    builds: list[dict[str, Any]]
    """The arguments that build the model of each capture; empty without `--e2e`."""
    text: str | None
    budget: Budget | None
    plan: Plan | None
    """The plan to use."""


def read_options(
    arguments: argparse.Namespace, dataset: Dataset | None, device: str
) -> ModelOptions:
    """Read the files that the arguments name, for models that will be built on `device`.

    Args:
        dataset: what is replayed; None if an older version recorded it.

    Raises:
        CheckError: the text or the recording cannot be used.
        PlanError: the budget or the plan cannot be used.
        NotRebuildable: the recording does not say how to build its model.
        NotTrusted: the recording names code to run.
    """
    budget = None if arguments.budget is None else parse_budget(arguments.budget)
    plan = None if arguments.use_plan is None else Plan.load(arguments.use_plan)
    captures = [] if dataset is None else dataset.captures
    entries = [] if dataset is None else dataset.entries
    models = ", ".join(capture.model for capture in captures)
    if not captures or not all(capture.census.get("rows") for capture in captures):
        raise CheckError(
            f"{arguments.dir} has no manifest with the recorded model and its number of calls: "
            "capture it again"
        )
    if partial := [capture for capture in captures if capture.heads]:
        raise CheckError(
            f"{arguments.dir} contains only heads {partial[0].heads} of each call of "
            f"{partial[0].model}, which do not tell what whole calls cost: capture it again "
            "without --heads"
        )
    if parts := [entry.origin for entry in entries if is_part(entry.origin)]:
        raise CheckError(
            f"{arguments.dir} contains the {parts[0].split} that each rank of "
            f"{model_of(parts[0])} has, and no single process runs such a model: leave out "
            "--e2e and --plan, or capture it in one process"
        )
    if arguments.plan is not None and len(captures) > 1:
        raise CheckError(
            f"a plan is for one model, but {arguments.dir} contains {models}: capture each into "
            "its own directory (capture --out DIR)"
        )
    if plan is not None and plan.model not in [capture.model for capture in captures]:
        raise CheckError(
            f"{arguments.use_plan} is a plan for {plan.model}, but {arguments.dir} contains "
            f"{models}: use a plan for this model"
        )
    for file in [] if plan is None else [code.rpartition(":")[0] for code in plan.code]:
        if not Path(file).is_file():
            raise CheckError(
                f"{arguments.use_plan} names a kernel in {file}, which does not exist: put it "
                "there, or make the plan again with --plan FILE"
            )
    if plan is not None and plan.code and not arguments.trust_code:
        raise CheckError(
            f"{arguments.use_plan} names kernels whose code would run, {', '.join(plan.code)}: "
            "read it, and allow it to run with --trust-code"
        )
    if plan is not None and not arguments.any_device:
        misfit = mismatch(plan.device, [type_of(torch.device(device))])
        if misfit:
            raise CheckError(
                f"{arguments.use_plan} {misfit}: make one here with --plan FILE, or use it all the "
                "same with --any-device"
            )
    if plan is not None and not plan.device:
        print(
            f"replay: {printable(arguments.use_plan)} does not say which type of GPU it was made "
            "on: make it again to be sure that its kernels are the fastest here",
            file=sys.stderr,
        )
    builds = []
    if arguments.e2e:
        trusted = arguments.trust_code
        builds = [load_arguments(each, device, trust_code=trusted) for each in captures]
    return ModelOptions(captures, builds, _text(arguments.text, captures), budget, plan)


def _text(path: str | None, captures: Sequence[CaptureRecord]) -> str | None:
    if path is None:
        return None
    language = [
        capture
        for capture in captures
        if any(row["phase"] == "prefill" for row in capture.census["rows"])
    ]
    if not language:
        raise CheckError("--text requires a language model, but none was recorded: leave it out")
    if all(".py:" in str(capture.settings.get("model")) for capture in language):
        raise CheckError(
            "--text requires a known tokenizer, which a model built by a function does not have: "
            "leave it out, or capture the model by directory or name"
        )
    try:
        text = given_text(path)
    except OSError as error:
        raise CheckError(f"cannot read --text {path}: {error.strerror}") from error
    except ValueError as error:
        raise CheckError(f"--text {path} is not UTF-8: convert it first") from error
    if not text.strip():
        raise CheckError(f"--text {path} is empty: give a text of a few hundred words")
    return text


def check_model(
    capture: CaptureRecord,
    build: dict[str, Any],
    options: ModelOptions,
    arguments: argparse.Namespace,
    rows: Sequence[Row],
    assigned: Assignment,
    pythons: Mapping[str, str],
    settings: Settings,
    report: Callable[[str], None],
) -> list[ModelResult]:
    """Check a recorded model; the first result is its own attention.

    Args:
        build: the arguments that build it.

    Raises:
        ModelRefused: it cannot be built.
        RunFailed: it fails even with its own attention.
    """
    model_rows = [row for row in rows if row.call.model == capture.model]
    groups, failed = _variants(model_rows, assigned, pythons, capture)
    kernel_at = {}
    if options.plan is not None and options.plan.model == capture.model:
        path = Path(arguments.use_plan)
        groups[0].append(Variant(path.name, plan=path, trust_code=arguments.trust_code))
        kernel_at[path.name] = partial(_planned, options.plan)
    found: list[ModelResult] = []
    for variants in groups:
        process = ModelProcess(
            sys.executable,
            build,
            arguments.timeout,
            partial(_report, report, capture.model),
        )
        checks = check(
            capture,
            model_rows,
            variants,
            process,
            rounds=arguments.model_rounds,
            seed=settings.seed,
            text=options.text,
            kernel_at=kernel_at,
            save_output=settings.save_output,
        )
        # Each process has its own baseline run; only the first is shown.
        found += checks[1:] if found else checks
    return [*found, *failed]


def _planned(plan: Plan, module: str, phase: str) -> KernelId:
    return KernelId(plan.kernel_at(module, phase))


def _report(report: Callable[[str], None], model: str, stage: str) -> None:
    report(f"{model}: {stage}")


def _variants(
    rows: Sequence[Row],
    assigned: Assignment,
    pythons: Mapping[str, str],
    capture: CaptureRecord,
) -> tuple[list[list[Variant]], list[ModelResult]]:
    """Group the kernels to run in a model by process, and list those that already failed.

    Different environments never share a process, nor do kernels that require their own. A kernel
    that supports no call of the model is left out: the replay reports why.
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
                reason = f"not run in the model because it failed in the replay: {reason}"
                failed.append(ModelResult(name, capture.model, capture.weights, status, reason))
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


def write_json(checks: Sequence[ModelResult], file: Writable) -> None:
    """Write one JSON line per kernel and model."""
    for checked in checks:
        file.write(json.dumps(as_json(checked)) + "\n")


def as_json(checked: ModelResult) -> dict[str, Any]:
    """A result as plain JSON, with null for what is no finite number."""
    errors = {span: checked.prediction_error(span) for span in checked.measured}
    tree: dict[str, Any] = plain(asdict(checked) | {"prediction_error": errors})
    return tree
