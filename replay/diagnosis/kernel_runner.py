"""Runs of a kernel in experiments."""

from __future__ import annotations

import contextlib
from collections.abc import Callable

from torch import Tensor

from capture.call.attention_call import AttentionCall
from replay.bench.settings import Settings
from replay.diagnosis.poison import poisoned
from replay.diagnosis.subject import KernelRunner
from replay.isolation.inputs import aliases
from replay.isolation.output_form import malformed
from replay.isolation.process_state import ProcessState
from replay.kernels.failures import ContextLost, classify
from replay.kernels.registry import Kernel
from replay.timing.gpu_state import gpu_is_lost


def runner(
    kernel: Kernel,
    settings: Settings,
    process_state: ProcessState,
    raised: Callable[[AttentionCall, str], Tensor | None] = lambda call, reason: None,
) -> KernelRunner:
    """Return a function that runs a kernel on a call.

    It raises `ContextLost` if the kernel makes the GPU unusable.

    Args:
        raised: gets the call and the reason if the kernel raises; its result is that of the run.
    """

    def run(call: AttentionCall, poison: float | None = None) -> Tensor | None:
        if kernel.refuses(call):
            return None
        try:
            with contextlib.nullcontext() if poison is None else poisoned(poison):
                output = kernel.attention(**aliases(call))
        except Exception as error:
            finding = classify(error)
            if gpu_is_lost(settings.device):
                raise ContextLost(finding.reason) from error
            return raised(call, finding.reason)
        finally:
            process_state.restore(kernel.name)
        return None if malformed(output, call) else output

    return run
