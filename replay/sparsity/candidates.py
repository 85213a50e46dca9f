"""Block-sparse kernels that a plan may choose at its cells, with a share for each head.

The errors of heads add up to that of a call, because each head writes other elements of the output.
So do their times, as far as these are in proportion to the visited blocks. The best shares of a
cell's heads are therefore a knapsack of their own, whose choices the plan's knapsack has to choose
from (`replay.plan.choose`).
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from statistics import fmean

from replay.plan.cells import Cell, Cost, cost_of
from replay.plan.knapsack import Option, joint_choices
from replay.plan.plan import METRICS, Budget, Worst
from replay.sparsity.block_errors import HeadErrors, Sums
from replay.sparsity.pace import Pace
from replay.sparsity.sensitivity import Sensitivity
from replay.sparsity.settings import DENSE, Setting, named, shares_of

LEAST_SAVED = 0.03
"""Smallest share of a cell's time that a candidate saves."""


@dataclass(frozen=True)
class ExaminedCall:
    """Errors of a recorded call's heads with each setting, and the kernel's time on the call."""

    errors: HeadErrors
    pace: Pace
    sensitivities: Mapping[int, Sensitivity] = field(default_factory=dict)
    """Sensitivity of the model's output by head; a head without one has the sensitivity 1."""

    @property
    def heads(self) -> int:
        return len(self.errors.sums[0])

    def sums(self, setting: int | None, head: int) -> Sums:
        """Return the sums of a head with a setting; None for a dense head."""
        found = self.errors.sums[setting or 0][head]
        if setting is not None:
            return found
        return Sums(found.exact, found.exact, found.exact, found.size, 0.0, 0.0)

    def density(self, setting: int | None, head: int) -> float:
        return 1.0 if setting is None else self.errors.density[setting][head]

    def energy(self, setting: int | None, head: int) -> float:
        """Return the head's part of `replay.plan.cells.error_energy`, times its sensitivity."""
        elements = self.heads * self.errors.elements
        squared = self.sums(setting, head).squared
        energy = squared * elements / self._size**2 if squared else 0.0
        found = self.sensitivities.get(head)
        return energy if found is None else energy * found.at(energy)

    @cached_property
    def _size(self) -> float:
        return math.fsum(each.size for each in self.errors.sums[0])

    def worst(self, chosen: Sequence[int | None]) -> Worst:
        """Return the errors of the call with a setting for each head."""
        parts = [self.sums(setting, head) for head, setting in enumerate(chosen)]
        total = Sums(*(math.fsum(each) for each in zip(*parts, strict=True)))
        length = math.sqrt(total.output * total.exact)
        return Worst(
            cosine=min(total.product / length, 1.0) if length else 1.0,
            relative_l1=total.absolute / total.size if total.size else 0.0,
            rmse=math.sqrt(total.squared / (len(parts) * self.errors.elements)),
        )


