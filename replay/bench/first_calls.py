"""The first run of each kernel on a call, which compiles the kernel before any kernel is timed."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence

from capture.call.attention_call import AttentionCall
from replay.bench.forms import Forms
from replay.bench.settings import Settings
from replay.isolation.inputs import Inputs, drop_in
from replay.isolation.process_state import ProcessState
from replay.kernels.failures import ContextLost, classify
from replay.kernels.libraries import is_interpreted
from replay.kernels.registry import Kernel
from replay.timing.gpu_state import gpu_is_lost
from replay.timing.timer import first_call


def first_calls(
    call: AttentionCall,
    kernels: Sequence[Kernel],
    settings: Settings,
    process_state: ProcessState,
    report: Callable[[str], None],
) -> Iterator[tuple[str, float]]:
    """Yield each kernel's name and the milliseconds of its first call, including compilation.

    Outputs are not judged. A kernel that refuses the call or fails is left out, because its check
    will report the reason. Kernels in Triton's interpreter are left out: they compile nothing.
    """
    forms = Forms.of(call)
    inputs = Inputs(*forms.all)
    for kernel in kernels:
        report(kernel.name)
        if kernel.library == "triton" and is_interpreted():
            continue
        own, _, refused = forms.form(kernel, settings.device, for_model=settings.for_model)
        process_state.restore(kernel.name)
        if refused is not None:
            continue
        report(kernel.name)  # as before each run of a check, to tell it from a refusal
        milliseconds = None
        try:
            _, milliseconds = first_call(drop_in(kernel.loaded().attention, own), settings.device)
        except BaseException as error:
            finding = classify(error)
            if gpu_is_lost(settings.device):
                raise ContextLost(finding.reason) from error
        process_state.restore(kernel.name)
        inputs.restore(own)
        if milliseconds is not None:
            yield kernel.name, milliseconds
