"""Records a run of a model, then examines kernels on the recorded calls."""

from __future__ import annotations

import contextlib
import os
import tempfile
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from capture.errors import CaptureError
from capture.recording.record import record
from capture.storage.capture_record import first_nonfinite
from replay.bench.settings import Settings
from replay.diagnosis.captured import CAPTURED
from replay.diagnosis.examinations import Diagnoses, diagnose
from replay.diagnosis.modes import chosen_modes
from replay.kernels.declared_arguments import original
from replay.kernels.registered_functions import address_of
from replay.kernels.registry import Kernel, KernelNameError, catalogue, find, of_function
from replay.workloads.recorded import from_directory
from replay.workloads.workload import Workload

Attention = Callable[..., Tensor]


@contextlib.contextmanager
def examine_run(
    module: Any,
    kernels: str | Attention | Sequence[str | Attention] | None = None,
    *,
    max: int = 20,
    sample: str = "hard",
    out: str | os.PathLike[str] | None = None,
    timeout: float = 300.0,
    inside: str | Sequence[str] | None = None,
) -> Iterator[Diagnoses]:
    """Record the block's attention calls, then find out why a kernel is wrong on these calls.

    The model runs with its current attention; the named kernels run on the recorded inputs
    afterwards, in their own process. Do not combine this function with `use_kernel`: a wrong kernel
    changes the inputs of later layers, which hides where the error began.
    `replay.api.diagnose.doctor` describes the arguments.

    Raises:
        KernelNameError: a kernel does not exist, or the list is empty.
        ModeError: a mode is unknown or cannot be used here.
        CaptureError: as for `record`; also if the block made no call that could be recorded.
        RuntimeError, TypeError, ValueError: as for `record`, e.g. because a swap is active.
    """
    given = kernels if isinstance(kernels, Sequence) and not isinstance(kernels, str) else [kernels]
    if not given:
        raise KernelNameError(
            "kernels= names no kernel: leave it out to examine what the model ran"
        )
    examined = [kernel for name in given for kernel in _kernels(name)]
    diagnoses = Diagnoses()
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    in_process = any(_exists_only_in_this_process(kernel) for kernel in examined)
    modes = chosen_modes(inside, has_gpu=device.type == "cuda", in_process=in_process)
    with contextlib.ExitStack() as stack:
        directory = Path(out or stack.enter_context(tempfile.TemporaryDirectory()))
        place = directory if out else directory / "captured_inputs"
        with record(module, place, max=max, sample=sample) as recording:
            yield diagnoses
        if not recording.kept:
            raise CaptureError(f"there is nothing to examine: {'; '.join(recording.problems)}")
        workloads, _ = from_directory(place)
        if not examined:
            examined = [CAPTURED, *_called(workloads)]
        settings = Settings(device, "warm")
        diagnoses.first_nonfinite = first_nonfinite([recording.capture])
        diagnose(
            workloads,
            examined,
            settings,
            timeout,
            in_process=in_process,
            inside=modes,
            found=diagnoses,
        )


def _kernels(kernel: str | Attention | None) -> list[Kernel]:
    if kernel is None:
        return []
    if isinstance(kernel, str):
        return [find(kernel)]
    registered = [each for each in catalogue().values() if original(each.attention) is kernel]
    return registered or [of_function(getattr(kernel, "__name__", "kernel"), kernel)]


def _called(workloads: Sequence[Workload]) -> list[Kernel]:
    """Return the known kernels among the backends that the model used."""
    known = catalogue()
    backends = dict.fromkeys(each.load(torch.device("cpu")).origin.backend for each in workloads)
    return [known[name] for name in backends if name in known]


def _exists_only_in_this_process(kernel: Kernel) -> bool:
    """Return True if a kernel is a function of the user's that a new process could not import."""
    if kernel is CAPTURED or kernel.load is not None:
        return False
    if kernel.source:
        return not address_of(kernel.attention)
    module = getattr(kernel.attention, "__module__", "") or ""
    return not module.startswith("replay.")
