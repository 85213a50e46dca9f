"""Verifies that a dataset is intact and that SDPA still produces the recorded outputs."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch.nn.attention import SDPBackend, sdpa_kernel

from capture.call import AttentionCall
from capture.call_file import FileEntry
from capture.dataset import Dataset
from capture.errors import DatasetError
from capture.interceptor import TORCH_SDPA

_BACKENDS = {
    "torch-math": SDPBackend.MATH,
    "torch-flash": SDPBackend.FLASH_ATTENTION,
    "torch-efficient": SDPBackend.EFFICIENT_ATTENTION,
    "torch-cudnn": SDPBackend.CUDNN_ATTENTION,
}


@dataclass(frozen=True)
class Finding:
    """The result of verifying one file."""

    entry: FileEntry
    good: bool
    text: str


def verify(dataset: Dataset) -> list[Finding]:
    """Check every file's checksum and shapes, and recompute its output with PyTorch's SDPA.

    The output is recomputed with the recorded backend on the type of device that produced it, or on
    the CPU if there is none. On the same device and version it should be bit-identical; elsewhere a
    relative L1 difference (Σ|O−R|/Σ|O|) of up to 4 · `torch.finfo(dtype).eps` passes.
    """
    return [_verify_entry(entry) for entry in dataset.entries]


def _verify_entry(entry: FileEntry) -> Finding:
    try:
        entry.check()
        recorded_on = entry.origin.device.split()[0]
        same_device = recorded_on == "cpu" or torch.cuda.is_available()
        call = entry.load(recorded_on if same_device else "cpu")
    except DatasetError as error:
        return Finding(entry, False, str(error).removeprefix(f"{entry.path}: "))
    if call.output is None:
        return Finding(entry, True, "intact; no output recorded")
    if call.dropout_p > 0:
        return Finding(entry, True, f"intact; dropout {call.dropout_p} cannot be recomputed")
    note = "" if same_device else f" (recomputed on cpu, recorded on {recorded_on})"
    return _compare_output(entry, call, note)


def _compare_output(entry: FileEntry, call: AttentionCall, note: str) -> Finding:
    assert call.output is not None
    try:
        with torch.inference_mode(), _backend(call):
            again = TORCH_SDPA(**call.arguments())
    except RuntimeError as error:
        reason = str(error).partition("\n")[0]
        return Finding(entry, False, f"output cannot be recomputed here: {reason}")
    if again.shape != call.output.shape:
        shapes = f"{tuple(again.shape)}, but {tuple(call.output.shape)} was recorded"
        return Finding(entry, False, f"recomputed output has shape {shapes}")
    # A fully masked row is NaN in some backends.
    same = (again == call.output) | (again.isnan() & call.output.isnan())
    if bool(same.all()):
        return Finding(entry, True, f"intact; output bit-identical{note}")
    total = call.output.double().abs().sum()
    difference = float((again.double() - call.output.double()).abs().sum() / total)
    allowed = 4 * torch.finfo(call.output.dtype).eps
    good = difference <= allowed
    text = f"output differs by relative L1 {difference:.1e} ({allowed:.1e} allowed){note}"
    return Finding(entry, good, f"intact; {text}" if good else text)


@contextlib.contextmanager
def _backend(call: AttentionCall) -> Iterator[None]:
    backend = _BACKENDS.get(call.origin.backend)
    on_recorded_device = call.origin.device.startswith(call.device.type)
    if backend is None or not on_recorded_device:
        yield
        return
    with sdpa_kernel(backend):
        yield
