"""The calls that the arguments choose: recorded, random, or of a suite. Imports torch late."""

from __future__ import annotations

import argparse
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from replay.cli.kernels import able_kernels

if TYPE_CHECKING:
    import torch

    from capture.storage.dataset import Dataset
    from replay.kernels.registry import Kernel
    from replay.workloads.workload import Workload


def opened_dataset(arguments: argparse.Namespace) -> Dataset | None:
    """Open what `--dir` names; None without it."""
    from capture.cli.arrivals import shown_arrivals
    from capture.storage.dataset import Dataset

    if not arguments.dir:
        return None
    with shown_arrivals(quiet=arguments.quiet) as report:
        return Dataset.open(arguments.dir, report=report)


def workloads_of(
    arguments: argparse.Namespace,
    dataset: Dataset | None,
    device: torch.device,
    kernels: list[Kernel],
) -> tuple[list[Workload], str]:
    """The calls to replay, and a note on those that are not; empty if there is nothing to say.

    Raises:
        Error: there is none, a recording cannot be read, or a random call is too large.
    """
    from capture.cli.arrivals import shown_arrivals
    from replay.bench.feasibility import check_size
    from replay.workloads import random_calls
    from replay.workloads.recorded import from_dataset
    from replay.workloads.workload import random_workloads, with_counterparts

    if dataset is not None:
        with shown_arrivals(quiet=arguments.quiet) as report:
            recorded, note = from_dataset(
                dataset, arguments.call, join_ranks=arguments.join_ranks, report=report
            )
        if arguments.versus_random:
            return with_counterparts(recorded, arguments.seed), note
        return recorded, note
    values: dict[str, Any] = {
        "distribution": arguments.distribution,
        "mask": "none" if arguments.mask == "causal" else arguments.mask,
        "scale": arguments.scale,
    }
    causal = arguments.causal or arguments.mask == "causal"
    if arguments.suite:
        specs = [
            replace(spec, is_causal=spec.is_causal or causal, **values)
            for spec in random_calls.suite(arguments.suite, arguments.dtype, arguments.max_seq)
        ]
        if arguments.ray is None:
            check_size(specs, device, len(able_kernels(kernels, device)))
        return random_workloads(arguments.suite, specs, arguments.seed), ""
    spec = random_calls.Spec(
        batch=arguments.b,
        q_heads=arguments.hq,
        kv_heads=arguments.hq if arguments.hk is None else arguments.hk,
        q_len=arguments.sq,
        kv_len=arguments.sq if arguments.sk is None else arguments.sk,
        head_dim=arguments.d,
        v_head_dim=arguments.d if arguments.dv is None else arguments.dv,
        is_causal=causal,
        dtype=random_calls.dtype(arguments.dtype),
        **values,
    )
    if arguments.ray is None:
        check_size([spec], device, len(able_kernels(kernels, device)))
    return random_workloads("random", [spec], arguments.seed), ""
