"""One kernel on one call: everything a row says, as types that import nothing of the replay."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Literal

from capture.call import Shape

HERE = "this"
"""The Python environment that replays."""

CACHING = ("prefill", "decode")
"""Phases of a language model, whose key and value lie in a cache."""

Status = Literal[
    "ok",
    "inaccurate",
    "unsupported",
    "unavailable",
    "error",
    "crash",
    "timeout",
    "out-of-memory",
    "not-timed",
]


AccuracyClass = Literal["exact", "quantised", "sparse"]
"""By which rule an output is judged."""


UNKNOWN_SHAPE = Shape(0, 0, 0, 0, 0, 0, 0)
"""Of a call that could not be read."""


@dataclass(frozen=True)
class CallFacts:
    """What a row says about its call."""

    name: str
    model: str = ""
    weights: str = ""
    module: str = ""
    phase: str = ""
    step: int = 0
    call_index: int = 0
    shape: Shape = UNKNOWN_SHAPE
    dtype: str = ""
    is_causal: bool = False
    mask: str = ""


@dataclass(frozen=True)
class Errors:
    """How far an output is from a reference, both (B, H, S, Dv).

    A zero row against a zero row has cosine 1, against any other 0; `relative_l1` is 0 where both
    are zero and infinite where only the reference is. A NaN row counts as the worst row, and makes
    the three row cosines NaN.
    """

    cosine: float
    """Cosine similarity of the flattened tensors."""
    relative_l1: float
    """Σ|output - reference| / Σ|reference|."""
    rmse: float
    max_abs: float
    mae: float
    mse: float
    nan_count: int
    inf_count: int
    mismatched_nonfinite: int
    """Elements that are NaN or infinite in one and not the same in the other."""
    row_cosine_p1: float
    row_cosine_p10: float
    row_cosine_min: float
    worst_row: tuple[int, int, int]
    """(batch, head, query) of the row with the lowest cosine."""
    worst_head: tuple[int, int]
    """(batch, head) with the largest relative L1."""
    worst_head_cosine: float
    worst_head_relative_l1: float


@dataclass(frozen=True)
class Summary:
    """Range, mean and population standard deviation of one tensor; a NaN element makes all NaN."""

    min: float
    max: float
    mean: float
    std: float


@dataclass(frozen=True)
class Accuracy:
    """Errors against each reference."""

    gold: Errors
    captured: Errors | None = None
    reference: Errors | None = None
    noise_floor: Errors | None = None
    chosen: Errors | None = None
    """Of a sparse kernel, against attention to the keys that it chose."""


SpeedVerdict = Literal["faster", "slower", "tie"]


@dataclass(frozen=True)
class TimeSummary:
    """Times of one kernel on one call, in milliseconds; `iqr` is p75 - p25."""

    p10: float
    p50: float
    p90: float
    iqr: float
    n: int
    samples: tuple[float, ...]


@dataclass(frozen=True)
class Speedup:
    """How many times faster the candidate is than the baseline, with a 95 % interval.

    `ratio` is the median over rounds of baseline time / candidate time: above 1 the candidate is
    faster. The verdict is "tie" when the interval from `low` to `high` includes 1.
    """

    ratio: float
    low: float
    high: float
    verdict: SpeedVerdict


@dataclass(frozen=True)
class Comparison:
    """A speed-up and what it is against."""

    vs: str
    speedup: Speedup


@dataclass(frozen=True)
class GpuState:
    """One reading; a figure that the GPU does not give is None."""

    sm_clock_mhz: int | None
    power_w: float | None
    temperature_c: int | None
    throttle_reasons: tuple[str, ...] | None
    """Why the clock is lower than it could be; empty when it is not."""


@dataclass(frozen=True)
class Program:
    """One compiled Triton program, as the driver loaded it."""

    name: str
    registers: int
    """Per thread."""
    spills: int
    """Registers per thread that did not fit and live in local memory."""
    shared_bytes: int
    """Shared memory per block."""
    warps: int
    """Per block."""


@dataclass
class Row:
    """One kernel on one call."""

    kernel: str
    call: CallFacts
    status: Status
    reason: str = ""
    environment: str = HERE
    flags: list[str] = field(default_factory=list)
    changed_inputs: list[str] = field(default_factory=list)
    """Of query, key, value and attn_mask, what the kernel changes in place."""
    log: str = ""
    time_ms: TimeSummary | None = None
    core_time_ms: TimeSummary | None = None
    first_call_ms: float | None = None
    host_ms: float | None = None
    layer_host_ms: TimeSummary | None = None
    tflops: float | None = None
    gb_per_s: float | None = None
    flop_per_byte: float | None = None
    comparison: Comparison | None = None
    kept: float | None = None
    """Share of the (query, key) pairs that a sparse kernel attended to."""
    accuracy: Accuracy | None = None
    output_summary: Summary | None = None
    reference_summary: Summary | None = None
    peak_bytes: int | None = None
    programs: list[Program] = field(default_factory=list)
    gpu_before: GpuState | None = None
    gpu_during: GpuState | None = None
    cache: str = ""
    """`cold` or `warm`, as the samples were taken."""
    calls_before: int | None = None
    """Untimed calls of the kernel before each sample."""
    machine: dict[str, str] = field(default_factory=dict)

    @property
    def label(self) -> str:
        """The kernel, and its environment where that is not the one that replays."""
        return self.kernel if self.environment == HERE else f"{self.kernel}@{self.environment}"

    @property
    def overwrites(self) -> list[str]:
        """Inputs that it changes and that later calls are taken to read again, so that it must not
        stand in a model however right its outputs are.

        A mask is mostly made once for all layers; a language model's key and value are its cache.
        """
        kept = {"attn_mask", "key", "value"} if self.call.phase in CACHING else {"attn_mask"}
        return sorted(kept.intersection(self.changed_inputs))

    @property
    def is_correct(self) -> bool:
        return self.status in ("ok", "not-timed")
