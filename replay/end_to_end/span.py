"""What a prediction is made from and consists of: times, counts and clues of a span of a model."""

from __future__ import annotations

from dataclasses import dataclass, field

from replay.timing.statistics import percentile

NOTABLE = 0.02
"""A share of the time, or a relative difference, that is worth acting on and telling."""

LAUNCH_BOUND = 0.1
"""The share of a forward that a GPU waits for the host, from which on the host sets the pace. Where
it waits less, it waits at the start, before enough is enqueued, and not at each call."""

RUN = "run"
"""In place of a phase: one whole run of the model."""


@dataclass(frozen=True)
class Clocked:
    """The model's measured time with its own attention."""

    seconds: tuple[float, ...]
    """One forward of the phase, or one run; an entry per round."""
    forwards: int = 1
    """How many of them one run has; 1 for the run itself."""
    tokens: int | None = None
    """Tokens that one forward reads (prefill) or makes (decode), over the batch."""
    busy_seconds: float | None = None
    """How long the GPU works in one forward; None on a CPU, which launches nothing."""

    @property
    def waiting_seconds(self) -> float:
        """How long the GPU waits for the host in one forward; 0 where it is not launch-bound."""
        if self.busy_seconds is None:
            return 0.0
        seconds = percentile(self.seconds, 50)
        waiting = seconds - self.busy_seconds
        return waiting if waiting >= LAUNCH_BOUND * seconds else 0.0


@dataclass(frozen=True)
class Interval:
    """A figure and its 95 % interval."""

    value: float
    low: float
    high: float


@dataclass(frozen=True)
class Missing:
    """Calls that no replayed call stands for."""

    module: str
    phase: str
    calls: int


@dataclass(frozen=True)
class Calls:
    """The attention calls of one run, by what becomes of them; each is in one kind."""

    swapped: int = 0
    """The kernel answers."""
    fell_back: int = 0
    """The kernel does not support them: the model's own attention answers."""
    kept: int = 0
    """The plan leaves them to the baseline."""
    not_recorded: int = 0
    """Nothing is known of them; the prediction takes them as unchanged."""


@dataclass(frozen=True)
class Clues:
    """What may explain a prediction that fails; None where the replay did not measure it."""

    more_layer_launch_seconds: float | None = None
    """What the host needs more to launch layers with the kernel than with the baseline (GPU only).
    """
    preparation_seconds: float | None = None
    """What layout changes and quantisation before the kernel's core take; part of the prediction.
    """
    scatter: float | None = None
    """p90 / p10 of the rounds of the replayed call that costs the model most, of either kernel."""
    sm_clock_mhz: float | None = None
    """Median over the replayed calls, while the kernel's rounds ran."""
    power_w: float | None = None


@dataclass(frozen=True)
class Span:
    """One forward of a phase, or one whole run. Seconds are those of one forward (or run)."""

    phase: str
    """`prefill`, `decode`, `denoise`, `encode`, or `RUN`."""
    forwards: int
    """In one run."""
    old_seconds: Interval
    """Measured, with the model's own attention: median over the rounds."""
    new_seconds: Interval | None
    """Predicted; None where the kernel cannot stand in the model, for `reason`."""
    speedup: Interval | None
    """old / new."""
    old_tokens_per_second: Interval | None
    new_tokens_per_second: Interval | None
    attention_seconds: float
    """Σ count · t_old of the calls that are known."""
    attention_share: float
    """Of `old_seconds`. A lower bound while calls are not recorded; above 1 when the replay is
    slower than the model, so that the two cannot be compared."""
    waiting_share: float
    """Of `old_seconds`: a GPU waiting for the host; 0 where it is not launch-bound. Of a run, that
    in its measured phases."""
    saved_seconds: float | None
    """Σ count · (t_old − t_new): what attention itself saves, whatever comes of it."""
    calls: Calls
    """Of one run, whatever the span."""
    fallbacks: dict[str, int] = field(default_factory=dict)
    """The calls that fall back, by reason."""
    not_recorded: list[Missing] = field(default_factory=list)
    """By module, in the census's order."""
    clues: Clues = field(default_factory=Clues)
    reason: str = ""
    """Why there is no prediction: `inaccurate on call-3: cosine 0.81 …`."""
