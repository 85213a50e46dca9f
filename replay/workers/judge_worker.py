"""The process that judges outputs; it runs no kernels, and kernels cannot reach it."""

from __future__ import annotations

import functools
import json
from typing import Any

import torch
from torch import Tensor

from capture.call.attention_call import AttentionCall
from replay.bench.settings import Settings
from replay.isolation.block import null_seconds
from replay.isolation.block_inputs import BlockInputs
from replay.isolation.judge import LocalJudge
from replay.isolation.output_form import output_shape
from replay.isolation.probe import gpu_probe_ms
from replay.kernels.failures import CannotJudge
from replay.timing.machine import usual_device
from replay.workers.device_memory import give_back
from replay.workers.shared_memory import Inbox, shared_on_gpu
from replay.workers.worker import Hear, Say
from replay.workloads.sources import source_from_json
from replay.workloads.workload import Workload

_judges: dict[str, LocalJudge] = {}
"""Judge of the last or next call; the key has all inputs of the judge except the compared
output."""
_block: dict[str, Tensor] = {}
"""Copies of the outputs of the last block."""
_reserved: dict[str, Tensor] = {}
"""GPU memory to which a worker writes the outputs of a block."""


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
    if request["do"] == "probe":
        say(ms=gpu_probe_ms(settings.device))
        return
    if request["do"] == "expect":
        say(expecting=True)
        if not settings.roofline:  # nothing else may run while the worker measures the peak
            _judge_of(request, settings)
        return
    inbox = _inbox(settings.device)
    if request["do"] == "open":
        judge = _judge_of(request, settings)
        if compared := inbox.take(request["handed"]):
            judge.compared = compared["output"]
        say(opened=True)
        return
    if not _judges:
        raise CannotJudge("the judge's process ended, and another was started amid this call")
    (judge,) = _judges.values()
    if request["do"] == "judge":
        tensors = inbox.take(request["handed"])
        kernel, accuracy_class = request["kernel"], request["accuracy_class"]
        chosen = tensors.get("chosen") if accuracy_class == "sparse" else None
        judged = judge.judge(
            kernel,
            accuracy_class,
            tensors["output"],
            chosen,
            with_accuracy=request["with_accuracy"],
        )
        say(judged=judged)
    elif request["do"] == "reserve block":
        dtype: torch.dtype = getattr(torch, request["dtype"])
        _reserved["outputs"] = torch.zeros(request["shape"], dtype=dtype, device=settings.device)
        say(memory=shared_on_gpu(_reserved["outputs"]))
    elif request["do"] == "run null block":
        outputs = list((_reserved | inbox.view(request["handed"]))["outputs"])
        inputs = BlockInputs(judge.call, values_only=request["accuracy_class"] == "sparse")
        say(seconds=null_seconds(judge.call, inputs, outputs))
    elif request["do"] == "take block":
        _block.clear()
        _block.update(inbox.take(request["handed"]))
        if _reserved and "outputs" not in _block:
            _block["outputs"] = _reserved["outputs"].clone()
        found, shape = _block["outputs"], [request["calls"], *output_shape(judge.call)]
        if [*found.shape] != shape or found.dtype != judge.call.dtype:
            raise CannotJudge(f"outputs of shape {[*found.shape]} where {shape} is right")
        if settings.device.type == "cuda":
            torch.cuda.synchronize(settings.device)
        say(taken=True, output_bytes=found[0].nbytes)
    else:
        accuracy_class = request["accuracy_class"]
        chosen = _block.get("chosen") if accuracy_class == "sparse" else None
        outputs = list(_block["outputs"])
        wrong = judge.judge_block(
            request["kernel"], accuracy_class, request["seed"], outputs, request["drawn"], chosen
        )
        _block.clear()
        say(wrong=wrong)
    give_back(settings.device)


def _touch(device: str) -> None:
    """Judge a tiny output, so that CUDA starts and loads its modules."""
    query = torch.ones(1, 1, 1, 16, dtype=torch.bfloat16, device=device)
    LocalJudge(AttentionCall(query, query, query)).judge("", "exact", query, None)


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
                call, settings.errors_against, settings.compare_stats, None, settings.tolerances
            )
    return _judges[key]
