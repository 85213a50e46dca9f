"""Worker side of the doctor: examines a kernel on a call, or finds a correct kernel."""

from __future__ import annotations

import functools
from collections.abc import Sequence
from typing import Any

import torch

from capture.call.attention_call import AttentionCall
from capture.errors import DatasetError
from replay.bench.forms import Forms
from replay.bench.output_check import Checker
from replay.bench.settings import Settings, WorkerOptions
from replay.diagnosis.captured import kernel_named
from replay.diagnosis.diagnosis import diagnosed
from replay.diagnosis.examine import examine
from replay.isolation.inputs import Inputs
from replay.isolation.judge import LocalJudge
from replay.isolation.process_state import ProcessState
from replay.kernels.registry import find
from replay.workers.worker import Hear, Say
from replay.workloads.sources import source_from_json
from replay.workloads.workload import Workload


def handle(request: dict[str, Any], say: Say, hear: Hear) -> None:
    """Handle a request `{"do": "examine", …}` or `{"do": "find healthy", …}`.

    Raises:
        ContextLost: a kernel made this process unusable.
    """
    with torch.no_grad():  # kernels run in this mode, so a kernel that changes the mode is noticed
        process_state = _process_state()
        settings = Settings.from_json(request["settings"])
        try:
            call = Workload.of(source_from_json(request["workload"])).load_to_judge(settings.device)
        except DatasetError as error:
            say(unreadable=str(error))
            return
        if request["do"] == "examine":
            say(origin=vars(call.origin))
            kernel = request["kernel"]
            say(at=kernel)
            evidence, refused = examine(kernel_named(kernel), call, settings, process_state)
            found = None
            if evidence is not None:
                found = diagnosed(request["name"], kernel, call.origin, evidence).to_json()
            say(examined=found, refused=refused)
        else:
            say(healthy=healthy(request["kernels"], call, settings, process_state, say))


@functools.cache
def _process_state() -> ProcessState:
    """Create the process state at the first request, before any foreign kernel is imported."""
    return ProcessState()


def healthy(
    names: Sequence[str],
    call: AttentionCall,
    settings: Settings,
    process_state: ProcessState,
    say: Say = lambda **_: None,
) -> str:
    """Return the first named kernel that is correct on a call; empty if none is."""
    forms = Forms.of(call)
    judge = LocalJudge(call, 0, thresholds=settings.tolerances)
    for name in names:
        say(at=name)
        checker = Checker(
            forms, Inputs(*forms.all), process_state, judge, settings, WorkerOptions()
        )
        checked = checker.check(find(name))
        if checked.finding.status in ("ok", "not-timed") and not checked.changed_inputs:
            return name
    return ""