class SparseCandidates:
    """Candidates for the cells of a plan (`replay.plan.choose.MoreKernels`).

    Args:
        kernel: name of the kernel without options.
        settings: settings in the order of the examined calls' errors.
        calls: examined calls by name. Cells with other calls have no candidates.
    """

    def __init__(
        self, kernel: str, settings: Sequence[Setting], calls: Mapping[str, ExaminedCall]
    ) -> None:
        self.kernel, self.settings = kernel, settings
        self.calls = dict(calls)
        self._index: dict[tuple[str, float], int | None] = {
            setting: index for index, setting in enumerate(settings)
        }
        self._index |= {(setting.rule, DENSE): None for setting in settings}

    @property
    def largest_error(self) -> float:
        """Relative L1 error that no candidate exceeds at any call."""
        return max(
            (
                math.fsum(max(each.absolute for each in head) for head in zip(*sums, strict=True))
                / size
                for sums in (call.errors.sums for call in self.calls.values())
                if (size := math.fsum(each.size for each in sums[0]))
            ),
            default=0.0,
        )

    def kernels(self, cell: Cell) -> list[str]:
        """Return the names of the candidates at a cell, from the most exact to the fastest."""
        calls = self._calls(cell)
        found: dict[str, tuple[float, float]] = {}
        for rule in dict.fromkeys(setting.rule for setting in self.settings) if calls else ():
            shares = [share for each, share in self._index if each == rule]
            heads = [
                [self._option(calls, self._index[rule, share], head) for share in shares]
                for head in range(calls[0].heads)
            ]
            for choice in joint_choices(heads):
                energy, density = (
                    math.fsum(
                        getattr(head[at], name) for head, at in zip(heads, choice, strict=True)
                    )
                    for name in ("energy", "ms")
                )
                is_dense = density >= len(heads)
                if not is_dense and _ratio(calls, density / len(heads)) <= 1 - LEAST_SAVED:
                    name = named(self.kernel, rule, [shares[at] for at in choice])
                    found[name] = energy, density
        best, fastest = [], math.inf
        for name, (_, density) in sorted(found.items(), key=lambda each: each[1]):
            if density < fastest:
                best.append(name)
                fastest = density
        return best

    def cost(self, cell: Cell, kernel: str, budget: Budget) -> Cost | None:
        """Return the predicted time and the error of a candidate.

        The result is None for other kernels, and where the model's own attention has no time.
        """
        if not kernel.startswith(f"{self.kernel}["):
            return None
        own = cost_of(cell, cell.baseline, budget)
        if own.total_ms is None or own.choice.time_ms is None:
            return None
        calls = self._calls(cell)
        rule, shares = shares_of(kernel, calls[0].heads)
        chosen = [self._index[rule, share] for share in shares]
        density = fmean(
            call.density(setting, head) for call in calls for head, setting in enumerate(chosen)
        )
        ratio = _ratio(calls, density)
        total_ms = own.total_ms * ratio
        worst = [call.worst(chosen) for call in calls]
        worst_of = {
            metric: max((each.of(metric) for each in worst), key=Budget(metric, 0.0).badness)
            for metric in METRICS
        }
        energy = fmean(
            math.fsum(call.energy(setting, head) for head, setting in enumerate(chosen))
            for call in calls
        )
        choice = replace(
            own.choice,
            kernel=kernel,
            inside=budget.holds(worst_of[budget.metric]),
            worst=Worst(**worst_of),
            time_ms=own.choice.time_ms * ratio,
            saved_ms=own.total_ms - total_ms,
        )
        # The kernel rounds as the model's own attention does, besides leaving blocks out.
        rounding = own.energy * self.scale(cell) if math.isfinite(own.energy) else 0.0
        energy = choice.calls * energy + rounding
        return Cost(choice, "ok", (), choice.saved_ms, total_ms, energy)

    def scale(self, cell: Cell) -> float:
        """Return the sensitivity at a cell, or else that of all cells, for other kernels."""
        calls = self._calls(cell)
        found = [each.mean for call in calls for each in call.sensitivities.values()]
        found = found or self._sensitivities
        return math.exp(fmean(map(math.log, found))) if found else 1.0

    @cached_property
    def _sensitivities(self) -> list[float]:
        calls = self.calls.values()
        return [each.mean for call in calls for each in call.sensitivities.values()]

    def heads(self, cell: Cell) -> int:
        """Return the number of heads at a cell; 0 if it has no candidates."""
        return self._calls(cell)[0].heads if self._calls(cell) else 0

    def energy(self, call: str, rule: str, share: float, head: int) -> float:
        """Return the error energy of a head in a call."""
        return self.calls[call].energy(self._index[rule, share], head)

    def with_sensitivities(self, found: Mapping[tuple[str, int], Sensitivity]) -> SparseCandidates:
        """Return candidates with sensitivities by call and head."""
        calls = {
            name: replace(
                call,
                sensitivities={
                    head: found[name, head] for head in range(call.heads) if (name, head) in found
                },
            )
            for name, call in self.calls.items()
        }
        return SparseCandidates(self.kernel, self.settings, calls)

    def _calls(self, cell: Cell) -> list[ExaminedCall]:
        """Return the examined calls of a cell; none if any of its calls was not examined."""
        if any(name not in self.calls for name in cell.captured):
            return []
        return [self.calls[name] for name in cell.captured]

    def _option(self, calls: Iterable[ExaminedCall], setting: int | None, head: int) -> Option:
        """Return a head's option, whose time is its density."""
        density, energy = (
            fmean(getattr(call, name)(setting, head) for call in calls)
            for name in ("density", "energy")
        )
        return Option("", density, energy)


def _ratio(calls: Sequence[ExaminedCall], density: float) -> float:
    """Return the time at a density over that of the model's own attention."""
    return fmean(call.pace.ratio(density) for call in calls)
