"""The energy of a kernel, over a block of calls of which each has inputs of its own."""

from __future__ import annotations

import secrets
import statistics
from dataclasses import replace

import torch
from torch import Tensor

from replay.bench.stages import Checked, Timed
from replay.isolation.input_perturbation import Walk
from replay.isolation.inputs import Inputs
from replay.isolation.judge import Sample
from replay.isolation.output_form import malformed
from replay.isolation.process_state import Guard
from replay.kernels.failures import classify
from replay.timing.energy import measure_energy
from replay.timing.gpu_state import NoReading, gpu_is_lost

JUDGED_SAMPLES = 4
"""Of each block, drawn after it."""


def with_energy(
    timed: Timed, inputs: Inputs, guard: Guard, seed: int, device: torch.device
) -> Timed:
    """Let a kernel that was timed run alone for a second.

    Before each call inputs change a little (`replay.isolation.input_perturbation`), so that
    nothing can be kept from an earlier one, and rows of some outputs are kept to be judged.

    Args:
        seed: of the flips.
    """
    samples, checked = timed.samples, timed.checked
    if samples is None or samples.error is not None:
        return timed
    if checked.changed_inputs or timed.changed_inputs:
        return replace(timed, no_energy="it changes its inputs")
    call_ms = statistics.median(samples.ms)
    walk = Walk(checked.call, seed, values_only=checked.chosen is not None)
    kept = _Kept(checked, walk)
    run = checked.run

    def next_call() -> Tensor:
        walk.step()
        return run()

    try:
        timed = replace(timed, block=measure_energy(next_call, device, call_ms, kept.add))
    except NoReading as error:
        return replace(timed, no_energy=str(error))
    except BaseException as error:
        if gpu_is_lost(device):
            raise
        return replace(timed, no_energy=classify(error).reason)
    finally:
        walk.apply()
        changed = inputs.restore(checked.call)
        guard.restore(checked.kernel.name)
    return replace(
        timed, block_samples=kept.drawn(), block_fault=kept.fault, changed_inputs=changed
    )


class _Kept:
    """Rows of what some calls of a block returned."""

    def __init__(self, checked: Checked, walk: Walk) -> None:
        self._call = checked.call
        self._walk = walk
        self._samples: list[Sample] = []
        self.fault = ""
        """What a call returned that is no output at all."""

    def add(self, result: object) -> None:
        if wrong := malformed(result, self._call):
            self.fault = self.fault or f"{wrong} when its energy was measured"
            return
        assert isinstance(result, Tensor)
        drawn = secrets.randbits(64)
        changed, others = (rows.of(result) for rows in self._walk.rows(drawn))
        self._samples.append(Sample(self._walk.number, drawn, changed, others, of_walk=True))

    def drawn(self) -> tuple[Sample, ...]:
        count = min(JUDGED_SAMPLES, len(self._samples))
        return tuple(secrets.SystemRandom().sample(self._samples, count))
