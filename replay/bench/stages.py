"""The stages that lead to a row: a kernel is checked on a call, timed and verified again.

Each stage contains the previous one and is immutable.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field

from torch import Tensor

from capture.call.attention_call import AttentionCall
from replay.bench.confirmation import Blocks, with_blocks
from replay.bench.settings import Settings, WorkerOptions
from replay.isolation.inputs import drop_in
from replay.kernels.failures import Finding
from replay.kernels.libraries import is_interpreted
from replay.kernels.registry import Kernel
from replay.rows.errors_of_output import Accuracy, Gradients, Summary
from replay.rows.row import CallFacts, Energy, Machine, Program, Roof, Row
from replay.timing import flops
from replay.timing.energy import EnergyBlock
from replay.timing.rounds import Samples
from replay.timing.statistics import summarize
from replay.timing.timer import TIMERS

NO_ENERGY = "no energy: "
"""Beginning of the flag that explains why a row has no energy."""

MOST_OF_ROOF = 1.05
"""Largest ratio of throughput to the measured roof that noise can explain."""
BUSY_ROOF = "no share of the roof: other programs interrupted its measurement"
ABOVE_ROOF = (
    "no share of the roof: the throughput exceeds the measured roof (fewer bits, or a cache)"
)


@dataclass(frozen=True)
class CheckedKernel:
    """A kernel after its first calls."""

    kernel: Kernel
    call: AttentionCall
    """Call that the kernel runs; a separate copy if the kernel changes its inputs."""
    finding: Finding
    restated_as: str = ""
    """Description of the mask, if options replace the mask (`replay.bench.forms`)."""
    chosen: Tensor | None = None
    """Keys that a sparse kernel attends to; None for other kernels."""
    accuracy: Accuracy | None = None
    kept: float | None = None
    flags: tuple[str, ...] = ()
    not_deterministic: str = ""
    """Difference between the kernel's outputs, in words; empty if all outputs are equal."""
    changed_inputs: tuple[str, ...] = ()
    first_call_ms: float | None = None
    output_summary: Summary | None = None
    reference_summary: Summary | None = None
    peak_bytes: int | None = None
    programs: tuple[Program, ...] = ()
    gradients: Gradients | None = None
    """Errors of the gradients; None if the kernel was not differentiated."""
    both_peak_bytes: int | None = None

    @property
    def ran(self) -> bool:
        """True if the kernel returned an output that could be judged."""
        return self.finding.status in ("ok", "inaccurate")

    @property
    def is_interpreted(self) -> bool:
        """True if Triton's interpreter runs the kernel, so that its times are meaningless."""
        return self.kernel.library == "triton" and is_interpreted()

    @property
    def run(self) -> Callable[[], Tensor]:
        """Function that calls the kernel as a model would."""
        return drop_in(self.kernel.attention, self.call)


@dataclass(frozen=True)
class TimedKernel:
    """A kernel with its times. Inaccurate kernels are timed too, but never compared."""

    checked: CheckedKernel
    samples: Samples | None = None
    """Times of the kernel; None if it could not be timed."""
    core: Callable[[], Tensor] | None = None
    core_samples: Samples | None = None
    core_fault: str = ""
    """Reason why the kernel's core could not be timed."""
    changed_inputs: tuple[str, ...] = ()
    """Inputs that changed while the kernel was timed."""
    energy: EnergyBlock | None = None
    """Energy of a second of calls without gaps; None unless measured."""
    no_energy: str = ""
    """Reason why energy could not be measured."""
    backward_samples: Samples | None = None
    both_samples: Samples | None = None
    """Times of forward and backward together; None unless the kernel was differentiated."""
    control_ms: tuple[float, ...] = ()
    """Times of the baseline in this process, if it belongs to another process."""

    @property
    def p50(self) -> float:
        """Median of the samples in milliseconds, as in the row; 0 without samples."""
        samples = self.samples
        return summarize(samples.ms, samples.interrupted).p50 if samples else 0.0


@dataclass(frozen=True)
class ConfirmedKernel:
    """A kernel whose time and outputs were confirmed by a block of calls (`isolation.block`)."""

    timed: TimedKernel
    finding: Finding
    accuracy: Accuracy | None
    core_fault: str
    """Reason to discard the core's time; empty if the time is valid or there is no core."""
    flags: tuple[str, ...] = ()
    """Settings of the process that the kernel changes."""
    blocks: Blocks = field(default_factory=Blocks)


