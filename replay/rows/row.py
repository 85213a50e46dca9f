"""Row of one kernel on one call, made of types that need no other part of `replay`."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Annotated, Literal, NamedTuple

from capture.call.batch import BatchSize
from capture.call.shape import Shape
from capture.hooks.batch_phase import CACHING
from replay.rows.errors_of_output import Accuracy, AccuracyClass, Gradients, Summary
from replay.rows.meaning import Column, Meaning, digits, few

UNCONFIRMED = "unconfirmed"
"""Beginning of the flag of a row whose time may not be compared with others."""
INTERRUPTED_BLOCKS = f"{UNCONFIRMED}: other programs interrupted its blocks; run this again"

DEFAULT_BASELINE = "torch-default"
"""Kernel that others are compared with unless the model called another one."""

HERE = "this"
"""Name of the Python environment of the parent process."""

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

SpeedVerdict = Literal["same", "fast", "slow", "inconclusive"]

SpeedReason = Literal[
    "within-3-percent",
    "interval-above-1",
    "interval-below-1",
    "interval-includes-1",
    "noisy",
    "interrupted",
    "too-few-rounds",
]

UNKNOWN_SHAPE = Shape(0, 0, 0, 0, 0, 0, 0)
"""Shape of a call that could not be read."""


class KernelId(NamedTuple):
    """Kernel in a Python environment. Each line of a table shows one such pair."""

    name: str
    environment: str = HERE

    def __str__(self) -> str:
        """Format the name, followed by `@` and the environment unless that is `this`."""
        return self.name if self.environment == HERE else f"{self.name}@{self.environment}"


class Mask(NamedTuple):
    """Type and sizes of a call's `attn_mask`."""

    kind: Annotated[Literal["bool", "float"], "bool (True = attend) or float (added to the scores)"]
    sizes: Annotated[tuple[int, ...], "its shape"]

    def __str__(self) -> str:
        """Format the mask, such as `bool 1×1×64×64`."""
        return f"{self.kind} {'×'.join(map(str, self.sizes))}"


@dataclass(frozen=True)
class CallFacts:
    """Facts about the call of a row."""

    name: Annotated[str, "file of the recorded call, or number of the random shape"]
    model: Annotated[str, "model or suite that the call comes from"] = ""
    weights: Annotated[str, "weights that produced the values"] = ""
    module: Annotated[str, "path of the module that made the call"] = ""
    phase: Annotated[
        str, "denoise, prefill, extend, decode, mixed (an engine's batch), encode, or synthetic"
    ] = ""
    backend: Annotated[
        str,
        "kernel that PyTorch chose when the call was recorded, or the function that replaced SDPA",
    ] = ""
    pinned: Annotated[
        str,
        "kernel that the model chose itself, by a switch of backends or another entry point than "
        "SDPA; empty if plain SDPA runs the same kernel here",
    ] = ""
    step: Annotated[int, "number of earlier forward passes of the model"] = 0
    call_index: Annotated[int, "position among all attention calls of the run"] = 0
    shape: Annotated[Shape, "{}"] = UNKNOWN_SHAPE
    dtype: Annotated[str, "dtype of query, key and value"] = ""
    is_causal: Annotated[
        bool, "true if a causal mask applied, aligned top left unless `beyond` states otherwise"
    ] = False
    mask: Annotated[Mask | None, "attn_mask: {}; empty without a mask"] = None
    mask_structure: Annotated[
        str, "options equivalent to attn_mask, e.g. window 1023/0; empty if there are none"
    ] = ""
    beyond: Annotated[str, "options that SDPA does not have; empty if there are none"] = ""
    nonfinite: Annotated[
        str,
        "NaN and infinite elements of each input, e.g. key 128 NaN (hidden) if no query sees them; "
        "empty if there are none",
    ] = ""
    entry_point: Annotated[str, "entry point of the call: sdpa, or a library or registry"] = "sdpa"
    batch: Annotated[BatchSize | None, "batch of an engine: {}; empty for other calls"] = None
    grad_output: Annotated[
        str,
        "gradient of the output that a backward pass starts from: recorded, or drawn from a normal "
        "distribution; empty without --backward",
    ] = ""
    has_window: Annotated[
        bool | None, "true if the layer of an engine's batch has a sliding window; else empty"
    ] = None


