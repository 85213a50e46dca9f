"""The child process: replays calls for a parent, one request a line.

Every line is JSON. Before anything that could kill this process a line names the kernel, so that
the parent knows whom to blame. Tensors never travel: a request names a file or a random shape.
Stdout and stderr belong to the kernels; the parent keeps what they print. `replay.process` starts
it, with the two ends of pipes that it talks through.
"""

from __future__ import annotations

import contextlib
import functools
import importlib.metadata
import json
import os
import select
import signal
import threading
import traceback
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any, TextIO

import torch

from capture.dataset import FileEntry
from capture.errors import DatasetError
from replay.checking import ContextLost, classify
from replay.machine import available_bytes
from replay.registry import find
from replay.results import CallFacts
from replay.runner import replay
from replay.settings import Settings
from replay.synthetic import Spec, dtype, twin, workload
from replay.workloads import Workload, pickled_call, recorded_call


def main(requests_fd: int, replies_fd: int) -> None:
    for descriptor in (requests_fd, replies_fd):
        os.set_inheritable(descriptor, False)  # a compiler that outlives us must not hold them
    threading.Thread(target=_end_with_parent, args=(replies_fd,), daemon=True).start()
    requests = os.fdopen(requests_fd, "r")
    replies = os.fdopen(replies_fd, "w", buffering=1)
    _say(replies, ready=True)
    for line in requests:
        request = json.loads(line)
        if request["do"] == "probe":
            _probe(request, replies)
        elif request["do"] == "model":
            _model(request, replies)
        else:
            _replay(request, replies)


def _end_with_parent(replies_fd: int) -> None:
    """A parent that was killed cannot end us, and a kernel that hangs would stay for ever."""
    parent = select.poll()
    parent.register(replies_fd, 0)  # an error is always reported: that nobody reads any more
    parent.poll()
    os.killpg(os.getpgrp(), signal.SIGKILL)


def _probe(request: dict[str, Any], replies: TextIO) -> None:
    """Which kernels can run on the device, and the version of their library."""
    device = torch.device(request["device"])
    for name in request["kernels"]:
        _say(replies, at=name)
        try:
            kernel = find(name).loaded()
            reason = kernel.unavailable(device)
        except Exception as error:
            _say(replies, probed=name, reason=classify(error)[1])
            continue
        version = _version(kernel.library)
        _say(replies, probed=name, reason=reason, version=version, install=kernel.install)
    _say(replies, done=True)


def _replay(request: dict[str, Any], replies: TextIO) -> None:
    settings = Settings.from_json(request["settings"])

    def report(_: Workload, stage: str) -> None:
        _say(replies, at=stage)

    def loaded(facts: CallFacts) -> None:
        _say(replies, call=asdict(facts))

    try:
        if settings.device.type == "cpu":
            _limit_memory(settings.device)
        kernels = [find(name) for name in request["kernels"]]
        wanted = _workload(request["workload"])
        for row in replay([wanted], kernels, settings, report, loaded):
            _say(replies, row=asdict(row))
    except ContextLost as error:
        _say(replies, lost=str(error), status=error.status)
        return
    except DatasetError as error:
        _say(replies, unreadable=str(error))
    except Exception as error:  # a full disk, or a defect of ours: no kernel's fault
        _say(replies, failed=classify(error)[1], traceback=traceback.format_exc())
    if settings.device.type == "cuda":
        torch.cuda.empty_cache()  # the worker of another environment needs the memory next
    _say(replies, done=True)


def _model(request: dict[str, Any], replies: TextIO) -> None:
    """A step of the end-to-end check: build the model, or run it once."""
    from replay.speedcheck.serving import serve

    try:
        serve(request, functools.partial(_say, replies))
    except Exception as error:
        _say(replies, failed=classify(error)[1], traceback=traceback.format_exc())
    _say(replies, done=True)


def _workload(source: dict[str, Any]) -> Workload:
    if source["kind"] == "recorded":
        path = Path(source["path"])
        entry = FileEntry.read(path)
        return recorded_call(replace(entry, nbytes=source["nbytes"], sha256=source["sha256"]))
    if source["kind"] == "pickled":
        return pickled_call(Path(source["path"]))
    if source["kind"] == "twin":
        return twin(_workload(source["of"]), source["seed"])
    spec = Spec(**{**source["spec"], "dtype": dtype(source["spec"]["dtype"])})
    return workload(source["name"], source["model"], spec, source["seed"])


def _say(replies: TextIO, **message: Any) -> None:
    replies.write(json.dumps(message) + "\n")


def _version(library: str) -> str:
    try:
        return importlib.metadata.version(library) if library else ""
    except importlib.metadata.PackageNotFoundError:
        return ""


def _limit_memory(device: torch.device) -> None:
    """An allocation too large for this machine fails here instead of inviting the kernel's killer.

    Not on a GPU: CUDA reserves address space that it never fills.
    """
    try:
        import resource
    except ImportError:  # not a Unix
        return
    _, hard = resource.getrlimit(resource.RLIMIT_DATA)
    # On top of what is mapped already, which a machine short of memory would otherwise not allow.
    wanted = _data_bytes() + available_bytes(device)
    if hard == resource.RLIM_INFINITY or wanted < hard:
        with contextlib.suppress(ValueError):  # macOS knows the limit and may refuse it
            resource.setrlimit(resource.RLIMIT_DATA, (wanted, hard))


def _data_bytes() -> int:
    """What counts against RLIMIT_DATA now; 0 where the system does not tell."""
    try:
        pages = int(Path("/proc/self/statm").read_text().split()[5])
    except OSError:
        return 0
    return pages * os.sysconf("SC_PAGE_SIZE")
