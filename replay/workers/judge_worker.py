"""The process that judges outputs; it runs no kernels, and kernels cannot reach it."""

from __future__ import annotations

import functools
import json
from typing import Any

import torch

from capture.call.attention_call import AttentionCall
from replay.bench.settings import Settings
from replay.isolation.judge import LocalJudge, Sample
from replay.kernels.failures import CannotJudge
from replay.timing.machine import usual_device
from replay.workers.device_memory import give_back
from replay.workers.shared_memory import Inbox
from replay.workers.worker import Hear, Say
from replay.workloads.sources import source_from_json
from replay.workloads.workload import Workload

_judges: dict[str, LocalJudge] = {}
"""Judge of the last or next call; the key has all inputs of the judge except the seed and the
compared output."""


@functools.cache
def _inbox(device: torch.device) -> Inbox:
    return Inbox(device)


def handle(request: dict[str, Any], say: Say, _hear: Hear) -> None:
    """Handle a request to "touch" a device, "expect" or "open" a call, or judge outputs."""
    if request["do"] == "touch":
        _touch(request["device"] or usual_device())
        say(works=True)
        return
    settings = Settings.from_json(request["settings"])
    if request["do"] == "expect":
        say(expecting=True)
        if not settings.roofline:  # nothing else may run while the worker measures the peak
            _judge_of(request, settings)
        return
    if request["do"] == "open":
        judge = _judge_of(request, settings)
        judge.seed = request["seed"]
        judge.compared = _inbox(settings.device).take(request["handed"]).get("output")
        say(opened=True)
        return
    if not _judges:
        raise CannotJudge("the judge's process ended, and another was started amid this call")
    (judge,) = _judges.values()
    tensors = _inbox(settings.device).take(request["handed"])
    kernel, accuracy_class = request["kernel"], request["accuracy_class"]
    chosen = tensors.get("chosen") if accuracy_class == "sparse" else None
    if request["do"] == "judge":
        judged = judge.judge(
            kernel,
            accuracy_class,
            tensors["output"],
            chosen,
            with_accuracy=request["with_accuracy"],
        )
        say(judged=judged)
    else:
        samples = [
            Sample(
                number, drawn, tensors[f"changed.{place}"], tensors[f"others.{place}"], is_stepped
            )
            for place, (number, drawn, is_stepped) in enumerate(request["numbers"])
        ]
        say(wrong=judge.judge_samples(kernel, accuracy_class, samples, chosen))
    give_back(settings.device)


def _touch(device: str) -> None:
    """Judge a tiny output, so that CUDA starts and loads its modules."""
    query = torch.ones(1, 1, 1, 16, dtype=torch.bfloat16, device=device)
    call = AttentionCall(query, query, query)
    LocalJudge(call, seed=0).judge("", "exact", query, None)


def _judge_of(request: dict[str, Any], settings: Settings) -> LocalJudge:
    """Return the judge of a call, and keep the judge for a worker that starts again."""
    asked = settings.to_json()
    how = [asked[name] for name in ("errors_against", "compare_stats", "tolerances")]
    key = json.dumps([request["workload"], *how])
    if key not in _judges:
        _judges.clear()
        call = Workload.of(source_from_json(request["workload"])).load_to_judge(settings.device)
        with torch.no_grad():
            _judges[key] = LocalJudge(
                call,
                seed=0,
                errors_against=settings.errors_against,
                compare_stats=settings.compare_stats,
                thresholds=settings.tolerances,
            )
    return _judges[key]
