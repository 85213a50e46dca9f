"""Examination of recorded calls for block-sparse attention, and the file that keeps its results."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import torch

from capture.storage.json_data import parsed
from replay.kernels.failures import classify
from replay.rows.replacement import replacing
from replay.sparsity.block_errors import HeadErrors, Sums, head_errors
from replay.sparsity.candidates import ExaminedCall
from replay.sparsity.kernel import SparseKernel
from replay.sparsity.pace import Pace
from replay.sparsity.settings import Setting
from replay.workloads.workload import Workload


@dataclass
class Examination:
    """Examined calls by name, and the reasons why others were not examined."""

    calls: dict[str, ExaminedCall] = field(default_factory=dict)
    left_out: dict[str, str] = field(default_factory=dict)

    def save(self, path: Path) -> None:
        """Write the examination as JSON, in one step.

        Raises:
            OSError: the file cannot be written.
        """
        data = {
            "left_out": self.left_out,
            "calls": {
                name: {"pace": call.pace, **vars(call.errors)} for name, call in self.calls.items()
            },
        }
        with replacing(path) as file:
            file.write(json.dumps(data))

    @classmethod
    def load(cls, path: Path) -> Examination:
        """Read an examination that `save` wrote.

        Raises:
            FileNotFoundError: there is no file.
        """
        data = parsed(path.read_text(encoding="utf-8"))
        calls = {}
        for name, each in data["calls"].items():
            pace = Pace(*each.pop("pace"))
            sums = [[Sums(*head) for head in policy] for policy in each.pop("sums")]
            calls[name] = ExaminedCall(HeadErrors(sums, **each), pace)
        return cls(calls, data["left_out"])


def examine(
    workloads: Iterable[Workload],
    kernel: SparseKernel,
    settings: Sequence[Setting],
    own: Mapping[str, str],
    device: torch.device,
    around: Callable[[str, Callable[[], None]], None],
) -> Examination:
    """Examine recorded calls. The kernel is timed once for the calls of one form.

    Args:
        own: kernel that the model itself ran, by call; calls without one are not examined.
        around: function that shows the progress of a call's examination, and runs it.
    """
    found = Examination()
    paces: dict[object, Pace | str] = {}
    policies = [setting.policy for setting in settings]

    def examined(workload: Workload) -> None:
        call = workload.load_to_judge(device)
        if (reason := kernel.refuses(call)) is not None:
            found.left_out[workload.name] = reason
            return
        rows, keys = kernel.block_sizes(call)
        name = own[workload.name]
        form = call.shape, call.dtype, call.is_causal, name
        if form not in paces:
            try:
                paces[form] = kernel.pace(call, kernel.name, name, keys)
            except Exception as error:
                paces[form] = classify(error)[1]
        pace = paces[form]
        if isinstance(pace, str):
            found.left_out[workload.name] = pace
            return
        try:
            errors = head_errors(call, policies, rows, keys)
        except ValueError as error:
            found.left_out[workload.name] = str(error)
            return
        found.calls[workload.name] = ExaminedCall(errors, pace)

    with torch.no_grad():
        for workload in workloads:
            if workload.name in own:
                around(workload.name, lambda workload=workload: examined(workload))  # type: ignore[misc]
    return found
