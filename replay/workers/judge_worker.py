"""The handling of requests in the process that judges outputs, which runs no kernels."""

from __future__ import annotations

import functools
import json
import math
from typing import Any

import torch
from torch import Tensor

from capture.call.attention_call import AttentionCall
from capture.call.strides import copy_with_strides
from capture.storage.json_data import typed
from replay.bench.settings import Settings
from replay.isolation.block import LEAST_CALLS, most_calls, null_seconds
from replay.isolation.block_inputs import BlockInputs
from replay.isolation.judge import LocalJudge
from replay.isolation.output_form import output_shape
from replay.isolation.probe import gpu_probe_ms
from replay.kernels.failures import CannotJudge
from replay.timing.machine import usual_device
from replay.workers.device_memory import give_back
from replay.workers.shared_memory import Inbox, shared_on_gpu
from replay.workers.worker import Hear, Say
from replay.workloads.grad_outputs import with_grad_output
from replay.workloads.sources import source_from_json
from replay.workloads.workload import Workload

_judges: dict[str, LocalJudge] = {}
"""Judge of the last or next call. The key contains all inputs of the judge except the compared
output."""
_block: dict[str, Tensor] = {}
"""Copies of the outputs of the last block."""
_reserved: dict[str, Tensor] = {}
"""GPU memory to which a worker writes the outputs of a block."""
_pools: list[torch.cuda.MemPool] = []
"""Pool for that memory alone, because a worker can write to the whole segment that it opens."""


@functools.cache
def _inbox(file: int, device: torch.device) -> Inbox:
    return Inbox(file, device)


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
    inbox = _inbox(request["file"], settings.device)
    if request["do"] == "open":
        judge = _judge_of(request, settings)
        if compared := inbox.take(request["handed"]):
            judge.compared = compared["output"]
        say(opened=True)
        return
    if not _judges:
        raise CannotJudge("the judge's process ended during this call, and was started again")
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
    elif request["do"] == "judge gradients":
        gradients = inbox.take(request["handed"])
        say(judged=judge.judge_gradients(request["kernel"], request["accuracy_class"], gradients))
    elif request["do"] == "reserve block":
        _reserve(judge.call, typed(int, request["calls"], "calls"))
        say(memory=shared_on_gpu(_reserved["outputs"]))
    elif request["do"] == "run null block":
        outputs = list((_reserved | inbox.view(request["handed"]))["outputs"])
        say(seconds=null_seconds(judge.call, BlockInputs(judge.call), outputs))
    elif request["do"] == "take block":
        _block.clear()
        _block.update(inbox.take(request["handed"]))
        if _reserved and "outputs" not in _block:
            _block["outputs"] = _reserved["outputs"].clone()
        found, shape = _block["outputs"], [request["calls"], *output_shape(judge.call)]
        if [*found.shape] != shape or found.dtype != judge.call.dtype:
            raise CannotJudge(f"outputs of shape {[*found.shape]}, expected {shape}")
        if settings.device.type == "cuda":
            torch.cuda.synchronize(settings.device)
        say(taken=True, output_bytes=found[0].nbytes)
    else:
        kernel, accuracy_class, choices = request["kernel"], request["accuracy_class"], None
        if accuracy_class == "sparse":
            keys = copy_with_strides(inbox.view(request["handed"])["chosen"], settings.device)
            choices = [(request["number"], keys)]
        outputs = list(_block["outputs"])
        wrong = judge.judge_block(
            kernel, accuracy_class, request["seed"], outputs, request["drawn"], choices
        )
        say(wrong=wrong, other_share=judge.other_shares.get(kernel, ""))
    give_back(settings.device)


def _reserve(call: AttentionCall, calls: int) -> None:
    shape = output_shape(call)
    if not LEAST_CALLS <= calls <= most_calls(math.prod(shape) * call.dtype.itemsize):
        raise CannotJudge(f"invalid number of calls in a block: {calls}")
    _reserved.clear()
    _pools[:] = [torch.cuda.MemPool()]
    with torch.cuda.use_mem_pool(_pools[0]):
        outputs = torch.zeros((calls, *shape), dtype=call.dtype, device=call.device)
    _reserved["outputs"] = outputs


def _touch(device: str) -> None:
    """Judge a tiny output, so that CUDA starts and loads its modules in advance."""
    query = torch.ones(1, 1, 1, 16, dtype=torch.bfloat16, device=device)
    LocalJudge(AttentionCall(query, query, query)).judge("", "exact", query, None)


def _judge_of(request: dict[str, Any], settings: Settings) -> LocalJudge:
    """Return the judge of a call, and keep it for later requests and restarted workers."""
    asked = settings.to_json()
    names = ("errors_against", "compare_stats", "tolerances", "backward", "seed")
    how = [asked[name] for name in names]
    key = json.dumps([request["workload"], *how])
    if key not in _judges:
        _judges.clear()
        _block.clear()
        workload = Workload.of(source_from_json(request["workload"]))
        call = workload.load_to_judge(settings.device, backward=settings.backward)
        if settings.backward:
            call = with_grad_output(call, settings.seed)
        with torch.no_grad():
            _judges[key] = LocalJudge(
                call, settings.errors_against, settings.compare_stats, None, settings.tolerances
            )
    return _judges[key]
