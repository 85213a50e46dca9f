"""The energy of a kernel, measured over a block of calls with different inputs."""

from __future__ import annotations

import secrets
import statistics
from dataclasses import replace

import torch
from torch import Tensor

from replay.bench.stages import CheckedKernel, TimedKernel
from replay.isolation.input_perturbation import SteppedPerturbation
from replay.isolation.inputs import Inputs
from replay.isolation.judge import Sample
from replay.isolation.output_form import malformed
from replay.isolation.process_state import ProcessState
from replay.kernels.failures import classify
from replay.timing.energy import measure_energy
from replay.timing.gpu_state import NoReading, gpu_is_lost

JUDGED_SAMPLES = 4
"""Number of outputs to judge in each block of calls, drawn at random after the block ends."""


def with_energy(
    timed: TimedKernel, inputs: Inputs, process_state: ProcessState, seed: int, device: torch.device
) -> TimedKernel:
    """Measure the energy of a call, by running a timed kernel alone for a second.

    The inputs change a little before each call (`replay.isolation.input_perturbation`), so that the
    kernel cannot reuse an earlier result. Rows of some outputs are kept to be judged.

    Args:
        seed: seed of the perturbations.
    """
    samples, checked = timed.samples, timed.checked
    if samples is None or samples.error is not None:
        return timed
    if checked.changed_inputs or timed.changed_inputs:
        return replace(timed, no_energy="it changes its inputs")
    call_ms = statistics.median(samples.ms)
    perturbation = SteppedPerturbation(checked.call, seed, values_only=checked.chosen is not None)
    sampled = _SampledCalls(checked, perturbation)
    run = checked.run

    def next_call() -> Tensor:
        perturbation.step()
        return run()

    try:
        timed = replace(timed, block=measure_energy(next_call, device, call_ms, sampled.add))
    except NoReading as error:
        return replace(timed, no_energy=str(error))
    except BaseException as error:
        if gpu_is_lost(device):
            raise
        return replace(timed, no_energy=classify(error).reason)
    finally:
        perturbation.apply()
        changed = inputs.restore(checked.call)
        process_state.restore(checked.kernel.name)
    return replace(
        timed, block_samples=sampled.drawn(), block_fault=sampled.fault, changed_inputs=changed
    )


class _SampledCalls:
    def __init__(self, checked: CheckedKernel, perturbation: SteppedPerturbation) -> None:
        self._call = checked.call
        self._perturbation = perturbation
        self._samples: list[Sample] = []
        self.fault = ""
        """Wrong type, shape, dtype or device of an output, in words; empty if all were right."""

    def add(self, result: object) -> None:
        if wrong := malformed(result, self._call):
            self.fault = self.fault or f"{wrong} when its energy was measured"
            return
        assert isinstance(result, Tensor)
        drawn = secrets.randbits(64)
        changed, others = (rows.of(result) for rows in self._perturbation.rows(drawn))
        self._samples.append(
            Sample(self._perturbation.number, drawn, changed, others, is_stepped=True)
        )

    def drawn(self) -> tuple[Sample, ...]:
        count = min(JUDGED_SAMPLES, len(self._samples))
        return tuple(secrets.SystemRandom().sample(self._samples, count))
