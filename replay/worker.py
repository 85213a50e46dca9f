"""The child process: replays calls for a parent, one request a line.

    python -m replay.worker REQUESTS_FD REPLIES_FD

Every line is JSON. Before anything that could kill this process a line names the kernel, so that
the parent knows whom to blame. Tensors never travel: a request names a file or a random shape.
Stdout and stderr belong to the kernels; the parent keeps what they print.
"""

from __future__ import annotations

import importlib.metadata
import json
import os
import sys
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any, TextIO

import torch

from capture.dataset import FileEntry
from capture.errors import DatasetError
from replay.checking import ContextLost
from replay.machine import available_bytes
from replay.registry import find
from replay.results import CallFacts
from replay.runner import replay
from replay.settings import Settings
from replay.synthetic import Spec, dtype, workload
from replay.workloads import Workload, pickled_call, recorded_call


def main() -> None:
    requests = os.fdopen(int(sys.argv[1]), "r")
    replies = os.fdopen(int(sys.argv[2]), "w", buffering=1)
    for line in requests:
        request = json.loads(line)
        if request["do"] == "probe":
            _probe(request, replies)
        else:
            _replay(request, replies)


def _probe(request: dict[str, Any], replies: TextIO) -> None:
    """Which kernels can run on the device, and the version of their library."""
    device = torch.device(request["device"])
    for name in request["kernels"]:
        _say(replies, at=name)
        try:
            kernel = find(name).loaded()
            reason = kernel.unavailable(device)
        except Exception as error:
            _say(replies, probed=name, reason=f"{type(error).__name__}: {error}", version="")
            continue
        _say(replies, probed=name, reason=reason, version=_version(kernel.library))
    _say(replies, done=True)


def _replay(request: dict[str, Any], replies: TextIO) -> None:
    settings = Settings.from_json(request["settings"])
    if settings.device.type == "cpu":
        _limit_memory(settings.device)

    def report(_: Workload, stage: str) -> None:
        _say(replies, at=stage)

    def loaded(facts: CallFacts) -> None:
        _say(replies, call=asdict(facts))

    kernels = [find(name) for name in request["kernels"]]
    try:
        wanted = _workload(request["workload"])
        for row in replay([wanted], kernels, settings, report, loaded):
            _say(replies, row=asdict(row))
    except ContextLost as error:
        _say(replies, lost=str(error))
        sys.exit(1)
    except DatasetError as error:
        _say(replies, unreadable=str(error))
    _say(replies, done=True)


def _workload(source: dict[str, Any]) -> Workload:
    if source["kind"] == "recorded":
        path = Path(source["path"])
        entry = FileEntry.read(path)
        return recorded_call(replace(entry, nbytes=source["nbytes"], sha256=source["sha256"]))
    if source["kind"] == "pickled":
        return pickled_call(Path(source["path"]))
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
    resource.setrlimit(resource.RLIMIT_DATA, (available_bytes(device), hard))


if __name__ == "__main__":
    main()
