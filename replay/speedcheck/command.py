"""`replay --e2e`: which models, with which kernels, and what is done with the results."""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict
from functools import partial
from pathlib import Path
from typing import Any

from capture.dataset import Dataset
from replay.environments import THIS
from replay.execution import Allotted
from replay.plan import Plan
from replay.results import Row
from replay.settings import Settings
from replay.speedcheck.arguments import MODEL_ROUNDS
from replay.speedcheck.check import OWN, Checked, check
from replay.speedcheck.process import ModelProcess, Variant, import_path
from replay.speedcheck.rebuild import NotRebuildable, load_arguments


def check_models(
    arguments: argparse.Namespace,
    rows: Sequence[Row],
    allotted: Allotted,
    pythons: Mapping[str, str],
    settings: Settings,
    report: Callable[[str], None],
) -> Iterator[list[Checked]]:
    """The checks of every model that a directory holds a recording of, one after another.

    Raises:
        NotRebuildable: a recording does not say how to build its model.
        ModelRefused: a model cannot be built.
        RunFailed: a model does not run with its own attention either.
    """
    text = None if arguments.text is None else Path(arguments.text).read_text("utf-8")
    plan = None if arguments.use_plan is None else Plan.load(arguments.use_plan)
    captures = Dataset.open(arguments.dir).captures
    if not captures:
        raise NotRebuildable(
            f"{arguments.dir} has no manifest to say which model was recorded: capture again"
        )
    for capture in captures:
        build = load_arguments(capture)
        of_model = [row for row in rows if row.call.model == capture.model]
        for environment, variants in _variants(of_model, allotted, pythons).items():
            kernel_at = {}
            if plan is not None and environment == THIS and plan.model == capture.model:
                name = Path(arguments.use_plan).name
                variants.append(Variant(name, plan=Path(arguments.use_plan)))
                kernel_at[name] = plan.kernel_at
            if not variants:
                continue
            process = ModelProcess(
                sys.executable,
                build,
                str(settings.device),
                arguments.timeout,
                partial(_report, report, capture.model),
            )
            yield check(
                capture,
                of_model,
                variants,
                process,
                rounds=arguments.model_rounds or MODEL_ROUNDS,
                seed=settings.seed,
                text=text,
                kernel_at=kernel_at,
                save_output=settings.save_output,
            )


def _report(report: Callable[[str], None], model: str, stage: str) -> None:
    report(f"{model}: {stage}")


def _variants(
    rows: Sequence[Row], allotted: Allotted, pythons: Mapping[str, str]
) -> dict[str, list[Variant]]:
    """By environment, the kernels that could run one of the model's calls at least."""
    ran = {
        (row.environment, row.kernel)
        for row in rows
        if row.status not in ("unavailable", "unsupported") and row.kernel
    }
    found: dict[str, list[Variant]] = {}
    for environment, kernels in allotted.items():
        path = () if environment == THIS else import_path(pythons[environment])
        at = "" if environment == THIS else f"@{environment}"
        found[environment] = [
            Variant(f"{kernel.name}{at}", kernel.name, path=path)
            for kernel in kernels
            if (environment, kernel.name) in ran and kernel.name != OWN
        ]
    return found


def write_json(checks: Sequence[Checked], file: Any) -> None:
    """A line for each kernel in each model; NaN and infinities do not occur."""
    for checked in checks:
        data = asdict(checked)
        data["prediction_error"] = {
            span: checked.prediction_error(span) for span in checked.measured
        }
        file.write(json.dumps(data) + "\n")
