"""The model's own process: builds it once, then runs it with one kernel after another.

`replay.worker` passes requests on to here, so that a kernel that takes the model down takes no more
than this process. Outputs are left in files, since tensors never travel through the pipe.
"""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file

from capture.models_package import import_models
from replay.checking import classify
from replay.gpu_state import gpu_is_lost, read_gpu_state
from replay.speedcheck.clock import clocked
from replay.speedcheck.keepsakes import keep
from replay.swap import Swap, use_kernel

Say = Callable[..., None]


@dataclass
class Served:
    """The model of this process."""

    runnable: Any
    device: torch.device


_served: Served | None = None


def serve(request: dict[str, Any], say: Say) -> None:
    """Answer one request; every failure of a kernel or the model is an answer too.

    Requests are `{"step": "build", …}` and `{"step": "run", …}`, as `replay.speedcheck.process`
    makes them.
    """
    global _served
    if request["step"] == "build":
        say(at="building the model")
        device = torch.device(request["device"])
        models = import_models()
        try:
            runnable = models.load(**request["arguments"], device=str(device))
        except models.ModelError as error:
            say(refused=str(error))
            return
        _served = Served(runnable, device)
        say(built={"name": runnable.name, "weights": runnable.weights})
        return
    assert _served is not None, "build comes first"
    sys.path += [entry for entry in request["path"] if entry not in sys.path]
    try:
        _run(_served, request, say)
    except Exception as error:
        if gpu_is_lost(_served.device):
            say(lost=classify(error)[1], status="crash")
            return
        status, reason = classify(error)
        say(failed_run={"status": status, "reason": reason})


def _run(served: Served, request: dict[str, Any], say: Say) -> None:
    runnable, device = served.runnable, served.device
    language = runnable.language
    name = request["name"]
    say(at=name)
    on_gpu = device.type == "cuda"
    if on_gpu:
        torch.cuda.reset_peak_memory_stats(device)
    with _swapped(request) as swap:
        with clocked(_main_roots(runnable), device, lambda: say(at=name)) as times:
            result = runnable.run()
            state = read_gpu_state(device)
        peak = torch.cuda.max_memory_allocated(device) if on_gpu else None
        tensors = {}
        if request["keep"]:
            outputs = runnable.outputs(result)
            tensors = dict(outputs.tensors)
            if request["text"] is not None and language is not None and language.score is not None:
                ids = language.encode(request["text"])
                tensors |= {"text_ids": ids, "text_logits": language.score(ids)}
    if request["keep"]:
        save_file(tensors, Path(request["keep"]))
    if request["save"] is not None:
        directory, model = request["save"]
        decode = None if language is None else language.decode
        keep(tensors, Path(directory), model=model, kernel=name, decode=decode)
    say(
        ran={
            "times": times.to_json(),
            "swap": None if swap is None else _told(swap),
            "peak_bytes": peak,
            "gpu": None if state is None else asdict(state),
        }
    )


@contextlib.contextmanager
def _swapped(request: dict[str, Any]) -> Iterator[Swap | None]:
    if request["plan"] is not None:
        from replay.swap import use_plan

        with use_plan(request["plan"], module=_served.runnable.roots if _served else None) as swap:
            yield swap
    elif request["kernel"] is not None:
        with use_kernel(request["kernel"]) as swap:
            yield swap
    else:
        yield None


def _told(swap: Swap) -> dict[str, Any]:
    return {"hits": swap.hits, "fallbacks": dict(swap.fallbacks), "copies": swap.layout_copies}


def _main_roots(runnable: Any) -> dict[str, torch.nn.Module]:
    """The modules whose forwards are a model's steps: the one that calls are sampled from."""
    main = runnable.sampled.partition(".")[0]
    roots: dict[str, torch.nn.Module] = runnable.roots
    return {main: roots[main]} if main in roots else roots