@dataclass(frozen=True)
class TimeSummary:
    """Times of one kernel on one call, in milliseconds."""

    p10: Annotated[float, "10th percentile of"]
    p50: Annotated[float, "median of"]
    p90: Annotated[float, "90th percentile of"]
    iqr: Annotated[float, "interquartile range (p75 - p25) of"]
    n: Annotated[int, Meaning("number of samples of", "samples")]
    samples: tuple[float, ...]
    """Time of each round; only in JSON."""
    interrupted: tuple[int, ...] = ()
    """Rounds in which other programs interrupted the sample; only in JSON. The figures above leave
    these rounds out if enough others remain."""
    unconfirmed: float = 0.0
    """Share of the time by which the true time may be longer, because the kernel's process may have
    saved as much in blocks; only in JSON."""
    control: tuple[float, ...] = ()
    """Times of the baseline in this kernel's process, in the same rounds; only in JSON."""
    process_factor: float = 1.0
    """Ratio of those times to the baseline's times in its own process; only in JSON."""

    @property
    def whole(self) -> tuple[float, ...]:
        """Samples without an interruption."""
        return tuple(ms for at, ms in enumerate(self.samples) if at not in self.interrupted)


@dataclass(frozen=True)
class Speedup:
    """Speed of the candidate relative to the baseline, with a 95 % interval.

    `replay.timing.statistics.speed_verdict` lists the verdicts and reasons.
    """

    ratio: Annotated[
        float, Meaning("median over rounds of baseline time / this kernel's time", "×")
    ]
    low: Annotated[
        float | None,
        Meaning("lower end of its 95 % interval; empty below 6 rounds", "×"),
    ]
    high: Annotated[float | None, Meaning("upper end of that interval", "×")]
    verdict: Annotated[
        SpeedVerdict, "same (all of the interval within ±3 %), fast, slow, or inconclusive"
    ]
    reason: Annotated[
        SpeedReason,
        "within-3-percent, interval-above-1, interval-below-1, interval-includes-1, noisy (could "
        "be 3 % faster and 3 % slower), interrupted (other programs interrupted too many samples), "
        "or too-few-rounds",
    ]

    @property
    def differs(self) -> bool:
        """True if one of the kernels is faster."""
        return self.verdict in ("fast", "slow")

    def holds(self, ratio: float) -> bool:
        """Return True if there is an interval and it contains this ratio."""
        return self.low is not None and self.high is not None and self.low <= ratio <= self.high


@dataclass(frozen=True)
class SpeedupOver(Speedup):
    """Speed-up, and the name of the baseline that it is relative to."""

    vs: Annotated[str, "the baseline kernel"]


@dataclass(frozen=True)
class GpuState:
    """Reading of a GPU's state; figures that the GPU does not report are None."""

    sm_clock_mhz: Annotated[int | None, Meaning("SM clock", "MHz")]
    power_w: Annotated[float | None, Meaning("power draw", "W")]
    temperature_c: Annotated[int | None, Meaning("temperature", "°C")]
    throttle_reasons: Annotated[tuple[str, ...] | None, "reasons for a reduced clock, if any,"]
    memory_clock_mhz: Annotated[int | None, Meaning("memory clock", "MHz")] = None


@dataclass(frozen=True)
class Energy:
    """Energy that a kernel uses when called repeatedly without gaps."""

    mj: Annotated[float, Meaning("energy per call, including the idle power of the GPU", "mJ")]
    tflops_per_w: Annotated[float, Meaning("TFLOPS / mean power draw", "TFLOPS/W")]
    power_w: Annotated[float, Meaning("mean power draw", "W")]
    seconds: Annotated[float, Meaning("duration of the measurement", "s")]


@dataclass(frozen=True)
class Roof:
    """Measured peak compute and memory throughput of the machine."""

    tflops: Annotated[
        float, Meaning("throughput of a large matrix product in the call's dtype", "TFLOPS")
    ]
    gb_per_s: Annotated[float, Meaning("throughput of a large copy in memory", "GB/s")]
    interrupted: Annotated[
        bool, "True if other programs interrupted every run, so that the roof may be too low"
    ] = False

    def at(self, flop_per_byte: float) -> float:
        """Return the maximum TFLOPS at this arithmetic intensity, in FLOP per byte."""
        return min(self.tflops, self.gb_per_s * flop_per_byte / 1e3)