def make_row(
    confirmed: ConfirmedKernel,
    facts: CallFacts,
    settings: Settings,
    options: WorkerOptions,
    machine: Machine,
    roof: Roof | None = None,
) -> Row:
    """Make a kernel's row after all stages."""
    timed = confirmed.timed
    checked, call = timed.checked, timed.checked.call
    is_timed = confirmed.finding.status in ("ok", "inaccurate")
    samples = timed.samples if is_timed else None
    core = timed.core_samples if is_timed and not confirmed.core_fault else None
    time_ms = None
    if samples is not None:
        time_ms = summarize(samples.ms, samples.interrupted, control=timed.control_ms)
    backward_ms, both_ms = (
        summarize(each.ms, each.interrupted) if is_timed and each is not None else None
        for each in (timed.backward_samples, timed.both_samples)
    )
    layer_host_ms = None
    if samples is not None and samples.layer_host_ms:
        layer_host_ms = summarize(samples.layer_host_ms)
    block = timed.energy if is_timed else None
    settled = block if block is not None and block.settles else None
    tflops = None if time_ms is None else flops.tflops(call, time_ms.p50)
    intensity = flops.arithmetic_intensity(call)
    share = None
    if roof is not None and tflops:  # a call without visible keys has no operations
        share = tflops / roof.at(intensity)
    withheld = ""
    if share is not None and roof is not None and roof.interrupted:
        withheld = BUSY_ROOF
    elif share is not None and share > MOST_OF_ROOF:
        withheld = ABOVE_ROOF
    flags = [checked.not_deterministic, *checked.flags, *confirmed.flags]
    if confirmed.core_fault:
        flags.append(f"no core time: {confirmed.core_fault}")
    if timed.no_energy:
        flags.append(f"{NO_ENERGY}{timed.no_energy}")
    if samples is not None and (sentence := samples.interruption):
        flags.append(sentence)
    if samples is not None and samples.is_over_time:
        flags.append("took longer than --max-seconds")
    flags.append(withheld)
    row = Row(
        kernel=checked.kernel.name,
        call=facts,
        status=confirmed.finding.status,
        reason=confirmed.finding.reason,
        environment=options.environment,
        process=options.process,
        rounds=options.rounds,
        restated_as=checked.restated_as,
        flags=tuple(dict.fromkeys(filter(None, flags))),
        changed_inputs=tuple(dict.fromkeys(checked.changed_inputs + timed.changed_inputs)),
        time_ms=time_ms,
        core_time_ms=None if core is None else summarize(core.ms),
        backward_ms=backward_ms,
        both_ms=both_ms,
        both_peak_bytes=checked.both_peak_bytes,
        gradients=checked.gradients,
        tflops=tflops,
        gb_per_s=None if time_ms is None else flops.gb_per_s(call, time_ms.p50),
        flop_per_byte=intensity,
        roof=roof,
        roof_share=None if withheld else share,
        peak_bytes=checked.peak_bytes,
        first_call_ms=None if checked.is_interpreted else checked.first_call_ms,
        host_ms=None if samples is None else samples.host_ms,
        layer_host_ms=layer_host_ms,
        energy=None if block is None else _energy(block, call),
        burst_ms=None if settled is None else settled.burst_ms,
        sustained_ms=None if settled is None else settled.sustained_ms,
        accuracy=confirmed.accuracy,
        accuracy_class=checked.kernel.accuracy_class,
        tolerances=settings.tolerances.changes(),
        kept=checked.kept,
        output_summary=checked.output_summary,
        reference_summary=checked.reference_summary,
        programs=checked.programs,
        processor_share=None if samples is None else samples.processor_share,
        gpu_before=None if timed.samples is None else timed.samples.gpu_before,
        gpu_during=None if timed.samples is None else timed.samples.gpu_during,
        timer="" if samples is None else TIMERS[settings.device.type, settings.cache],
        cache="" if samples is None else settings.cache,
        calls_before=None if samples is None else settings.calls_before,
        machine=machine,
    )
    # The parent of a worker compares the row with blocks that it clocked itself.
    return row if options.in_worker else with_blocks(row, confirmed.blocks)


def _energy(block: EnergyBlock, call: AttentionCall) -> Energy:
    per_joule = flops.flops(call) / block.mj / 1e9
    return Energy(block.mj, per_joule, block.power_w, block.seconds)
