"""Worker side of the doctor: examines a kernel on a call, or finds a correct kernel."""

from __future__ import annotations

import functools
from collections.abc import Sequence
from typing import Any

import torch

from capture.errors import DatasetError
from replay.bench.forms import Forms
from replay.bench.output_check import Checker
from replay.bench.settings import Settings, WorkerOptions
from replay.diagnosis.captured import kernel_named
from replay.diagnosis.diagnosis import diagnosed
from replay.diagnosis.examine import examine
from replay.diagnosis.examine_inside import examine_inside
from replay.diagnosis.invariance import examine_invariance
from replay.diagnosis.modes import Mode
from replay.isolation.in_process import InProcessJudge
from replay.isolation.inputs import Inputs
from replay.isolation.process_state import ProcessState
from replay.kernels.registry import Kernel
from replay.workers.worker import Hear, Say
from replay.workloads.sources import source_from_json
from replay.workloads.workload import Workload


def handle(request: dict[str, Any], say: Say, hear: Hear) -> None:
    """Handle a request to "examine" a kernel, to let it "agree", or to "find healthy" kernels.

    Raises:
        ContextLost: a kernel made this process unusable.
    """
    with torch.no_grad():  # kernels run in this mode, so a kernel that changes the mode is noticed
        process_state = _process_state()
    kernels = [kernel_named(name) for name in request["kernels"]]
    workload = Workload.of(source_from_json(request["workload"]))
    settings = Settings.from_json(request["settings"])
    mode, chunk = request["mode"], request["chunk"]
    serve(request["do"], kernels, workload, settings, process_state, say, mode, chunk)


@functools.cache
def _process_state() -> ProcessState:
    """Create the process state at the first request, before any foreign kernel is imported."""
    return ProcessState()


def serve(
    do: str,
    kernels: Sequence[Kernel],
    workload: Workload,
    settings: Settings,
    process_state: ProcessState,
    say: Say,
    mode: Mode = "eager",
    chunk: int = 0,
) -> None:
    """Examine the only kernel on a call, or find the first kernel that is correct on it.

    Args:
        say: gets the results, and the kernel that runs next.
        mode: mode to run the kernel in; all but eager need a kernel that is right in eager mode.
        chunk: number of queries in a chunk, if `do` is "agree" (batch invariance).

    Raises:
        ContextLost: a kernel made this process unusable.
    """
    with torch.no_grad():
        try:
            call = workload.load_to_judge(settings.device)
        except DatasetError as error:
            say(unreadable=str(error))
            return
        say(origin=vars(call.origin))
        if do == "examine":
            (kernel,) = kernels
            say(at=kernel.name)
            if mode == "eager":
                result = examine(kernel, call, settings, process_state)
            else:
                result = examine_inside(mode, kernel, call, settings, process_state)
            found = None
            if result.evidence is not None:
                about = (workload.name, kernel.name, call.origin)
                found = diagnosed(*about, result.evidence).to_json()
            say(examined=found, refused=result.refused, untried=result.untried)
            return
        if do == "agree":
            (kernel,) = kernels
            say(at=kernel.name)
            verdicts = examine_invariance(kernel, call, settings, process_state, chunk)
            say(agreed={case: vars(verdict) for case, verdict in verdicts.items()})
            return
        forms, judge = Forms.of(call), InProcessJudge(call, thresholds=settings.tolerances)
        for kernel in kernels:
            say(at=kernel.name)
            inputs = Inputs(*forms.all)
            checker = Checker(forms, inputs, process_state, judge, settings, WorkerOptions())
            checked = checker.check(kernel)
            spreads = checked.accuracy is not None and checked.accuracy.spoilt_rows
            is_right = checked.finding.status in ("ok", "not-timed") and not spreads
            if is_right and not checked.changed_inputs:
                say(healthy=kernel.name)
                return
