"""Child process that builds a model once, then runs it with one kernel after another.

This worker process (`replay.workers.worker`) is separate, so that a crashing kernel affects nothing
else. Outputs are written to files, because tensors are never sent through the pipe.
"""

from __future__ import annotations

import contextlib
import sys
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file

from capture.hooks.modules import denoisers
from capture.models_package import import_models
from replay.end_to_end.census_check import counting
from replay.end_to_end.model_clock import Clock
from replay.end_to_end.predicted_times import RUN
from replay.end_to_end.run_pace import BUILDING, COUNTING
from replay.end_to_end.saved_outputs import keep
from replay.kernels.failures import classify
from replay.patch.call_counts import Swap
from replay.patch.call_dispatcher import Around
from replay.patch.use_kernel import use_kernel, use_own, use_plan
from replay.plan.plan import Plan
from replay.timing.gpu_state import gpu_is_lost, read_gpu_state
from replay.workers.worker import Hear, Say

_runnable: Any = None
"""Model of this process, once it is built."""


def handle(request: dict[str, Any], say: Say, _hear: Hear) -> None:
    """Handle one request; a failure of a kernel or of the model is also a valid reply.

    Requests are `{"step": "build", …}`, `{"step": "count"}` and `{"step": "run", …}`, as
    `replay.end_to_end.model_process` sends them.
    """
    global _runnable
    if request["step"] == "build":
        say(at=BUILDING)
        models = import_models()
        try:
            _runnable = models.load(**request["arguments"])
        except models.ModelError as error:
            say(refused=str(error))
            return
        say(built={"name": _runnable.name, "weights": _runnable.weights})
        return
    assert _runnable is not None, "build the model first"
    step(_runnable, request, say)


def step(runnable: Any, request: dict[str, Any], say: Say) -> None:
    """Run a model (`models.Runnable`) once, to time it or to count its calls."""
    try:
        if request["step"] == "count":
            _count(runnable, say)
        else:
            _run(runnable, request, say)
    except import_models().ModelError as error:
        say(refused=str(error))
    except Exception as error:
        if gpu_is_lost(_device(runnable)):
            say(lost=classify(error)[1], status="crash")
            return
        status, reason = classify(error)
        say(failed_run={"status": status, "reason": reason})


def _count(runnable: Any, say: Say) -> None:
    """Count calls in a separate run, because counting makes compiled models run eagerly."""
    say(at=COUNTING)
    with counting(runnable.roots) as census:
        runnable.run()
    say(counted=census.to_json())


def _run(runnable: Any, request: dict[str, Any], say: Say) -> None:
    # The path is appended after the model's own libraries are imported, so that versions from
    # another environment do not replace them.
    sys.path += [entry for entry in request["path"] if entry not in sys.path]
    device, name = _device(runnable), request["name"]
    say(at=name)
    on_gpu = device.type == "cuda"
    if on_gpu:
        torch.cuda.reset_peak_memory_stats(device)
    clock = Clock(_main_roots(runnable), device, lambda: say(at=name))
    waits, drains = request["waits"], request["drains"]
    looks_inside = waits is not None or drains
    around: Around = clock.call if looks_inside else contextlib.nullcontext
    with _swapped(request, runnable, around) as swap:
        with clock.running(waits, drains=drains) as times:
            result = runnable.run()
        if new_tokens := runnable.new_tokens(result):
            times.tokens[RUN] = new_tokens
        state = read_gpu_state(device)
        peak = torch.cuda.max_memory_allocated(device) if on_gpu else None
        if request["keep"] is not None:
            _keep(runnable, result, request, swap)
    say(
        ran={
            "times": asdict(times),
            "swap": _counts(swap, request),
            "peak_bytes": peak,
            "gpu": None if state is None else asdict(state),
        }
    )


def _keep(runnable: Any, result: Any, request: dict[str, Any], swap: Swap) -> None:
    """Write the outputs to files; a language model also reads the text, with the kernel in place.

    The text is skipped if the kernel handles none of its calls, as with a kernel for decoding. The
    model's own attention handles every call.
    """
    language = runnable.language
    tensors = dict(runnable.outputs(result).tensors)
    if request["text"] is not None and language is not None and language.score is not None:
        ids = language.encode(request["text"])
        before = swap.hits
        logits = language.score(ids)
        if swap.hits > before or not swap.kernels:
            tensors |= {"text_ids": ids, "text_logits": logits}
    save_file(tensors, Path(request["keep"]))
    if request["save"] is not None:
        directory, model = request["save"]
        decode = None if language is None else language.decode
        keep(tensors, Path(directory), model=model, kernel=request["name"], decode=decode)


def _swapped(
    request: dict[str, Any], runnable: Any, around: Around
) -> contextlib.AbstractContextManager[Swap]:
    if request["plan"] is not None:
        # The plan's device was checked before the model was built.
        allowed = {"any_device": True, "trust_code": request["trust_code"]}
        return use_plan(request["plan"], runnable.roots, **allowed, around=around)
    if request["kernel"] is None:
        return use_own(around)
    return use_kernel(request["kernel"], every_thread=True, around=around)


def _counts(swap: Swap, request: dict[str, Any]) -> dict[str, Any]:
    """Return the counts, named as in `replay.end_to_end.model_process.ModelRun`."""
    hits, own_calls, fallbacks = swap.hits, 0, dict(swap.fallbacks)
    if request["plan"] is not None:
        used = Plan.load(request["plan"]).kernels
        own_calls = sum(counts.hits for name, counts in swap.kernels.items() if name not in used)
        hits -= own_calls
    elif not swap.kernels:
        own_calls, fallbacks = swap.not_planned, {}
    return {
        "hits": hits,
        "own_calls": own_calls,
        "fallbacks": fallbacks,
        "copies": swap.layout_copies,
        "missing": swap.missing,
    }


def _device(runnable: Any) -> torch.device:
    """Return the device of a model's first parameter; the CPU if it has none."""
    parameters = (each for root in _main_roots(runnable).values() for each in root.parameters())
    first = next(parameters, None)
    return torch.device("cpu") if first is None else first.device


def _main_roots(runnable: Any) -> dict[str, torch.nn.Module]:
    """Return the denoisers, whose forwards are the model's steps; all roots if there are none."""
    roots: dict[str, torch.nn.Module] = runnable.roots
    return {name: roots[name] for name in denoisers(roots)} or roots
