"""Exported plan: the text to load, and what the target cannot express."""

from __future__ import annotations

from dataclasses import dataclass, field

from capture.text.counted import counted
from capture.text.printable import printable


@dataclass(frozen=True)
class Loss:
    """Part of a plan that a target cannot express, with its cost."""

    reason: str
    planned: str
    """Kernel of the plan."""
    used: str
    """Kernel that runs in its place."""
    modules: tuple[str, ...]
    lost_ms: float
    """Time that the plan saves per run and the export does not; negative if the export saves more.
    """
    error: str
    """Known limit of the used kernel's error, in words."""

    def __str__(self) -> str:
        where = printable(self.modules[0]) + (" …" if len(self.modules) > 1 else "")
        return (
            f"{counted(len(self.modules), 'module')} ({where}): {printable(self.used)}, not "
            f"{printable(self.planned)}, because {printable(self.reason)}; "
            f"costs {self.lost_ms:.4g} ms per run; error: {self.error}"
        )


@dataclass(frozen=True)
class Exported:
    """Plan in the form of a target. Its string is a summary of what is lost."""

    target: str
    text: str
    planned_ms: float
    """Time that the plan saves per run, as predicted by the plan."""
    losses: list[Loss] = field(default_factory=list)
    device: str = ""
    """Type of device on which the plan was made, where alone its times hold; empty if unknown."""
    needs: str = ""
    """Version of the target that the text needs; empty for any."""

    @property
    def saved_ms(self) -> float:
        """Return the part of the plan's saved time that remains."""
        return self.planned_ms - sum(loss.lost_ms for loss in self.losses)

    def __str__(self) -> str:
        if not (self.planned_ms or self.losses):
            return (
                f"{self.target}: the plan changes nothing: it names no kernel but the model's own"
            )
        is_nothing = abs(self.saved_ms) < 1e-9 * abs(self.planned_ms)  # a remainder of rounding
        saved = "nothing" if is_nothing else f"{self.saved_ms:.4g}"
        head = f"{self.target}: saves {saved} of the plan's {self.planned_ms:.4g} ms"
        where = f" on {printable(self.device)}" if self.device else ""
        needs = f"; needs {self.needs}" if self.needs else ""
        return "\n".join([f"{head} per run{where}{needs}", *(f"- {loss}" for loss in self.losses)])
