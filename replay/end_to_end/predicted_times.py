"""Inputs and results of a prediction: times, counts and clues for one phase or a full run."""

from __future__ import annotations

from dataclasses import dataclass, field

from replay.timing.statistics import percentile

NOTABLE = 0.02
"""Minimum share of the time, or relative difference, that is worth reporting."""

LAUNCH_BOUND = 0.1
"""Minimum share of a forward that the GPU waits for the host if the forward is launch-bound.

With a smaller share, the GPU waits only at the start, before enough work is enqueued.
"""

RUN = "run"
"""Name used for one full run of the model, in place of a phase."""


@dataclass(frozen=True)
class Clocked:
    """Measured time of the model with its own attention."""

    seconds: tuple[float, ...]
    """Seconds of one forward of the phase, or of one run, by round."""
    forwards: int = 1
    """Forwards per run; 1 for a full run."""
    busy_seconds: float | None = None
    """GPU busy time per forward; None on a CPU, which launches nothing."""
    host_seconds: float | None = None
    """Host time to enqueue a forward, however long the GPU takes, with the model's own kernel
    swapped in if that was run; None on a CPU."""
    attention_seconds: float | None = None
    """Time of all attention calls in the model, per forward, with the model's own kernel swapped in
    if that was run; None if they were not timed."""
    stand_in_seconds: float = 0.0
    """Time of all attention calls with the kernel that stands for the model's own attention, less
    that of the model's own attention, per forward; 0 if they are the same, or not measured."""
    swap_ratios: tuple[float, ...] = ()
    """Time with the model's own kernel swapped in like any other kernel / in the adjacent run with
    the model's own attention, by round; empty if not run."""

    @property
    def waiting_seconds(self) -> float:
        """Time that the GPU waits for the host in one forward, for reports; 0 if it is short."""
        if self.busy_seconds is None:
            return 0.0
        seconds = percentile(self.seconds, 50)
        waiting = seconds - self.busy_seconds
        return waiting if waiting >= LAUNCH_BOUND * seconds else 0.0


@dataclass(frozen=True)
class Estimate:
    """Value with its 95 % interval."""

    value: float
    low: float
    high: float


@dataclass(frozen=True)
class Missing:
    """Calls that no replayed call represents."""

    module: str
    phase: str
    calls: int


@dataclass(frozen=True)
class Calls:
    """Numbers of attention calls in one run; each call is counted in exactly one field."""

    swapped: int = 0
    """Calls that the kernel handles."""
    fell_back: int = 0
    """Calls that the kernel does not support, so that the model's own attention handles them."""
    own: int = 0
    """Calls that the plan assigns to the baseline."""
    not_recorded: int = 0
    """Calls without a matching replayed call; the prediction assumes that their time does not
    change."""


@dataclass(frozen=True)
class Clues:
    """Figures that may explain a wrong prediction; None for figures that were not measured."""

    more_layer_launch_seconds: float | None = None
    """Additional host time to launch layers with the kernel instead of the baseline (GPU only)."""
    preparation_seconds: float | None = None
    """Time of layout changes and quantisation before the kernel's core; included in the
    prediction."""
    scatter: float | None = None
    """Ratio p90 / p10 of the rounds of the most expensive call, for the less steady kernel."""
    sm_clock_mhz: float | None = None
    """GPU clock during the kernel's rounds: median over the replayed calls."""
    power_w: float | None = None


@dataclass(frozen=True)
class PredictedTime:
    """Times of one forward of a phase, or of one full run, in seconds."""

    phase: str
    """`prefill`, `decode`, `denoise`, `encode`, or `RUN`."""
    forwards: int
    """Forwards per run."""
    old_seconds: Estimate
    """Measured time with the model's own attention: median over the rounds."""
    new_seconds: Estimate | None
    """Predicted time with the kernel; None without a prediction (see `reason`)."""
    speedup: Estimate | None
    """Ratio old / new."""
    attention_seconds: float
    """Σ count · t_old over the calls that a replayed call represents."""
    attention_share: float
    """Attention's share of `old_seconds`; a lower bound if `not_recorded` is not empty. If it is
    above 1, the replay is slower than the model, so that the two cannot be compared."""
    waiting_share: float
    """Share of `old_seconds` that the GPU waits for the host; 0 if the span is not launch-bound.
    For a full run, the waits of the measured phases are added up."""
    saved_seconds: float | None
    """Σ count · (t_old − t_new): time that attention saves, even if the model does not become
    faster."""
    swapped_seconds: float | None
    """Σ count · t_old over the calls that the kernel handles."""
    swap_seconds: float
    """Time that swapping a kernel in takes, apart from the kernel's own; 0 if it was not
    measured."""
    calls: Calls
    """Calls per run, even if the other figures describe a phase."""
    fallbacks: dict[str, int] = field(default_factory=dict)
    """Calls that fall back, by reason."""
    fallback_seconds: dict[str, float] = field(default_factory=dict)
    """Σ count · t_old over the calls that fall back, by reason."""
    not_recorded: list[Missing] = field(default_factory=list)
    """Calls without a matching replayed call, by module, in the census's order."""
    clues: Clues = field(default_factory=Clues)
    reason: str = ""
    """Reason why there is no prediction: `inaccurate on call-3: cosine 0.81 …`."""
