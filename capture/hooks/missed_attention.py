"""Reports attention that no entry point has seen, so that the report of a census is complete."""

from __future__ import annotations

from dataclasses import dataclass

from capture.hooks.modules import ModuleTracker
from capture.hooks.sampled_step import FUSED_ENCODER, SampledStep
from capture.text.counted import counted


@dataclass(frozen=True)
class MissedAttention:
    """Attention of one class of modules that was computed outside all entry points."""

    kind: str
    """Class of the modules whose attention was missed."""
    forwards: int
    """Number of attention computations: those in one forward pass, times the forward passes."""
    modules: int
    example: str
    """Path of one of the modules."""

    def __str__(self) -> str:
        text = f"{counted(self.forwards, 'run')} of {counted(self.modules, 'module')}"
        if self.example == self.kind:  # the outermost module, whose name is its class
            return f"{text} of class {self.kind}"
        return f"{text} of class {self.kind} (such as {self.example})"


def find_missed_attention(tracker: ModuleTracker, sampled: SampledStep) -> list[MissedAttention]:
    """Return the attention that no entry point has seen so far, by class."""
    watched = {each.path: each for each in tracker.watched}
    found: dict[str, list[tuple[str, int]]] = {}
    for (path, followed, operator), computations in [*sampled.found.items()]:
        if (each := watched.get(path)) is not None:
            # A module that TorchScript compiled has the name of its class as `original_name`.
            kind = str(getattr(each.module, "original_name", type(each.module).__name__))
            kind = "TransformerEncoderLayer" if operator == FUSED_ENCODER else kind
            runs = round(computations * max(watched[followed].forwards, 1))
            found.setdefault(kind, []).append((path, runs))
    return [
        MissedAttention(kind, sum(runs for _, runs in paths), len(paths), paths[0][0])
        for kind, paths in found.items()
    ]
