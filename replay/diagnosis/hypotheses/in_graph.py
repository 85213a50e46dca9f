"""Errors of a kernel in a CUDA graph that is captured once and replayed with new values."""

from __future__ import annotations

from dataclasses import replace

import torch
from torch import Tensor

from capture.call.attention_call import AttentionCall
from capture.call.strides import narrow_expanded
from replay.diagnosis.derived import write
from replay.diagnosis.eager_kernel import EagerKernel, EagerResult
from replay.diagnosis.hypotheses.stale import CALLS_BEFORE, Probe, from_old_values
from replay.diagnosis.subject import Cause, Evidence
from replay.kernels.failures import classify

ROUNDS = 2
"""Number of replays for each of the two sets of values."""

DELAY = 200_000_000
"""Clock cycles (0.1 s) for which a stream waits before it writes new values."""

OTHER_STREAM = ("unjoined work", "uncaptured work in another stream", "legacy stream")
"""Parts of CUDA's messages when another stream makes a capture fail (`cudaErrorStreamCapture…`:
`Unjoined`, `Isolation`, `Implicit`)."""


def in_graph(kernel: EagerKernel) -> Evidence | None:
    """Capture the kernel in a CUDA graph, and replay it with the captured values and new values.

    PyTorch cannot be used in this process after a failed capture.

    Raises:
        CannotCompare: the kernel is wrong in eager mode.
    """
    with torch.cuda.device(kernel.call.device):
        return _tested(kernel)


def _tested(kernel: EagerKernel) -> Evidence | None:
    results = (kernel.first, kernel.new)
    memory = kernel.first.call.to(kernel.call.device)
    try:
        graph, output = _captured(kernel, memory)
    except Exception as error:
        return _not_captured(classify(error).reason)

    def replayed(result: EagerResult) -> Tensor:
        write(memory, result.call)
        narrow_expanded(output).fill_(torch.nan)
        graph.replay()
        return output.clone()

    for number, result in enumerate(results * ROUNDS):
        given = replayed(result)
        if wrong := result.difference(given):
            evidence = _wrong(kernel, result, given, wrong, number)
            outputs = [replayed(each) for each in results]
            return kernel.verified(evidence, any(map(EagerResult.difference, results, outputs)))
    return None


def _captured(kernel: EagerKernel, memory: AttentionCall) -> tuple[torch.cuda.CUDAGraph, Tensor]:
    """Return a graph of the kernel, and the tensor that holds its output after a replay."""
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):  # compilers and autotuners run before the capture
        for _ in range(CALLS_BEFORE):
            kernel.run(memory)
    torch.cuda.current_stream().wait_stream(stream)
    graph, raised = torch.cuda.CUDAGraph(), None
    try:
        with torch.cuda.graph(graph):
            try:
                output = kernel.run(memory)
            except Exception as error:
                raised = error
                raise
    except Exception as error:
        # Ending a failed capture raises too, and would hide the kernel's exception.
        raise raised or error from None
    return graph, output


def _not_captured(reason: str) -> Evidence:
    is_other_stream = any(part in reason for part in OTHER_STREAM)
    cause: Cause = "other-stream" if is_other_stream else "cannot-be-captured"
    sentence = f"a CUDA graph cannot capture it: {reason}"
    return Evidence(cause, sentence, {"exception": reason})


def _wrong(
    kernel: EagerKernel, result: EagerResult, output: Tensor, wrong: str, number: int
) -> Evidence:
    """Return the evidence for a wrong output of a replay.

    Args:
        number: number of earlier replays.
    """
    unwritten = int((output.isnan() & result.output.isfinite()).sum())
    numbers = {
        "values": result.about,
        "replays_before": number,
        "unwritten": unwritten,
        "judged": wrong,
    }
    lacks = f"; {unwritten:,} of {output.numel():,} output elements are not written"
    replay = f"in a replayed CUDA graph it is wrong with {result.about}{lacks if unwritten else ''}"
    if _reads_early(kernel):
        return Evidence(
            "other-stream",
            f"{replay}; in eager mode, it reads inputs before the current stream has written them, "
            "because it works on another stream that does not wait",
            numbers,
        )
    if unwritten:
        sentence = f"{replay}: part of the work ran during the capture and is not in the graph"
        return Evidence("stale-in-graph", sentence, numbers)
    old, first = kernel.first, wrong.partition(";")[0]
    if number != 1:
        return Evidence("replay-differs", f"{replay}, and right in eager mode: {first}", numbers)
    attention = kernel.kernel
    probe = Probe(old.call, lambda *_: None, attention.accuracy_class, attention.chosen)
    where = "new values in the memory that a CUDA graph captured"
    if found := from_old_values(
        probe, output, old.output, where, right=result.call, before=old.call
    ):
        return replace(found, cause="stale-in-graph", numbers={**numbers, **found.numbers})
    return Evidence(
        "stale-in-graph",
        f"{replay}, and right with the captured ones: the graph keeps a number, such as a scale, "
        f"that was computed from them: {first}",
        numbers,
    )


def _reads_early(kernel: EagerKernel) -> bool:
    """Return True if the kernel reads inputs before the current stream has written them."""
    memory = kernel.first.call.to(kernel.call.device)
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        torch.cuda._sleep(DELAY)
        write(memory, kernel.new.call)
        output = kernel.run(memory).clone()
    torch.cuda.synchronize()
    return bool(kernel.new.difference(output))
