"""Conversion of parsed arguments to requests of the library. Imports no torch."""

from __future__ import annotations

import argparse
import difflib
from pathlib import Path
from typing import Any

from replay.api.call_choices import CallChoice, RandomCall, RandomValues, RecordedCalls, SuiteCalls
from replay.api.choices import MeasureChoice, ReplayRequest, RunPlace
from replay.cli.files import UsageError
from replay.cli.shared_options import REQUESTED_METRICS
from replay.rows.fields import METRICS

DEFAULT_METRICS = "time,throughput,accuracy"


def request_of(
    arguments: argparse.Namespace,
    calls: CallChoice,
    *,
    for_model: bool = False,
    kernels: str | None = None,
) -> ReplayRequest:
    """Return the replay requested by the arguments, after cheap checks.

    Args:
        for_model: True if the rows predict a model's gain.
        kernels: kernels to run if the arguments name none.

    Raises:
        Error: an argument cannot be used.
    """
    given = vars(arguments)
    resume = None
    if given.get("resume"):
        if arguments.json in (None, "-"):
            raise UsageError("--resume requires a file to continue: give --json FILE")
        resume = Path(arguments.json).absolute()  # kernels may change the current directory
    names = arguments.kernels if arguments.kernels is not None else kernels
    measure = measure_of(arguments, for_model=for_model)
    place = place_of(arguments)
    request = ReplayRequest(calls, names, measure, place, given.get("max_time"), resume)
    request.check()
    return request


def measure_of(arguments: argparse.Namespace, *, for_model: bool = False) -> MeasureChoice:
    """Return the settings of timing and judging that the arguments request."""
    given = vars(arguments)
    wanted = metrics_of(arguments)
    measured = [name for name in ("energy", "roofline") if {name, "all"} & {*wanted}]
    if given.get("report"):
        measured.append("roofline")
    return MeasureChoice(
        cache=arguments.cache,
        rounds=arguments.rounds,
        calls_before=arguments.calls_before,
        max_seconds=arguments.max_seconds,
        max_noise=given.get("max_noise"),
        baseline=given.get("baseline_kernel"),
        errors_against=given.get("errors_against", "reference"),
        metrics=(*measured, *(name for name in REQUESTED_METRICS if name in wanted)),
        save_output=_path(given.get("save_output")),
        tolerances=_path(given.get("tolerances")),
        for_model=for_model,
        seed=given.get("seed", 0),
    )


def place_of(arguments: argparse.Namespace) -> RunPlace:
    """Return the device, environments and processes that the arguments request."""
    given = vars(arguments)
    return RunPlace(
        device=arguments.device,
        gpus=given.get("gpus"),
        ray=given.get("ray"),
        environments=tuple(arguments.env),
        timeout=arguments.timeout,
        in_process=given.get("in_process", False),
    )


def recorded_calls(arguments: argparse.Namespace) -> RecordedCalls:
    """Return the recorded calls that the arguments choose."""
    given = vars(arguments)
    return RecordedCalls(
        arguments.dir,
        given.get("call"),
        given.get("join_ranks", False),
        given.get("versus_random", False),
    )


def random_call(arguments: argparse.Namespace) -> RandomCall:
    """Return the call of the given shape."""
    return RandomCall(
        batch=arguments.b,
        q_heads=arguments.hq,
        kv_heads=arguments.hk,
        q_len=arguments.sq,
        kv_len=arguments.sk,
        head_dim=arguments.d,
        v_head_dim=arguments.dv,
        values=random_values(arguments),
    )


def suite_calls(arguments: argparse.Namespace) -> SuiteCalls:
    """Return the calls of the named suite."""
    return SuiteCalls(arguments.suite, arguments.max_seq, random_values(arguments))


def random_values(arguments: argparse.Namespace) -> RandomValues:
    """Return the values for random calls."""
    return RandomValues(
        arguments.causal,
        arguments.mask,
        arguments.scale,
        arguments.distribution,
        arguments.dtype,
        arguments.seed,
    )


def metrics_of(arguments: argparse.Namespace) -> list[str]:
    """Return the names in `--metric`.

    Raises:
        UsageError: there is no name, or an unknown name.
    """
    text: Any = vars(arguments).get("metric", DEFAULT_METRICS)
    known = (*METRICS, *REQUESTED_METRICS)
    metrics = [*dict.fromkeys(part.strip() for part in text.split(",") if part.strip())]
    for metric in metrics:
        if metric not in known:
            near = difflib.get_close_matches(metric, known, n=1, cutoff=0.4)
            hint = f"did you mean {near[0]}?" if near else f"choose from {', '.join(known)}"
            raise UsageError(f"unknown metric {metric!r}: {hint}")
    if not metrics:
        raise UsageError(f"--metric is empty: choose from {', '.join(known)}")
    return metrics


def _path(given: str | None) -> Path | None:
    return None if given is None else Path(given)
