"""The doctor around a run of a model: record it, then examine kernels on what was recorded."""

from __future__ import annotations

import contextlib
import tempfile
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from capture.errors import CaptureError
from capture.recording.record import record
from replay.bench.settings import Settings
from replay.diagnosis.captured import CAPTURED
from replay.diagnosis.examinations import Diagnoses, diagnose
from replay.kernels.registry import Kernel, KernelNameError, catalogue, find
from replay.workloads.recorded import from_directory
from replay.workloads.workload import Workload

Attention = Callable[..., Tensor]


@contextlib.contextmanager
def doctor(
    module: Any,
    kernel: str | Attention | Sequence[str | Attention] | None = None,
    *,
    max: int = 20,
    sample: str = "hard",
    out: str | Path | None = None,
    timeout: float = 300.0,
) -> Iterator[Diagnoses]:
    """Record the block's attention calls, and after it say why a kernel is wrong on them.

    The model runs with the attention it has; a kernel that is named runs on the recorded inputs
    afterwards, in a process of its own. So leave a `use_kernel` out: what a wrong kernel feeds to
    later layers hides where the error began.

    Args:
        module: as of `capture.record`: a `torch.nn.Module`, a diffusers pipeline, or a dict.
        kernel: a kernel's name, `file.py:function`, a function with SDPA's arguments, or several.
            By default what the model itself called: a backend that was chosen in diffusers or
            transformers is judged by the outputs that it gave.
        max: number of calls to record.
        sample: which, as of `record`; by default those most difficult for a quantised kernel.
        out: a directory to keep the recording in; a temporary one by default.
        timeout: seconds without a sign of life after which a kernel's process is ended.

    Yields:
        `Diagnoses`, empty until the block has ended; print it, or read `found`.

    Raises:
        KernelNameError: no kernel has that name, or none is named.
        CaptureError: as `record`; or, after the block, it made no call that could be recorded.
        RuntimeError, TypeError, ValueError: as `record`; a swap that is active is one reason.

    Example:
        >>> with replay.doctor(pipe.transformer, kernel="sage2") as diagnosis:
        ...     pipe("a panda playing guitar")
        >>> print(diagnosis)
    """
    given = [kernel] if kernel is None or isinstance(kernel, str) or callable(kernel) else kernel
    if not given:
        raise KernelNameError("no kernel is named: leave `kernel=` out for what the model called")
    kernels = [each for name in given for each in _kernels(name)]
    diagnoses = Diagnoses()
    with contextlib.ExitStack() as stack:
        directory = Path(out or stack.enter_context(tempfile.TemporaryDirectory()))
        place = directory if out else directory / "captured_inputs"
        with record(module, place, max=max, sample=sample) as recording:
            yield diagnoses
        if not recording.kept:
            raise CaptureError(f"there is nothing to examine: {'; '.join(recording.problems)}")
        workloads, _ = from_directory(place)
        device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
        if not kernels:
            kernels = [CAPTURED, *_called(workloads)]
        here = any(_exists_only_here(each) for each in kernels)
        settings = Settings(device, "warm")
        found = diagnose(workloads, kernels, settings, timeout, in_process=here)
        vars(diagnoses).update(vars(found))


def _kernels(kernel: str | Attention | None) -> list[Kernel]:
    if kernel is None:
        return []
    if isinstance(kernel, str):
        return [find(kernel)]
    registered = [each for each in catalogue().values() if each.attention is kernel]
    return registered or [Kernel(getattr(kernel, "__name__", "kernel"), kernel)]


def _called(workloads: Sequence[Workload]) -> list[Kernel]:
    """The kernels that the model called, of those that are known."""
    known = catalogue()
    backends = dict.fromkeys(each.load(torch.device("cpu")).origin.backend for each in workloads)
    return [known[name] for name in backends if name in known]


def _exists_only_here(kernel: Kernel) -> bool:
    """Whether a new process would not find it: a function of the user's, or one they registered."""
    if kernel is CAPTURED or kernel.load is not None:
        return False
    module = getattr(kernel.attention, "__module__", "") or ""
    return not module.startswith("replay.")
