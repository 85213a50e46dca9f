"""The energy of a kernel, measured over a second of calls without gaps."""

from __future__ import annotations

import statistics
from dataclasses import replace

import torch

from replay.bench.stages import TimedKernel
from replay.isolation.inputs import Inputs
from replay.isolation.process_state import ProcessState
from replay.kernels.failures import classify
from replay.timing.energy import measure_energy
from replay.timing.gpu_state import NoReading, gpu_is_lost


def with_energy(
    timed: TimedKernel, inputs: Inputs, process_state: ProcessState, device: torch.device
) -> TimedKernel:
    """Measure the energy of a call, by running a timed kernel alone for a second."""
    samples, checked = timed.samples, timed.checked
    if samples is None or samples.error is not None:
        return timed
    if checked.changed_inputs or timed.changed_inputs:
        return replace(timed, no_energy="it changes its inputs")
    try:
        call_ms = statistics.median(samples.ms)
        timed = replace(timed, energy=measure_energy(checked.run, device, call_ms))
    except NoReading as error:
        return replace(timed, no_energy=str(error))
    except BaseException as error:
        if gpu_is_lost(device):
            raise
        return replace(timed, no_energy=classify(error).reason)
    finally:
        changed = inputs.restore(checked.call)
        process_state.restore(checked.kernel.name)
    return replace(timed, changed_inputs=changed)
