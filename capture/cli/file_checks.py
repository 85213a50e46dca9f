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
from capture.call.gradients import GRADIENTS
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
    if that device is not available. With the same function, device and version the output should be
    bit-identical, but a relative L1 difference (Σ|O−R|/Σ|O|) passes up to

        4 · eps(dtype) + eps(float32) · (1 + scale · max‖q‖ · max‖k‖) · Σ P|V| / Σ|O|

    where P are the weights; calls in float64 have eps(float64) in both places. The second term
    allows for sums in another order: those of the scores, and those of the values, whose terms may
    cancel (Higham 2002, section 4.2). Recorded gradients are recomputed too, and may differ by four
    times as much. Calls with options that SDPA does not have are not recomputed.
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
    with chosen:
        if call.grad_output is None:
            with torch.inference_mode():
                recomputed = {"output": (TORCH_SDPA(**call.arguments()), output)}
        else:
            recomputed = _with_gradients(call, output)
    found = {name: _difference(*each) for name, each in recomputed.items()}
    if not any(found.values()):
        return True, f"{'output' if len(found) == 1 else 'output and gradients'} bit-identical"
    limit = _limit(call, output)
    limits = {name: limit if name == "output" else 4 * limit for name in found}
    texts = (
        f"{name} differs by relative L1 {difference:.1e} ({limits[name]:.1e} allowed)"
        for name, difference in found.items()
        if difference
    )
    return all(found[name] < limits[name] for name in found), ", ".join(texts)


def _limit(call: AttentionCall, output: Tensor) -> float:
    """Return the largest relative L1 difference that passes (`check_files`)."""
    arguments = call.arguments()
    arguments["value"] = arguments["value"].abs()
    with torch.inference_mode():
        terms = TORCH_SDPA(**arguments).double().nansum()
    scale = call.query.shape[-1] ** -0.5 if call.scale is None else abs(call.scale)
    scores = scale * _longest(call.query) * _longest(call.key)
    in_sums = torch.finfo(torch.promote_types(output.dtype, torch.float32)).eps * (1 + scores)
    return 4 * torch.finfo(output.dtype).eps + in_sums * float(
        terms / output.double().abs().nansum()
    )


def _longest(rows: Tensor) -> float:
    """Return the largest finite norm of a row."""
    norms = rows.double().norm(dim=-1)
    return float(norms[norms.isfinite()].max()) if norms.isfinite().any() else 0.0


def _with_gradients(call: AttentionCall, output: Tensor) -> dict[str, tuple[Tensor, Tensor]]:
    """Return output and gradients, recomputed and recorded, by name."""
    given = {name: getattr(call, GRADIENTS[name]) for name in GRADIENTS if name != "output"}
    recorded = {name: gradient for name, gradient in given.items() if gradient is not None}
    arguments = call.arguments()
    for name in recorded:
        arguments[name] = arguments[name].detach().requires_grad_()
    with torch.enable_grad():
        again = TORCH_SDPA(**arguments)
    again.backward(call.grad_output)
    found = {GRADIENTS[name]: (arguments[name].grad, each) for name, each in recorded.items()}
    return {"output": (again.detach(), output), **found}


def _difference(again: Tensor, recorded: Tensor) -> float:
    """Return the relative L1 difference; 0 if bit-identical."""
    # A fully masked row is NaN in some backends.
    if bool(((again == recorded) | (again.isnan() & recorded.isnan())).all()):
        return 0.0
    total = recorded.double().abs().sum()
    return float((again.double() - recorded.double()).abs().sum() / total)


def _first_line(error: Exception) -> str:
    return str(error).partition("\n")[0]
