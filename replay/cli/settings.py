"""The settings of a replay, from its arguments. Imports torch late."""

from __future__ import annotations

import argparse
import difflib
from pathlib import Path
from typing import TYPE_CHECKING

from replay.cli.files import UsageError
from replay.rows.fields import METRICS
from replay.timing.defaults import CALLS_BEFORE_IN_MODELS, CPU_SECONDS, SECONDS

if TYPE_CHECKING:
    import torch

    from replay.accuracy.thresholds import Thresholds
    from replay.bench.settings import Settings
    from replay.timing.timer import Cache


def settings_of(arguments: argparse.Namespace, device: torch.device) -> Settings:
    """Settings of a replay.

    Raises:
        UsageError: an option cannot be used on this device, or a directory cannot be made.
    """
    from replay.bench.settings import Settings
    from replay.end_to_end.model_process import OWN

    of_models = bool(arguments.e2e or arguments.plan)
    cache: Cache = arguments.cache or ("cold" if device.type == "cuda" else "warm")
    if cache == "cold" and device.type == "cpu":
        raise UsageError("--cache cold requires a GPU: leave it out, CPU caches are always warm")
    calls_before = arguments.calls_before
    if calls_before is None:
        calls_before = CALLS_BEFORE_IN_MODELS if of_models and device.type == "cuda" else 0
    return Settings(
        device=device,
        cache=cache,
        rounds=arguments.rounds,
        calls_before=calls_before,
        max_seconds=arguments.max_seconds or (CPU_SECONDS if device.type == "cpu" else SECONDS),
        max_noise=arguments.max_noise,
        seed=arguments.seed,
        baseline=arguments.baseline_kernel or (OWN if of_models else None),
        errors_against=arguments.errors_against,
        compare_stats=arguments.compare_stats,
        for_model=of_models,
        energy=device.type == "cuda" and wants(arguments, "energy"),
        roofline=bool(arguments.report) or wants(arguments, "roofline"),
        resources=arguments.resources,
        save_output=_output_directory(arguments.save_output),
        tolerances=thresholds(arguments.tolerances),
    )


def thresholds(path: str | None) -> Thresholds:
    """The constants of `--tolerances`, or the project's own.

    Raises:
        Error: the file cannot be read.
    """
    from replay.accuracy.thresholds import Thresholds

    return Thresholds.read(Path(path)) if path else Thresholds()


def metrics_of(text: str) -> list[str]:
    """The names in `--metric`.

    Raises:
        UsageError: there is none, or one that does not exist.
    """
    metrics = [*dict.fromkeys(part.strip() for part in text.split(",") if part.strip())]
    for metric in metrics:
        if metric not in METRICS:
            near = difflib.get_close_matches(metric, METRICS, n=1, cutoff=0.4)
            hint = f"did you mean {near[0]}?" if near else f"choose from {', '.join(METRICS)}"
            raise UsageError(f"unknown metric {metric!r}: {hint}")
    if not metrics:
        raise UsageError(f"--metric is empty: choose from {', '.join(METRICS)}")
    return metrics


def wants(arguments: argparse.Namespace, metric: str) -> bool:
    """Whether `--metric` names this one, or all."""
    return not {metric, "all"}.isdisjoint(metrics_of(arguments.metric))


def _output_directory(given: str | None) -> Path | None:
    """Make the directory of `--save-output`; kernels may change the current one.

    Raises:
        UsageError: it cannot be made.
    """
    if given is None:
        return None
    directory = Path(given).absolute()
    try:
        directory.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise UsageError(
            f"cannot write --save-output {given} ({error.strerror}): name another directory"
        ) from error
    return directory
