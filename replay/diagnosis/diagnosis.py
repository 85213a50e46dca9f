"""What the doctor says of a kernel on a call."""

from __future__ import annotations

import math
import re
from dataclasses import asdict, dataclass, field
from typing import Any

from capture.call.attention_call import Origin
from replay.diagnosis.subject import Cause, Evidence

REMEDIES: dict[str, str] = {
    "overflow": "one that accumulates QKᵀ and PV in float32 and keeps values in their own format",
    "k-outlier-channel": "one that subtracts the mean of the keys before it rounds them, or one "
    "of 16 bits",
    "mask-ignored": "one that takes the mask, or refuses it",
    "mask-misread": "one that reads the mask as SDPA does",
    "late-sink": "one that rescales its running sum whenever the maximum grows",
    "input-changed": "this one on copies of the tensors it changes, at the cost of the copies",
    "output-unwritten": "one that writes every row",
    "odd-length": "this one on inputs padded to the multiple, with a mask",
    "causal-alignment": "one aligned as the call is, or this one with the mask given in full",
    "stale-graph": "this one without its graph or cache, or with the inputs copied into the "
    "memory that was captured",
    "wrong-scale": "this one with the scale passed as the call has it",
    "head-mapping": "this one with the key heads repeated for each query head",
    "unknown": "",
}
"""What else to use, by cause."""


@dataclass(frozen=True)
class Diagnosis:
    """A kernel that is wrong on a call, where, and why."""

    call: str
    kernel: str
    cause: Cause
    layer: str
    """The dotted path of the module that made the call."""
    layer_index: int | None
    step: int | None
    head: int | None
    """The query head that is most wrong; None where the kernel returned nothing."""
    sentence: str
    evidence: dict[str, Any] = field(default_factory=dict)
    instead: str = ""

    def to_json(self) -> dict[str, Any]:
        """Plain JSON: a number that is not finite becomes null."""
        return {**asdict(self), "evidence": _plain(self.evidence)}

    @property
    def place(self) -> str:
        """`transformer_blocks.3.attn, step 2, head 1`."""
        parts = [self.layer or "no known layer"]
        parts += [f"step {self.step}"] if self.step is not None else []
        parts += [f"head {self.head}"] if self.head is not None else []
        return ", ".join(parts)


def diagnosed(call: str, kernel: str, origin: Origin, evidence: Evidence) -> Diagnosis:
    """The evidence with the call's place in the model."""
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
    )


def layer_index(module: str) -> int | None:
    """The first number in a module's path: 3 of `transformer.transformer_blocks.3.attn1`."""
    found = re.search(r"(?:^|\.)(\d+)(?:\.|$)", module)
    return None if found is None else int(found[1])


def _plain(value: Any) -> Any:
    if isinstance(value, dict):
        return {name: _plain(each) for name, each in value.items()}
    if isinstance(value, list | tuple):
        return [_plain(each) for each in value]
    if isinstance(value, float) and not math.isfinite(value):
        return None
    return value
