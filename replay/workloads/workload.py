"""Workloads of a replay: named calls that are loaded one at a time."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch

from capture.call.attention_call import AttentionCall
from capture.errors import DatasetError
from replay.workloads.random_calls import Spec
from replay.workloads.sources import CounterpartSource, RandomSource, Source
from replay.workloads.synthetic_counterparts import KINDS


@dataclass(frozen=True)
class Workload:
    """Named call to replay."""

    name: str
    source: Source
    on: str = ""
    """Type of device to replay the call on; empty if all calls use the same type."""

    @classmethod
    def of(cls, source: Source) -> Workload:
        """Make a workload with the name of its source."""
        return cls(source.name, source)

    @property
    def label(self) -> str:
        """Name that is unique among the workloads of a replay."""
        return f"{self.name} on {self.on}" if self.on else self.name

    def load(self, device: torch.device) -> AttentionCall:
        """Load the call.

        Raises:
            DatasetError: the call cannot be read.
        """
        return self.source.load(device).without_gradients()

    def load_to_judge(self, device: torch.device, *, backward: bool = False) -> AttentionCall:
        """Load the call for a comparison of kernels' outputs with a reference.

        Args:
            backward: keep the recorded `grad_output`, if there is one.

        Raises:
            DatasetError: the call cannot be read, or its output is empty and cannot be judged.
        """
        loaded = self.source.load(device)
        call = loaded.without_gradients()
        if backward:
            call = replace(call, grad_output=loaded.grad_output)
        if not call.query.numel():
            sizes = "×".join(map(str, call.query.shape))
            raise DatasetError(f"a query of {sizes} has no output that could be judged", self.name)
        return call


def random_workload(name: str, model: str, spec: Spec, seed: int) -> Workload:
    """Make a workload for one synthetic call; `model` is the name of its suite, or `random`."""
    return Workload.of(RandomSource(name, model, spec, seed))


def random_workloads(name: str, specs: Sequence[Spec], seed: int) -> list[Workload]:
    """Make a workload for each spec, with consecutive seeds."""
    return [
        random_workload(f"{name}-{number:02d}", name, spec, seed + number)
        for number, spec in enumerate(specs)
    ]


def with_counterparts(recorded: Sequence[Workload], seed: int) -> list[Workload]:
    """Return recorded calls, each followed by its synthetic counterpart of each kind."""
    found = []
    for number, workload in enumerate(recorded):
        found.append(workload)
        for kind in KINDS:
            found.append(Workload.of(CounterpartSource(workload.source, kind, seed + number)))
    return found
