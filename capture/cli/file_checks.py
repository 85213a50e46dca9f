"""Verifies that a dataset is intact and that SDPA still produces the recorded outputs."""

from __future__ import annotations

import contextlib
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel

from capture.call.attention_call import AttentionCall
from capture.call.attention_variant import beyond
from capture.errors import DatasetError
from capture.hooks.interceptor import TORCH_SDPA
from capture.storage.call_file import FileEntry
from capture.storage.dataset import Dataset

_BACKENDS = {
    "torch-math": SDPBackend.MATH,
    "torch-flash": SDPBackend.FLASH_ATTENTION,
    "torch-efficient": SDPBackend.EFFICIENT_ATTENTION,
    "torch-cudnn": SDPBackend.CUDNN_ATTENTION,
}


@dataclass(frozen=True)
class FileCheck:
    """Result of verifying one file."""

    path: Path
    good: bool
    text: str


def check_files(dataset: Dataset) -> list[FileCheck]:
    """Check every file's checksum and shapes, and recompute its output with PyTorch's SDPA.

    The output is recomputed with the recorded backend on the recorded type of device, or on the CPU
    if that device is not available. With the same device and version the output should be
    bit-identical, but any relative L1 difference (Σ|O−R|/Σ|O|) up to 4 · `torch.finfo(dtype).eps`
    passes. Outputs of calls with options that SDPA does not have are not recomputed.
    """
    damaged = [FileCheck(file.path, False, file.error.reason) for file in dataset.damaged]
    return [*map(_verify_entry, dataset.entries), *damaged]


def _verify_entry(entry: FileEntry) -> FileCheck:
    good, text = _recomputed(entry)
    if entry.origin.derived:
        text += f"; derived: {entry.origin.derived}"
    return FileCheck(entry.path, good, text)


def _recomputed(entry: FileEntry) -> tuple[bool, str]:
    """Load a call and recompute its output; return whether all is well, and a description."""
    recorded_on = entry.origin.device_type
    device = "cuda" if recorded_on == "cuda" and torch.cuda.is_available() else "cpu"
    try:
        call = entry.load(device)
    except DatasetError as error:
        return False, error.reason
    except RuntimeError as error:  # the call does not fit into the device's memory
        return False, f"cannot be loaded on {device}: {_first_line(error)}"
    if call.output is None:
        return True, "intact; no output recorded"
    if call.features:
        return True, f"intact; cannot be recomputed, as SDPA has no {beyond(call)}"
    if call.dropout_p > 0:
        return True, f"intact; dropout {call.dropout_p} cannot be recomputed"
    note = "" if recorded_on == device else f" (recomputed on cpu, recorded on {recorded_on})"
    try:
        good, text = _compare_output(call, call.output)
    except (RuntimeError, TypeError, ValueError) as error:
        return False, f"output cannot be recomputed here: {_first_line(error)}"
    return good, f"intact; {text}{note}" if good else f"{text}{note}"


def _compare_output(call: AttentionCall, output: Tensor) -> tuple[bool, str]:
    """Recompute the recorded output; return whether the results agree, and a description."""
    backend = _BACKENDS.get(call.origin.backend)
    chosen: contextlib.AbstractContextManager[None] = contextlib.nullcontext()
    if backend is not None and call.origin.device_type == call.device.type:
        chosen = sdpa_kernel(backend)
    with torch.inference_mode(), chosen:
        again = TORCH_SDPA(**call.arguments())
    # A fully masked row is NaN in some backends.
    if bool(((again == output) | (again.isnan() & output.isnan())).all()):
        return True, "output bit-identical"
    total = output.double().abs().sum()
    difference = float((again.double() - output.double()).abs().sum() / total)
    allowed = 4 * torch.finfo(output.dtype).eps
    text = f"output differs by relative L1 {difference:.1e} ({allowed:.1e} allowed)"
    return difference <= allowed, text


def _first_line(error: Exception) -> str:
    return str(error).partition("\n")[0]
