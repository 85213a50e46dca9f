"""Error that a sketch foretold for a kernel or a plan, as checks store it. Imports no torch."""

from __future__ import annotations

from dataclasses import dataclass, field


@dataclass(frozen=True)
class ForetoldDrift:
    """Foretold error of the final output; figures are those of `replay.sketches.sketch`."""

    error: float
    measure: str
    """`relative_l2`, or `kl` for √KL."""
    margin_db: float = 0.0
    """Standard error in dB."""
    psnr: float | None = None
    """PSNR in dB; None if it is unknown or infinite."""
    by_module: dict[str, float] = field(default_factory=dict)
    """Share of the squared error by module, in the order of the run."""
    by_step: dict[str, float] = field(default_factory=dict)
    """Share of the squared error by denoising step; empty for models without steps."""
    columns: list[str] = field(default_factory=list)
    """Columns of `by_place`, in the order of the run: denoising steps, and phases without steps."""
    by_place: dict[str, list[float | None]] = field(default_factory=dict)
    """Share of the squared error by module and column; None where the module does not run, 0 where
    the model's own attention runs. A share is negative if its error cancels others."""
    worst: list[str] = field(default_factory=list)
    """The places with the largest shares."""
    error_without: float | None = None
    """Error if the model's own attention runs at the worst places."""
    psnr_without: float | None = None
    costs_ms: float | None = None
    """Time of a run that this costs, by the plan; None if the plan has no times."""

    def __str__(self) -> str:
        text = _text(self.error, self.measure, self.psnr)
        return f"{text} (± {self.margin_db:.1f} dB)" if self.error else text

    @property
    def without(self) -> str:
        """Error with the worst places kept exact, as text."""
        return _text(self.error_without or 0.0, self.measure, self.psnr_without)


def _text(error: float, measure: str, psnr: float | None) -> str:
    if not error:
        return "no error"
    if psnr is not None:
        return f"PSNR {psnr:.1f} dB"
    return f"KL {error**2:.2g}" if measure == "kl" else f"rel. L2 {error:.2g}"
