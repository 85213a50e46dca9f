"""Errors of a kernel in a function that `torch.compile` compiles."""

from __future__ import annotations

import contextlib
import logging
import re
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from capture.text.printable import printable
from replay.diagnosis.eager_kernel import EagerKernel, EagerResult
from replay.diagnosis.subject import Evidence
from replay.isolation.inputs import aliases
from replay.kernels.compiled_functions import import_compiler
from replay.kernels.declared_arguments import original, passed
from replay.kernels.failures import classify

ROUNDS = 2
"""Number of times that the compiled function runs on each call."""

LINE = re.compile(r'File "(.+)", line (\d+), in ')


def in_compile(kernel: EagerKernel) -> Evidence | None:
    """Test a small compiled function around the kernel: new values, then another length.

    A function without graph breaks is the same program with and without `fullgraph=True`, so the
    default is tested only if `fullgraph=True` fails.

    Raises:
        CannotCompare: the kernel is wrong in eager mode.
    """
    import_compiler()
    from torch._inductor import config

    try:
        # A pool of processes would take longer to start than to compile.
        with config.patch(compile_threads=1), _quiet():
            whole = _tested(kernel, fullgraph=True)
            if whole is None or whole.cause != "compile-error":
                return whole
            if found := _tested(kernel, fullgraph=False):
                return found
    finally:
        torch._dynamo.reset()
    sentence = f"torch.compile splits a graph at the kernel: {whole.numbers['exception']}"
    return replace(whole, cause="graph-break", sentence=sentence)


def _tested(kernel: EagerKernel, *, fullgraph: bool) -> Evidence | None:
    """Return evidence if the compiled function raises or is wrong on one of the calls."""
    results = [kernel.first, kernel.new, *filter(None, [kernel.shorter])] * ROUNDS
    run = _compiled(kernel, fullgraph=fullgraph)
    for number, result in enumerate(results):
        numbers = {"fullgraph": fullgraph, "values": result.about}
        try:
            wrong = result.difference(run(result))
        except Exception as error:
            reason = _reason(error)
            sentence = f"in torch.compile, with {result.about}: {reason}"
            return Evidence("compile-error", sentence, {**numbers, "exception": reason})
        if wrong:
            then = "in eager mode"
            if number and not result.difference(_compiled(kernel, fullgraph=fullgraph)(result)):
                then = "if compiled with them, so the code keeps something from earlier values"
                numbers["right_if_compiled_anew"] = True
            sentence = f"in torch.compile it is wrong with {result.about}, and right {then}: "
            sentence += wrong.partition(";")[0]
            evidence = Evidence("compile-differs", sentence, {**numbers, "judged": wrong})
            again = _compiled(kernel, fullgraph=fullgraph)
            repeated = [each.difference(again(each)) for each in results[: number + 1]]
            return kernel.verified(evidence, any(repeated))
    return None


def _compiled(kernel: EagerKernel, *, fullgraph: bool) -> Callable[[EagerResult], Tensor]:
    """Return a function that runs the kernel in newly compiled code."""
    attention = kernel.kernel.attention
    function = original(attention)

    def attend(positions: list[Any], named: dict[str, Any]) -> Tensor:
        output: Tensor = function(*positions, **named)
        return output

    torch._dynamo.reset()  # code is compiled again for a limited number of shapes only
    compiled = torch.compile(attend, fullgraph=fullgraph)
    return lambda result: compiled(*passed(attention, aliases(result.call)))


@contextlib.contextmanager
def _quiet() -> Iterator[None]:
    """Hide the compiler's warnings about graph breaks, which are findings."""
    logger = logging.getLogger("torch._dynamo")
    before = logger.level
    logger.setLevel(logging.ERROR)
    try:
        yield
    finally:
        logger.setLevel(before)


def _reason(error: Exception) -> str:
    """Return a sentence about an exception, with the kernel's line that the compiler names."""
    reason = classify(error).reason
    _, _, stack = str(error).partition("from user code:")
    for file, line in LINE.findall(stack)[1:2]:  # the first line is that of the function around it
        reason += f" ({printable(Path(file).name)}, line {line})"
    return reason
