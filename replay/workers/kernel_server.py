"""The worker's handling of requests about kernels: probes, first calls and replays."""

from __future__ import annotations

import contextlib
import functools
import gc
import importlib.metadata
import os
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import torch

from capture.errors import DatasetError
from replay.bench.first_calls import first_calls
from replay.bench.runner import Loaded, replay_here
from replay.bench.settings import Settings, WorkerOptions
from replay.isolation.process_state import ProcessState
from replay.kernels.failures import CannotJudge, classify
from replay.kernels.registry import Kernel, KernelNameError, find, select
from replay.timing.machine import available_bytes, usual_device
from replay.timing.rounds import Turn, never
from replay.workers.device_memory import give_back
from replay.workers.remote_judge import RemoteJudge
from replay.workers.shared_memory import Outbox
from replay.workers.worker import Hear, Say
from replay.workloads.sources import source_from_json
from replay.workloads.workload import Workload


def handle(request: dict[str, Any], say: Say, hear: Hear) -> None:
    """Handle a request to "probe", "warm up", "call" or "replay" kernels, or "touch" a device."""
    with torch.no_grad():  # set before the snapshot, so that a kernel's change of mode is noticed
        process_state = _process_state()
        if request["do"] == "probe":
            _probe(request, say, process_state)
        elif request["do"] == "touch":
            device = request["device"] or usual_device()
            torch.zeros(1, device=device).add_(1).item()
            say(works=True)
        elif request["do"] == "warm up":
            with contextlib.suppress(KernelNameError):  # the command reports an unknown name
                _warm_up(select(request["kernels"])[0], process_state)
        elif request["do"] == "call":
            _call(request, say, process_state)
        else:
            _replay(request, say, hear, process_state)


@functools.cache
def _process_state() -> ProcessState:
    """Record the process's state at the first request, before any kernel is imported."""
    return ProcessState()


@functools.cache
def _outbox(file: int, device: torch.device) -> Outbox:
    """Open the shared memory for outputs, once for all calls."""
    return Outbox(file, device)


_warm: set[str] = set()
"""Names of kernels whose modules have been imported."""


def _warm_up(kernels: Sequence[Kernel], process_state: ProcessState) -> None:
    """Import modules in advance, so that the time of first calls is the time of compilation."""
    cold = [kernel for kernel in kernels if kernel.warm_up and kernel.name not in _warm]
    for kernel in cold:
        assert kernel.warm_up is not None
        with contextlib.suppress(Exception):  # the first call reports the error
            kernel.warm_up()
        process_state.restore(kernel.name)
        _warm.add(kernel.name)
    if cold:
        gc.freeze()


def _probe(request: dict[str, Any], say: Say, process_state: ProcessState) -> None:
    device = torch.device(request["device"])
    for name in request["kernels"]:
        say(at=name)
        try:
            kernel = find(name).loaded()
            reason = kernel.unavailable(device)
        except BaseException as error:
            say(probed=name, reason=classify(error)[1])
            continue
        finally:
            process_state.restore(name)
        version = _version(kernel.library)
        say(probed=name, reason=reason, version=version, install=kernel.install)


def _call(request: dict[str, Any], say: Say, process_state: ProcessState) -> None:
    settings = Settings.from_json(request["settings"])
    with contextlib.suppress(DatasetError):  # the replay reports an unreadable call
        kernels = [find(name) for name in request["kernels"]]
        _warm_up(kernels, process_state)
        call = Workload.of(source_from_json(request["workload"])).load_to_judge(settings.device)
        for kernel, milliseconds in first_calls(
            call, kernels, settings, process_state, lambda name: say(at=name)
        ):
            say(called=kernel, first_call_ms=milliseconds)
    give_back(settings.device)


def _replay(request: dict[str, Any], say: Say, hear: Hear, process_state: ProcessState) -> None:
    settings = Settings.from_json(request["settings"])
    options = WorkerOptions.from_json(request["options"])

    def report(_: Workload, stage: str) -> None:
        say(at=stage)

    def tell(loaded: Loaded) -> None:
        say(call=loaded.facts, machine=loaded.machine, baseline=loaded.baseline)

    def turns(rounds: int, is_done: Callable[[], bool] = never) -> Iterator[Turn]:
        """Request turns from the parent. Between them, other workers have turns."""
        say(rounds=rounds)
        while "number" in (turn := hear()):
            yield Turn(**turn)
            say(taken=True, enough=is_done())

    try:
        if settings.device.type == "cpu":
            _limit_memory(settings.device)
        kernels = [find(name) for name in request["kernels"]]
        _warm_up(kernels, process_state)  # the judge computes the reference during these imports
        wanted = Workload.of(source_from_json(request["workload"]))
        judge_factory = None
        if options.shared_file is not None:
            outbox = _outbox(options.shared_file, settings.device)
            judge_factory = RemoteJudge.factory(say, hear, outbox)
        for row in replay_here(
            [wanted],
            kernels,
            settings,
            report,
            tell,
            options,
            judge_factory,
            process_state,
            turns,
        ):
            say(row=row)
    except DatasetError as error:
        say(unreadable=str(error))
    except CannotJudge as error:
        say(unreadable=classify(error).reason)
    give_back(settings.device)  # another environment's worker may need memory next


def _version(library: str) -> str:
    try:
        return importlib.metadata.version(library) if library else ""
    except importlib.metadata.PackageNotFoundError:
        return ""


def _limit_memory(device: torch.device) -> None:
    """Make too large allocations raise an error, because otherwise the system may end a process.

    With a GPU this is not done, because CUDA reserves address space that it never fills.
    """
    try:
        import resource
    except ImportError:  # not a Unix system
        return
    _, hard = resource.getrlimit(resource.RLIMIT_DATA)
    # The limit also counts memory that is already mapped.
    wanted = _data_bytes() + available_bytes(device)
    if hard == resource.RLIM_INFINITY or wanted < hard:
        with contextlib.suppress(ValueError):  # macOS has this limit but may refuse to set it
            resource.setrlimit(resource.RLIMIT_DATA, (wanted, hard))


def _data_bytes() -> int:
    """Return the bytes that count against RLIMIT_DATA; 0 if the system does not report them."""
    try:
        pages = int(Path("/proc/self/statm").read_text().split()[5])
    except OSError:
        return 0
    return pages * os.sysconf("SC_PAGE_SIZE")
