"""The block of calls that confirms a kernel's row.

A kernel can falsify everything in its own process, so its samples are only claims. A seed, drawn
just before the clock starts, determines the inputs of a block. The clock stops when all outputs are
copied to memory that the kernel cannot reach. Only then are the rows drawn that are judged. So the
block's time is an upper limit of the kernel's real time.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from capture.call.attention_call import AttentionCall
from replay.isolation.block_inputs import BlockInputs
from replay.isolation.output_form import malformed, output_shape

BLOCK_MS = 20.0
"""Wanted duration of all calls in a block, without the work between them."""
LEAST_CALLS, MOST_CALLS = 2, 256
MOST_BYTES = 2**29
"""Maximum size of all outputs of a block that has more than `LEAST_CALLS` calls."""
LEAST_SHARE = 0.1
"""Minimum share of a block's time that counts as the kernel's, because the rest is an estimate."""
INTERRUPTED = 0.05
"""Maximum time that the kernel's threads wait for a processor, as a share of the block's time. A
block with longer waits counts as interrupted."""


class BlockVerdict(NamedTuple):
    """Observations of one block."""

    call_ms: float
    """Time of a call, less the time of the same block without a kernel."""
    is_interrupted: bool
    """True if the kernel's threads often waited for a processor during the block."""
    wrong: str
    """Fault of the outputs, in words; empty if they are right."""
    null_ms: float
    """Time subtracted from a call for work that the kernel's own process did, perhaps faster."""


def call_ms(seconds: float, null_s: float, calls: int) -> float:
    """Return the milliseconds of a call, less the time of a block without a kernel."""
    return max(seconds - null_s, LEAST_SHARE * seconds) * 1000 / calls


def calls_of_block(call_ms: float, output_bytes: int) -> int:
    """Return the number of calls in a block, a power of two."""
    wanted = min(BLOCK_MS / max(call_ms, 1e-6), most_calls(output_bytes))
    return max(1 << int(wanted).bit_length() - 1 if wanted >= 1 else 1, LEAST_CALLS)


def most_calls(output_bytes: int) -> int:
    """Return the maximum number of calls in a block."""
    return max(min(MOST_BYTES // max(output_bytes, 1), MOST_CALLS), LEAST_CALLS)


def run_block(
    run: Callable[[], object],
    call: AttentionCall,
    apply: Callable[[int, Tensor | None], None],
    outputs: Sequence[Tensor],
) -> str:
    """Call a kernel once for each output, on inputs that differ from call to call.

    Args:
        apply: writes the inputs of a call, given its number and the output of the call before.
        outputs: receive the outputs, (B, Hq, Sq, Dv) each.

    Returns:
        Why an output's form is wrong; empty if all forms are right.
    """
    last = None
    for number, kept in enumerate(outputs):
        apply(number, last)
        output = run()
        if wrong := malformed(output, call):
            return wrong
        assert isinstance(output, Tensor)
        last = kept.copy_(output, non_blocking=True)
        del output
    _wait_for(call)
    return ""


NULL_BLOCKS = 3
"""Number of blocks that run without a kernel; the shortest counts."""
GPU_WAIT_CYCLES = 20_000_000
"""Clock cycles that a GPU waits, so that the host can enqueue a block without a kernel."""


def null_seconds(call: AttentionCall, inputs: BlockInputs, outputs: Sequence[Tensor]) -> float:
    """Return the time of everything that a block does, except calling a kernel.

    On a GPU, enqueued work counts with its time on the GPU, and the host's time does not count,
    because in a real block the host enqueues this work while the kernel still runs.
    """
    output = torch.zeros(output_shape(call), dtype=call.dtype, device=call.device)

    def draw() -> None:
        inputs.draw(0, len(outputs))
        _wait_for(call)

    def rest() -> None:
        run_block(lambda: output, call, inputs.apply, outputs)

    of_rest = _gpu_seconds if call.device.type == "cuda" else _seconds
    try:
        return min(_seconds(draw) + of_rest(rest) for _ in range(NULL_BLOCKS))
    finally:
        inputs.restore()


def _wait_for(call: AttentionCall) -> None:
    if call.device.type == "cuda":
        torch.cuda.synchronize(call.device)


def _seconds(block: Callable[[], None]) -> float:
    began = time.perf_counter()
    block()
    return time.perf_counter() - began


def _gpu_seconds(block: Callable[[], None]) -> float:
    start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
    torch.cuda._sleep(GPU_WAIT_CYCLES)
    start.record()
    block()
    end.record()
    end.synchronize()
    return start.elapsed_time(end) / 1000
