"""The doctor's finding about a kernel on a call."""

from __future__ import annotations

import re
from dataclasses import asdict, dataclass, field
from typing import Any

from capture.call.attention_call import Origin
from replay.diagnosis.modes import Mode
from replay.diagnosis.subject import Cause, Evidence
from replay.kernels.failures import without_numbers
from replay.rows.row_files import plain

REMEDIES: dict[str, str] = {
    "overflow": "a kernel that accumulates QKᵀ and PV in float32 and keeps values in their format",
    "k-outlier-channel": "a kernel that subtracts the mean of the keys before rounding, or one of "
    "16 bits",
    "mask-ignored": "a kernel that takes the mask, or refuses it",
    "mask-misread": "a kernel that reads the mask as SDPA does",
    "late-sink": "a kernel that rescales its running sum whenever the maximum grows",
    "input-changed": "this kernel on copies of the tensors it changes, at the cost of the copies",
    "output-unwritten": "a kernel that writes every row",
    "odd-length": "this kernel on inputs padded to the multiple, with a mask",
    "causal-alignment": "a kernel with the call's alignment, or this one with the mask in full",
    "stale-graph": "this kernel without its graph or cache, or with the inputs copied into the "
    "captured memory",
    "wrong-scale": "this kernel with the call's scale passed to it",
    "head-mapping": "this kernel with the key heads repeated for each query head",
    "kv-heads": "this kernel with the keys and values repeated for each query head",
    "other-sequence": "this kernel with one sequence per call",
    "strides": "this kernel on contiguous copies, at the cost of the copies",
    "layout": "this kernel with tensors in the layout that it reads: (B, H, S, D) or (B, S, H, D)",
    "head-dim": "this kernel with head_dim padded with zeros, and the scale of the original size",
    "too-large": "this kernel on parts of the call below the limit",
    "nonfinite-hidden": "a kernel that skips hidden keys, or this one with zeros in their place",
    "nonfinite-input": "",
    "cannot-be-captured": "this kernel outside the graph, or without host reads and other calls "
    "that a capture forbids",
    "other-stream": "this kernel with its work on the current stream, or on one that waits for it",
    "stale-in-graph": "this kernel, once all that depends on its inputs is computed on the GPU",
    "replay-differs": "this kernel outside the graph",
    "compile-error": "this kernel as a custom operator (torch.library.custom_op), or excluded with "
    "torch.compiler.disable",
    "compile-differs": "this kernel as a custom operator (torch.library.custom_op), which "
    "torch.compile does not trace",
    "graph-break": "this kernel as a custom operator (torch.library.custom_op)",
    "unknown": "",
}
"""Advice on replacing a kernel, by cause."""

NONFINITE_INPUT: Cause = "nonfinite-input"
"""Cause that lies in the model or an earlier call, not in a kernel."""
COST_SPEED = frozenset({"graph-break"})
"""Causes that slow a model down, but leave its output right."""


@dataclass(frozen=True)
class Diagnosis:
    """Wrong result of a kernel on a call, with its place and cause."""

    call: str
    kernel: str
    cause: Cause
    layer: str
    """Dotted path of the module that made the call."""
    layer_index: int | None
    step: int | None
    head: int | None
    """Query head with the largest error; None if the kernel returned nothing."""
    sentence: str
    evidence: dict[str, Any] = field(default_factory=dict)
    instead: str = ""
    tried: tuple[Mode, ...] = ("eager",)
    """Modes in which the kernel ran on this call; the finding is about the last one."""

    def to_json(self) -> dict[str, Any]:
        """Return plain JSON, with null for NaN and infinity."""
        found: dict[str, Any] = plain(asdict(self))
        return found

    @property
    def is_wrong(self) -> bool:
        """False if the kernel is right, and only costs speed."""
        return self.cause not in COST_SPEED

    @property
    def place(self) -> str:
        """Place of the error, such as `transformer_blocks.3.attn, step 2, head 1`."""
        head = f", head {self.head}" if self.head is not None else ""
        return place_of(self.layer, self.step) + head


def place_of(layer: str, step: int | None) -> str:
    """Format a layer and step as `transformer_blocks.3.attn, step 2`."""
    return (layer or "no known layer") + (f", step {step}" if step is not None else "")


def diagnosed(call: str, kernel: str, origin: Origin, evidence: Evidence) -> Diagnosis:
    """Return the diagnosis of a call from evidence and the call's place in the model."""
    return Diagnosis(
        call,
        kernel,
        evidence.cause,
        origin.module,
        layer_index(origin.module),
        origin.step,
        None if evidence.place is None else evidence.place.head,
        evidence.sentence,
        evidence.numbers,
        REMEDIES[evidence.cause],
    )


def way_to_fail(diagnosis: Diagnosis) -> tuple[str, str, str]:
    """Return what calls that fail alike share: kernel, cause, and sentence without numbers."""
    return diagnosis.kernel, diagnosis.cause, without_numbers(diagnosis.sentence)


def layer_index(module: str) -> int | None:
    """Return the first number in a module's path: 3 in `transformer.transformer_blocks.3.attn1`."""
    found = re.search(r"(?:^|\.)(\d+)(?:\.|$)", module)
    return None if found is None else int(found[1])
