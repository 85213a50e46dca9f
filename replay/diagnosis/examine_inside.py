"""Examination of one kernel on one call in a CUDA graph or in compiled code."""

from __future__ import annotations

from collections.abc import Callable

from torch.nn.functional import scaled_dot_product_attention

from capture.call.attention_call import AttentionCall
from replay.bench.forms import Forms
from replay.bench.settings import Settings
from replay.diagnosis.captured import CAPTURED
from replay.diagnosis.eager_kernel import CannotCompare, EagerKernel
from replay.diagnosis.examine import Examined
from replay.diagnosis.hypotheses.in_compile import in_compile
from replay.diagnosis.hypotheses.in_graph import in_graph
from replay.diagnosis.modes import WHERE, Mode
from replay.diagnosis.subject import Evidence
from replay.isolation.process_state import ProcessState
from replay.kernels.failures import ContextLost, classify
from replay.kernels.registry import Kernel
from replay.timing.gpu_state import gpu_is_lost

HYPOTHESES: dict[Mode, Callable[[EagerKernel], Evidence | None]] = {
    "graph": in_graph,
    "compile": in_compile,
}
"""Test of each mode besides eager mode."""

SDPA = Kernel("SDPA", scaled_dot_product_attention)


def examine_inside(
    mode: Mode, kernel: Kernel, call: AttentionCall, settings: Settings, process_state: ProcessState
) -> Examined:
    """Find out why a kernel that is right in eager mode is wrong in another mode.

    SDPA, without the call's mask and options, is examined first. If it is wrong too, the error is
    in the environment, and the kernel is not examined.

    Raises:
        ContextLost: the kernel made the GPU, or this process, unusable.
    """
    if kernel is CAPTURED:
        return Examined(refused="a recorded output cannot be computed in another mode")
    form = Forms.of(call).form(kernel, settings.device)
    if form.refused is not None:
        return Examined(refused=form.refused.reason)
    examined = EagerKernel(kernel.loaded(), form.call, settings.tolerances)
    control = EagerKernel(SDPA, _plain(call), settings.tolerances)
    try:
        if found := _tested(mode, control):
            return Examined(untried=f"SDPA is wrong there too: {found.sentence}")
        return Examined(_tested(mode, examined))
    except CannotCompare as reason:
        return Examined(untried=str(reason))
    finally:
        process_state.restore(kernel.name)


def _tested(mode: Mode, kernel: EagerKernel) -> Evidence | None:
    try:
        return HYPOTHESES[mode](kernel)
    except CannotCompare:
        raise
    except Exception as error:
        reason = classify(error).reason
        if gpu_is_lost(kernel.call.device):
            raise ContextLost(reason) from error
        return Evidence("unknown", f"it failed {WHERE[mode]}: {reason}")


def _plain(call: AttentionCall) -> AttentionCall:
    """Return unmasked attention with a call's query, key and value."""
    call = call.without_pages()
    return AttentionCall(call.query, call.key, call.value, enable_gqa=call.enable_gqa)
