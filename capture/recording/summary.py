"""Accounts for every attention call of a recording, and names the first NaN, in one sentence."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from typing import NamedTuple

from capture.hooks.census import Census
from capture.hooks.missed_attention import MissedAttention
from capture.hooks.phases import RECOMPUTE
from capture.recording.context import RecordingContext
from capture.recording.seen_calls import is_selected
from capture.storage.nonfinite_values import NonfiniteValues


class Summary(NamedTuple):
    """Numbers of a recording's calls, by what became of them.

    Eligible calls are of the selected modules and phase, and can be stored.
    """

    kept: Counter[str]
    """Stored calls, by component of the pipeline; empty for a single model."""
    eligible: Counter[str]
    refused: Counter[str]
    """Calls of the selected modules and phase that cannot be stored, by reason."""
    others: Counter[str]
    """Other calls, by component."""
    missed: Sequence[MissedAttention]
    nonfinite: NonfiniteValues | None
    without_gradients: int

    @classmethod
    def of(
        cls,
        context: RecordingContext,
        census: Census,
        missed: Sequence[MissedAttention],
        nonfinite: NonfiniteValues | None,
    ) -> Summary:
        kept, eligible, refused, others = (Counter[str]() for _ in range(4))
        for (module, phase, signature), count in census.items():
            component = context.tracker.component(module)
            if phase == RECOMPUTE:
                others[f"{component} ({phase})".strip()] += count.calls
            elif not is_selected(context.capture, module, phase):
                others[component or "other modules or phases"] += count.calls
            elif signature.refusal:
                refused[signature.refusal] += count.calls
            else:
                eligible[component] += count.calls
                kept[component] += count.kept
        if context.counts.traced:
            refused["while the model was traced"] += context.counts.traced
        without_gradients = context.counts.without_gradients
        return cls(kept, eligible, refused, others, missed, nonfinite, without_gradients)

    @property
    def has_findings(self) -> bool:
        """True if calls were refused or missed, or lack gradients, or if values were not finite."""
        return bool(self.refused or self.missed or self.nonfinite or self.without_gradients)

    def __str__(self) -> str:
        kept = (
            f"{component}{': ' if component else ''}{self.kept[component]} of {count}"
            for component, count in self.eligible.items()
        )
        parts = [f"kept of the eligible calls: {', '.join(kept) or 'none'}"]
        if self.without_gradients:
            parts.append(f"without gradients: {self.without_gradients}")
            if self.without_gradients == self.kept.total():
                parts[-1] += (
                    " (none came back: run the model in `with torch.enable_grad():`, and call "
                    "`backward()` before the recording ends)"
                )
        if self.refused:
            reasons = (f"{count} ({reason})" for reason, count in self.refused.items())
            parts.append(f"refused: {', '.join(reasons)}")
        if self.others:
            others = (f"{name} {count}" for name, count in self.others.items())
            parts.append(f"not sampled: {', '.join(others)}")
        if self.missed:
            parts.append(f"missed, and not in the census: {', '.join(map(str, self.missed))}")
        if self.nonfinite:
            parts.append(str(self.nonfinite))
        return "; ".join(parts)