@dataclass(frozen=True)
class Program:
    """Compiled Triton program, as the driver loaded it."""

    name: str
    registers: int
    """Registers per thread."""
    spills: int
    """Spilled registers per thread."""
    shared_bytes: int
    """Shared memory per block."""
    warps: int
    """Warps per block."""


@dataclass(frozen=True)
class Machine:
    """Machine that measured a row; fields that do not apply are empty."""

    device: Annotated[str, "name of the GPU or processor"] = ""
    python: Annotated[str, "Python's version"] = ""
    torch: Annotated[str, "PyTorch's version"] = ""
    cuda: Annotated[str, "CUDA's version"] = ""
    cudnn: Annotated[str, "cuDNN's version"] = ""
    triton: Annotated[str, "Triton's version"] = ""
    threads: Annotated[str, "number of PyTorch's threads (CPU only)"] = ""
    cores: Annotated[str, "physical cores of the machine"] = ""
    usable_cpus: Annotated[str, "logical CPUs that this process may use"] = ""

    @property
    def versions(self) -> list[str]:
        """Versions that decide speed, such as `torch 2.11.0`."""
        names = ("torch", "cuda", "triton")
        return [f"{name} {version}" for name in names if (version := getattr(self, name))]


@dataclass(frozen=True)
class Row:
    """Result of one kernel on one call; `kernel` is empty if the call could not be replayed."""

    kernel: Annotated[str, "name of the kernel"]
    call: Annotated[CallFacts, "{}"]
    status: Annotated[
        Status,
        Meaning(
            "ok, inaccurate, unsupported, unavailable, error, crash, timeout, out-of-memory, or "
            "not-timed (correct, but a time would be meaningless)",
            columns=(Column("accuracy", "accuracy", "verdict", over_calls="counts"),),
        ),
    ]
    reason: Annotated[str, "reason for the status"] = ""
    environment: Annotated[
        str, "Python environment that the kernel ran in; `this` is that of `replay` itself"
    ] = HERE
    process: Annotated[
        str,
        "file, package or kernel that the worker process belonged to; empty for the worker that "
        "known kernels of an environment share",
    ] = ""
    rounds: Annotated[
        str,
        "rounds that the row was timed in; rows of one call with the same entry are paired round "
        "by round",
    ] = ""
    ran_on: Annotated[
        str,
        "device that ran the call, e.g. GPU 1 and its UUID (--gpus, --ray), the same for all rows "
        "of a call; empty for a replay on one device",
    ] = ""
    host: Annotated[str, "cluster node that ran the call (--ray); empty for this machine"] = ""
    restated_as: Annotated[
        str,
        "options that the kernel ran the call with in place of attn_mask; empty if it ran the call "
        "as recorded",
    ] = ""
    flags: Annotated[
        tuple[str, ...], "other observations, e.g. that the kernel is not deterministic"
    ] = ()
    changed_inputs: Annotated[
        tuple[str, ...],
        "inputs (query, key, value, attn_mask, grad_output) that the kernel changes in place",
    ] = ()
    not_ranked: Annotated[
        str,
        "reason why the kernels of the call are not ranked and have no speed-ups; else empty",
    ] = ""
    log: Annotated[str, "last output of a worker that died"] = ""
    time_ms: Annotated[
        TimeSummary | None,
        Meaning(
            "{} the drop-in time: SDPA's tensors in, output out",
            "ms",
            (
                Column("speed", "time", "time ms", digits(".4g"), of="p50"),
                Column("speed", "time", "p10-p90", digits(".3g"), "range", "p10"),
                Column("speed", "time", "n", few, "lowest", "n"),
            ),
        ),
    ] = None
    block_ms: Annotated[
        TimeSummary | None,
        Meaning(
            "{} the time of a call in blocks of calls that another process clocks, on inputs that "
            "it draws; on a GPU including launches",
            "ms",
        ),
    ] = None
    core_time_ms: Annotated[
        TimeSummary | None,
        Meaning(
            "{} the core time: after layout change and quantisation",
            "ms",
            (Column("speed", "time", "core ms", digits(".4g"), of="p50"),),
        ),
    ] = None
    speedup: Annotated[
        SpeedupOver | None,
        Meaning(
            "{}", columns=(Column("speed", "time", "speed-up", over_calls="pooled", of="ratio"),)
        ),
    ] = None
    backward_ms: Annotated[
        TimeSummary | None,
        Meaning(
            "{} the time of the backward pass alone (--backward)",
            "ms",
            (Column("training", "backward", "backward ms", digits(".4g"), of="p50"),),
        ),
    ] = None
    backward_speedup: Annotated[
        SpeedupOver | None,
        Meaning(
            "{}; of the backward pass",
            columns=(
                Column(
                    "training", "backward", "backward speed-up", over_calls="pooled", of="ratio"
                ),
            ),
        ),
    ] = None
    both_ms: Annotated[
        TimeSummary | None,
        Meaning(
            "{} the time of forward, which saves what backward needs, and backward together",
            "ms",
            (Column("training", "backward", "both ms", digits(".4g"), of="p50"),),
        ),
    ] = None
    both_speedup: Annotated[
        SpeedupOver | None,
        Meaning(
            "{}; of forward and backward together",
            columns=(
                Column("training", "backward", "both speed-up", over_calls="pooled", of="ratio"),
            ),
        ),
    ] = None
    both_peak_bytes: Annotated[
        int | None,
        Meaning(
            "maximum memory that forward and backward together used beyond the inputs (GPU only)",
            "B",
            (Column("training", "backward", "both peak MB", digits(".1f", 1e-6)),),
        ),
    ] = None
    gradients: Annotated[Gradients | None, "{}, relative to a backward pass in high precision"] = (
        None
    )
    tflops: Annotated[
        float | None,
        Meaning(
            "2 · valid (query, key) pairs · (D + Dv) / median time, including pairs that a sparse "
            "kernel leaves out",
            "TFLOPS",
            (Column("speed", "throughput", "TFLOPS", digits(".3g")),),
        ),
    ] = None
    gb_per_s: Annotated[
        float | None,
        Meaning(
            "bytes of query, key, value and mask, read once, and of the output, written once, / "
            "median time",
            "GB/s",
            (Column("work", "bandwidth", "GB/s", digits(".4g")),),
        ),
    ] = None
    flop_per_byte: Annotated[
        float | None,
        Meaning(
            "arithmetic intensity: the operations of TFLOPS / the bytes of GB/s",
            "FLOP/B",
            (Column("work", "arithmetic_intensity", "FLOP/B", digits(".4g")),),
        ),
    ] = None
    roof: Annotated[
        Roof | None, "{}, measured before the kernels (--metric roofline, --report)"
    ] = None
    roof_share: Annotated[
        float | None,
        Meaning(
            "TFLOPS / the lower of the measured peak and FLOP/B · the measured bandwidth; empty "
            "above 105 %, if `roof.interrupted`, or if no query sees a key",
            columns=(Column("work", "roofline", "of roof", digits(".0%")),),
        ),
    ] = None
    peak_bytes: Annotated[
        int | None,
        Meaning(
            "maximum memory that the call used beyond its inputs (GPU only)",
            "B",
            (Column("work", "memory", "peak MB", digits(".1f", 1e-6)),),
        ),
    ] = None
    first_call_ms: Annotated[
        float | None,
        Meaning(
            "time of the first call, including compilation",
            "ms",
            (Column("work", "memory", "first ms", digits(".1f")),),
        ),
    ] = None
    host_ms: Annotated[
        float | None,
        Meaning(
            "median time that the host needs to launch one call (GPU only)",
            "ms",
            (Column("work", "memory", "host ms", digits(".3f")),),
        ),
    ] = None
    layer_host_ms: Annotated[
        TimeSummary | None,
        Meaning("{} the host's time to launch one call and the rest of a layer (GPU only)", "ms"),
    ] = None
    energy: Annotated[
        Energy | None,
        Meaning(
            "{} (NVML's energy counter over one second of back-to-back calls; NVIDIA GPUs, with "
            "--metric energy or all)",
            columns=(
                Column("machine", "energy", "mJ", digits(".4g"), of="mj"),
                Column("machine", "energy", "TFLOPS/W", digits(".3g"), of="tflops_per_w"),
            ),
        ),
    ] = None
    burst_ms: Annotated[
        float | None,
        Meaning(
            "time per call at the start of the energy measurement, on a GPU that was idle; empty "
            "if the time at its end is within 3 %",
            "ms",
            (Column("machine", "energy", "burst ms", digits(".4g")),),
        ),
    ] = None
    sustained_ms: Annotated[
        float | None,
        Meaning(
            "time per call in the last quarter of the energy measurement; empty if burst_ms is",
            "ms",
            (Column("machine", "energy", "sustained ms", digits(".4g")),),
        ),
    ] = None
    accuracy: Annotated[Accuracy | None, "{}"] = None
    accuracy_class: Annotated[
        AccuracyClass | None,
        Meaning(
            "rule that the output is judged by: exact, quantised or sparse; empty if the kernel's "
            "worker died",
            columns=(Column("accuracy", "accuracy", "class", over_calls="same"),),
        ),
    ] = None
    tolerances: Annotated[
        str, "changes by --tolerances, e.g. quantised.minimum_cosine=0.98; empty for the defaults"
    ] = ""
    kept: Annotated[
        float | None,
        Meaning(
            "share of the (query, key) pairs that a sparse kernel kept; empty for other kernels",
            columns=(Column("accuracy", "accuracy", "kept", digits(".3g")),),
        ),
    ] = None
    output_summary: Annotated[Summary | None, "{} of the output (--metric stats)"] = None
    reference_summary: Annotated[
        Summary | None, "{} of the output named by --errors-against (--metric stats)"
    ] = None
    programs: Annotated[
        tuple[Program, ...],
        "Triton programs launched: name, registers and spills per thread, shared bytes and warps "
        "per block (--metric resources)",
    ] = ()
    processor_share: Annotated[
        float | None,
        Meaning(
            "share of a sample's time in which none of the kernel's threads waited for a "
            "processor, median over the samples; samples below 90 % are repeated or left out (CPU "
            "only)",
            columns=(Column("machine", "clocks", "CPU share", digits(".0%")),),
        ),
    ] = None
    gpu_before: Annotated[GpuState | None, "{} before the timed rounds"] = None
    gpu_during: Annotated[
        GpuState | None,
        Meaning(
            "{} during the timed rounds",
            columns=(
                Column("machine", "clocks", "SM MHz", digits(".0f"), of="sm_clock_mhz"),
                Column("machine", "clocks", "memory MHz", digits(".0f"), of="memory_clock_mhz"),
                Column("machine", "clocks", "W", digits(".0f"), of="power_w"),
                Column("machine", "clocks", "°C", digits(".0f"), of="temperature_c"),
            ),
        ),
    ] = None
    timer: Annotated[
        str,
        "method of the samples: cuda-events-after-reads (cold cache), cuda-events (warm cache, or "
        "a cold cache of an earlier version, which overwrote it) or perf_counter",
    ] = ""
    cache: Annotated[str, "state of the L2 cache before each sample: cold or warm"] = ""
    calls_before: Annotated[int | None, "untimed calls of the kernel before each sample"] = None
    machine: Annotated[Machine, "{}"] = field(default_factory=Machine)
    measured_at: Annotated[str, "beginning of the run, in UTC, e.g. 2026-11-28T08:15:30Z"] = ""
    commit: Annotated[
        str,
        "commit of the Git repository in the current directory; + if a tracked file had changed; "
        "empty outside of a repository",
    ] = ""

    @property
    def id(self) -> KernelId:
        return KernelId(self.kernel, self.environment)

    @property
    def overwrites(self) -> list[str]:
        """Inputs that the kernel changes and that later calls probably read again.

        A kernel that overwrites inputs must not run in a model, even if its outputs are right: most
        models share a mask among all layers, and a language model's cache holds keys and values.
        """
        kept = {"attn_mask", "key", "value"} if self.call.phase in CACHING else {"attn_mask"}
        return sorted(kept.intersection(self.changed_inputs))

    @property
    def is_correct(self) -> bool:
        return self.status in ("ok", "not-timed")

    @property
    def is_unconfirmed(self) -> bool:
        """True if the observations of other processes do not confirm its time."""
        return any(flag.startswith(UNCONFIRMED) for flag in self.flags)

    @property
    def is_comparable(self) -> bool:
        """True if the row's time may be compared with other kernels' times on the same call."""
        return not (self.not_ranked or self.is_unconfirmed)

    @property
    def is_ranked(self) -> bool:
        """True if the kernel is correct and its time may be compared with other kernels' times."""
        return self.is_correct and self.is_comparable

    def shares_rounds(self, other: Row) -> bool:
        """Return True if, for each i, sample i of both rows comes from the same round."""
        if self.rounds or other.rounds:
            return (self.call.name, self.rounds) == (other.call.name, other.rounds)
        # Earlier versions paired the rows of one process.
        return (self.call.name, self.environment, self.process) == (
            other.call.name,
            other.environment,
            other.process,
        )
