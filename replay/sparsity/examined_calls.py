"""Examination of recorded calls for block-sparse attention, and the file that keeps its results."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import torch

from capture.call.attention_call import AttentionCall
from capture.storage.json_data import parsed
from replay.distribution.time_limit import TimeLimit
from replay.end_to_end.run_pace import RunPace
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

    def has(self, name: str) -> bool:
        """Return True if a call was examined or left out, and False if there was no time for it."""
        return name in self.calls or name in self.left_out

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
    workloads: Sequence[Workload],
    kernel: SparseKernel,
    settings: Sequence[Setting],
    own: Mapping[str, str],
    device: torch.device,
    progress: RunPace,
    limit: TimeLimit,
    found: Examination,
) -> None:
    """Examine recorded calls. The kernel is timed once for the calls of one form.

    Args:
        own: kernel that the model itself ran, by call; calls without one are not examined.
        progress: receives each stage.
        limit: time after which no call is begun; `Examination.has` tells which calls were left.
        found: receives the results; its calls are not examined again.
    """
    paces: dict[object, Pace | str | None] = {}
    policies = [setting.policy for setting in settings]

    def reason_without(workload: Workload) -> str | None:
        """Examine a call; return the reason if sparse attention is of no use there."""
        call = workload.load_to_judge(device)
        if (reason := kernel.refuses(call)) is not None:
            return reason
        rows, keys = kernel.block_sizes(call)
        name = own[workload.name]
        form = call.shape, call.dtype, call.is_causal, name
        if form not in paces:
            progress.enter(f"{kernel.name} on {workload.name}")
            paces[form] = _paced(kernel, call, name, keys, limit)
        pace = paces[form]
        if not isinstance(pace, Pace):
            return pace
        progress.enter(f"errors of heads on {workload.name}")
        try:
            errors = head_errors(call, policies, rows, keys)
        except ValueError as error:
            return str(error)
        found.calls[workload.name] = ExaminedCall(errors, pace)
        return None

    waiting = [each for each in workloads if each.name in own and not found.has(each.name)]
    progress.expect(Counter({"call": len(waiting)}))
    with torch.no_grad():
        for workload in waiting:
            if limit.left:
                with progress.running("call"):
                    if (reason := reason_without(workload)) is not None:
                        found.left_out[workload.name] = reason


def _paced(
    kernel: SparseKernel, call: AttentionCall, own: str, keys: int, limit: TimeLimit
) -> Pace | str | None:
    """Time a kernel; return a reason if it helps no call of this form, or None without time."""
    try:
        pace = kernel.pace(call, kernel.name, own, keys, limit)
    except TimeoutError:
        return None
    except Exception as error:
        return classify(error)[1]
    if pace.ratio(0.0) >= 1:
        return "the model's own attention is faster than any share of the blocks"
    return pace
