"""How a replay runs."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from replay.timing.timer import Cache


@dataclass(frozen=True)
class Settings:
    """How a replay runs."""

    device: torch.device
    cache: Cache
    rounds: int = 30
    max_seconds: float = 20.0
    """Time for the samples of one kernel on one call; a slow kernel gets fewer rounds."""
    calls_before: int = 0
    """Untimed calls of the same kernel before each sample, as a model's other layers make them."""
    seed: int = 0
    baseline: str | None = None
    """Kernel the speed-ups are against; None is the backend the model used."""
    reference: str = "gold"
    """`gold`, `captured` or a kernel: an output to compare with beside the first two."""
    compare_stats: bool = False
    save_output: Path | None = None
    resources: bool = False
    """Note the registers and shared memory of Triton programs."""
    synchronous: bool = False
    """Wait for every sample before the next, so that what kills the process is known by name."""
    in_worker: bool = False
    """Whether this process is for kernels only, and somebody keeps what they print."""
    excluded: tuple[str, ...] = ()
    """Kernels that must not run, not even as the baseline."""

    def to_json(self) -> dict[str, Any]:
        """Plain JSON for a worker."""
        save_output = None if self.save_output is None else str(self.save_output.resolve())
        return {**vars(self), "device": str(self.device), "save_output": save_output}

    @classmethod
    def from_json(cls, data: dict[str, Any]) -> Settings:
        save_output = data["save_output"]
        return cls(
            **{
                **data,
                "device": torch.device(data["device"]),
                "save_output": None if save_output is None else Path(save_output),
                "excluded": tuple(data["excluded"]),
            }
        )
