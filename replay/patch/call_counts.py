"""Counts of a model's attention calls, by kernel, entry point and outcome."""

from __future__ import annotations

import warnings
from bisect import bisect_right
from collections import Counter, defaultdict
from collections.abc import Sequence
from dataclasses import dataclass, field

from capture.text.counted import counted
from replay.kernels.kernel_names import shortened
from replay.patch.planned_modules import NOT_PLANNED
from replay.plan.key_lengths import MOST_KEYS, KeyLengths
from replay.plan.step_ranges import StepRange


@dataclass
class CallCounts:
    """Counts of the calls routed to one kernel."""

    hits: int = 0
    """Calls that the kernel handled."""
    fallbacks: Counter[str] = field(default_factory=Counter)
    """Calls that fell back to the model's own attention, by reason."""
    layout_copies: int = 0
    """Outputs that had to be copied into the query's memory layout: by the operator in a compiled
    model, otherwise by the model's own reshape after attention."""

    def __add__(self, other: CallCounts) -> CallCounts:
        copies = self.layout_copies + other.layout_copies
        return CallCounts(self.hits + other.hits, self.fallbacks + other.fallbacks, copies)

    def __str__(self) -> str:
        """Format as `90 calls, 48 fell back (48 × takes no mask), 90 layout copies`."""
        text = counted(self.hits, "call")
        if self.fallbacks:
            reasons = ", ".join(f"{count} × {reason}" for reason, count in self.fallbacks.items())
            text += f", {self.fallbacks.total()} fell back ({reasons})"
        return text + (f", {self.layout_copies} layout copies" if self.layout_copies else "")


@dataclass
class Swap:
    """Counts of all calls while kernels were in use."""

    kernels: dict[str, CallCounts]
    """Counts by kernel name."""
    entry_points: defaultdict[str, CallCounts] = field(
        default_factory=lambda: defaultdict(CallCounts)
    )
    """Counts of the same calls by entry point, such as `sdpa` or `transformers`."""
    in_graphs: Counter[str] = field(default_factory=Counter)
    """Functions other than SDPA that compiled graphs call directly, counted once per graph."""
    not_planned: int = 0
    """Calls outside the plan, module or thread, which the model's own attention handled."""
    outside: str = NOT_PLANNED
    """Reason of these calls: `not in the plan`, `not in the module` or `in another thread`."""
    missing: list[str] = field(default_factory=list)
    """Modules that the plan names but the model does not have."""
    planned_lengths: Sequence[KeyLengths] = ()
    """Key lengths that the plan was made for, shortest first; empty for any length."""
    other_lengths: KeyLengths | None = None
    """Range of the handled calls' key lengths that the plan was not made for."""
    with_other_lengths: int = 0
    """Number of these calls."""
    advice: str = "record such a run and plan again"
    """End of the warnings about other lengths and steps; empty for no warnings."""
    planned_steps: StepRange | None = None
    """Denoising steps that the plan was made for; None for any step."""
    other_steps: StepRange | None = None
    """Later steps, at which the model's own attention handled calls of planned modules."""
    at_other_steps: int = 0
    """Number of these calls."""

    @property
    def hits(self) -> int:
        return sum(tally.hits for tally in self.kernels.values())

    @property
    def fallbacks(self) -> Counter[str]:
        """Fallbacks of all kernels, and calls outside the plan, module or thread."""
        counts = Counter({self.outside: self.not_planned} if self.not_planned else {})
        for tally in self.kernels.values():
            counts += tally.fallbacks
        return counts

    def count_length(self, kv_len: int) -> None:
        """Count a handled call with a length outside `planned_lengths`; warn of the first."""
        index = bisect_right(self.planned_lengths, (kv_len, MOST_KEYS)) - 1
        if index >= 0 and kv_len <= self.planned_lengths[index].high:
            return
        before = self.other_lengths
        low, high = before or (kv_len, kv_len)
        self.other_lengths = KeyLengths(min(low, kv_len), max(high, kv_len))
        self.with_other_lengths += 1
        if before is None:
            self._warn(
                f"a call has {self.other_lengths}, for which the plan was not made, and runs the "
                "kernel of the nearest length"
            )

    def count_step(self, step: int) -> None:
        """Count a call of a planned module after the last step that the plan names; warn of the
        first."""
        if self.planned_steps is None or step <= self.planned_steps.last:
            return
        before = self.other_steps
        first, last = before or (step, step)
        self.other_steps = StepRange(min(first, step), max(last, step))
        self.at_other_steps += 1
        if before is None:
            self._warn(
                f"a call at {self.other_steps} is after the last step that the plan was made for, "
                "and runs the model's own attention"
            )

    def _warn(self, sentence: str) -> None:
        if self.advice:
            warnings.warn(f"{sentence}: {self.advice}", stacklevel=4)

    @property
    def on_other_steps(self) -> str:
        """Sentence about calls at later steps."""
        calls = counted(self.at_other_steps, "call")
        return f"{calls} ran after the last step that the plan was made for ({self.other_steps})"

    @property
    def on_other_lengths(self) -> str:
        """Sentence about calls with other key lengths."""
        calls = counted(self.with_other_lengths, "call")
        return f"{calls} had key lengths that the plan was not made for ({self.other_lengths})"

    @property
    def layout_copies(self) -> int:
        return sum(tally.layout_copies for tally in self.kernels.values())

    def __str__(self) -> str:
        """Format one line per kernel: `sage1: 90 calls, 48 fell back (48 × takes no mask)`."""
        kernels: dict[str, CallCounts] = {}
        for name, tally in self.kernels.items():
            shown = shortened(name)
            kernels[shown] = kernels.get(shown, CallCounts()) + tally
        lines = [f"{name}: {tally}" for name, tally in kernels.items()]
        if self.not_planned:
            lines.append(f"{self.outside}: {counted(self.not_planned, 'call')}")
        if self.entry_points.keys() - {"sdpa"}:
            lines += [f"of these by {name}: {tally}" for name, tally in self.entry_points.items()]
        if self.in_graphs:
            calls = ", ".join(f"{count} × {name}" for name, count in self.in_graphs.items())
            lines.append(f"in compiled graphs, not answered: {calls}")
        if self.other_lengths is not None:
            lines.append(self.on_other_lengths)
        if self.other_steps is not None:
            lines.append(self.on_other_steps)
        if self.missing:
            lines.append(f"not in the model: {', '.join(self.missing)}")
        return "\n".join(lines)
