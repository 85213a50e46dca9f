"""The settings of a replay, from the user and from a worker's parent."""

from __future__ import annotations

import math
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, get_args

import torch

from attention_replay.errors import Error
from capture.text.limits import natural, positive
from replay.accuracy.thresholds import Thresholds
from replay.kernels.registry import Kernel
from replay.rows.row import HERE
from replay.timing.defaults import ROUNDS, SECONDS
from replay.timing.timer import Cache


class SettingsError(Error):
    """Error for invalid settings of a replay; the message names valid ones."""


@dataclass(frozen=True)
class Settings:
    """The user's settings of a replay.

    Raises:
        SettingsError: a field has an invalid value.
    """

    device: torch.device
    """Device, which may be given by name."""
    cache: Cache
    rounds: int = ROUNDS
    max_seconds: float = SECONDS
    """Time limit for the samples of one kernel on one call; a slow kernel gets fewer rounds."""
    calls_before: int = 0
    """Number of untimed calls of the kernel before each sample, like a model's other layers."""
    seed: int = 0
    baseline: str | None = None
    """Baseline of speed-ups; None for the kernel that the model called (`runner._baseline`)."""
    errors_against: str = "reference"
    """Output that errors are computed against: `reference`, `captured` or a kernel's name."""
    compare_stats: bool = False
    save_output: Path | None = None
    """Directory for outputs; None to save none."""
    for_model: bool = False
    """Measure kernels as a model would call them: a kernel that takes a mask always gets the mask,
    even if it prefers options."""
    energy: bool = False
    """Also measure the energy of a call, which takes a second or two for each kernel."""
    roofline: bool = False
    """Measure the device's peak throughput for each dtype."""
    backward: bool = False
    """Also differentiate every kernel: judge the gradients, and time the backward pass."""
    resources: bool = False
    """Record the registers and shared memory of Triton programs."""
    tolerances: Thresholds = field(default_factory=Thresholds)
    """Thresholds that outputs are judged by."""

    def __post_init__(self) -> None:
        try:
            device = torch.device(self.device)
            positive("rounds", self.rounds)
            natural("calls_before", self.calls_before)
            natural("seed", self.seed)
        except (ValueError, TypeError, RuntimeError) as error:
            raise SettingsError(str(error).partition("\n")[0]) from error
        if self.cache not in get_args(Cache):
            raise SettingsError(f"cache must be cold or warm, not {self.cache!r}")
        if device.type == "cpu" and self.cache == "cold":
            raise SettingsError("a cold cache requires a GPU: give cache='warm'")
        if not (type(self.max_seconds) in (int, float) and 0 < self.max_seconds < math.inf):
            raise SettingsError(
                f"max_seconds must be a number greater than 0, not {self.max_seconds!r}"
            )
        object.__setattr__(self, "device", device)
        if self.save_output is not None:
            object.__setattr__(self, "save_output", Path(self.save_output))

    @property
    def compared_kernel(self) -> str | None:
        """Kernel that `errors_against` names; None if it names no kernel."""
        return None if self.errors_against in ("reference", "captured") else self.errors_against

    def to_json(self) -> dict[str, Any]:
        """Return plain JSON for a worker."""
        save_output = None if self.save_output is None else str(self.save_output.resolve())
        return {
            **vars(self),
            "device": str(self.device),
            "save_output": save_output,
            "tolerances": asdict(self.tolerances),
        }

    @classmethod
    def from_json(cls, data: dict[str, Any]) -> Settings:
        save_output = None if data["save_output"] is None else Path(data["save_output"])
        device = torch.device(data["device"])
        tolerances = Thresholds.from_tables(data["tolerances"])
        return cls(
            **{**data, "device": device, "save_output": save_output, "tolerances": tolerances}
        )


@dataclass(frozen=True)
class WorkerOptions:
    """Settings of a worker from its parent; the defaults are for a replay without workers."""

    in_worker: bool = False
    """True if this process only runs kernels, and its parent keeps their stdout and stderr."""
    environment: str = HERE
    process: str = ""
    """File, package or kernel that this worker belongs to; empty for the worker of known
    kernels."""
    rounds: str = ""
    """Name of the rounds that this process shares with others, for the rows."""
    synchronous: bool = False
    """Wait for each sample before the next begins, so that a crash can be traced to a kernel."""
    excluded: tuple[str, ...] = ()
    """Kernels that must not run, not even as the baseline."""
    control: str = ""
    """Known kernel to time beside the kernels of this process, or empty."""
    shared_file: int | None = None
    """Descriptor of the file that passes outputs to a judge in another process; None to judge in
    this process."""

    def has(self, kernel: Kernel) -> bool:
        """Return whether a baseline, or the kernel that errors are relative to, runs here."""
        if kernel.name in self.excluded:
            return False
        here = self.environment == HERE and self.process == kernel.process
        return here or not self.in_worker

    def to_json(self) -> dict[str, Any]:
        """Return plain JSON for a worker."""
        return asdict(self)

    @classmethod
    def from_json(cls, data: dict[str, Any]) -> WorkerOptions:
        return cls(**{**data, "excluded": tuple(data["excluded"])})
