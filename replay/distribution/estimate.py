"""How long a replay will take, before it starts and while it runs."""

from __future__ import annotations

import json
import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch

from capture.call.shape import Shape
from replay.bench.settings import Settings
from replay.kernels.registry import Kernel
from replay.rows.row import Machine
from replay.timing.defaults import MINIMUM_ROUNDS
from replay.timing.machine import cpu_flops_per_second
from replay.timing.rounds import MAXIMUM_WARM_UP_MS, MINIMUM_WARM_UP_MS
from replay.workloads.call_metadata import CallMetadata
from replay.workloads.workload import Workload

RUNS_BESIDE_SAMPLES = 15
"""Of a kernel on a call: to check it, to warm up, to check it again."""
SECONDS_TO_NOTE = 30.0
"""Shorter work says little about longer."""
REFERENCE_RUNS = 5
"""What the reference costs, in runs of a kernel at the rate for it."""


@dataclass(frozen=True)
class Rates:
    """What a device does in a second, roughly: what is wrong with it the history puts right."""

    flops: float
    """Floating-point operations of a kernel."""
    reference_flops: float
    """Of the reference, in float64."""
    sample_seconds: float
    """Beside the call itself, for each sample."""
    kernel_seconds: float
    """For each kernel on a call, however small."""

    @classmethod
    def of(cls, device: torch.device) -> Rates:
        if device.type == "cuda":
            return cls(3e14, 1e14, 5e-4, 0.3)
        measured = cpu_flops_per_second()
        # The default kernels together reach half of what products do; float64 is half as fast.
        return cls(measured / 2, measured / 2, 1e-4, 0.3)


def expected_seconds(
    calls: Sequence[Workload],
    assigned: Mapping[str, Sequence[Kernel]],
    settings: Settings,
    rates: Rates,
) -> dict[str, float]:
    """Seconds that each call may take with all its kernels, by label; compiling is left out.

    A call whose sizes are not known counts as the mean of those that are.
    """
    kernels = sum(len(those) for those in assigned.values())
    metadata = {call.label: call.source.metadata() for call in calls}
    found = {
        name: call_seconds(flops(facts), kernels, settings, rates)
        for name, facts in metadata.items()
        if facts.shape is not None
    }
    mean = sum(found.values()) / len(found) if found else 1.0
    return {name: found.get(name, mean) for name in metadata}


def flops(metadata: CallMetadata) -> float:
    """Return the operations of a call; of masks, only the causal one is counted."""
    shape = metadata.shape or Shape(0, 0, 0, 0, 0, 0, 0)
    pairs = shape.batch * shape.q_heads * shape.q_len * shape.kv_len
    return 2 * pairs * (shape.head_dim + shape.v_head_dim) / (2 if metadata.is_causal else 1)


def call_seconds(flops: float, kernels: int, settings: Settings, rates: Rates) -> float:
    """Seconds that a call of so many operations takes with so many kernels."""
    run = flops / rates.flops + 1e-5
    sample = run * (1 + settings.calls_before) + rates.sample_seconds
    rounds = min(settings.rounds, max(settings.max_seconds / sample, MINIMUM_ROUNDS))
    warm_up = min(max(MINIMUM_WARM_UP_MS / 1e3, 3 * run), MAXIMUM_WARM_UP_MS / 1e3)
    beside = RUNS_BESIDE_SAMPLES * run + warm_up + rates.kernel_seconds
    reference = REFERENCE_RUNS * flops / rates.reference_flops + rates.kernel_seconds
    return reference + kernels * (rounds * sample + beside)


def together(seconds: Sequence[float], at_a_time: int) -> float:
    """How long calls take of which so many are at work together."""
    return max(sum(seconds) / at_a_time, max(seconds, default=0.0))


class History:
    """How earlier replays on machines went: seconds taken by seconds expected.

    It lies in `$XDG_STATE_HOME/attention-replay/pace.json` (by default in `~/.local/state`). One
    that cannot be read or written is none.
    """

    def __init__(self) -> None:
        state = os.environ.get("XDG_STATE_HOME") or Path.home() / ".local" / "state"
        self._path = Path(state) / "attention-replay" / "pace.json"

    def scale(self, machines: Sequence[Machine]) -> float | None:
        """That of the last replay on such machines; None without one."""
        found = self._all().get(_key(machines))
        return float(found) if isinstance(found, int | float) and found > 0 else None

    def note(self, machines: Sequence[Machine], scale: float, seconds: float) -> None:
        """Keep that of a replay which took so many seconds."""
        if seconds < SECONDS_TO_NOTE:
            return
        found = {**self._all(), _key(machines): scale}
        try:
            self._path.parent.mkdir(parents=True, exist_ok=True)
            temporary = self._path.with_suffix(f".{os.getpid()}.tmp")
            temporary.write_text(json.dumps(found, indent=1), "utf-8")
            os.replace(temporary, self._path)
        except OSError:
            return

    def _all(self) -> dict[str, object]:
        try:
            found = json.loads(self._path.read_text("utf-8"))
        except (OSError, ValueError):
            return {}
        return found if isinstance(found, dict) else {}


def _key(machines: Sequence[Machine]) -> str:
    return " and ".join(
        f"{each.device}, {each.threads} threads" if each.threads else each.device
        for each in machines
    )
