"""Compares predicted and measured speed-ups of plans over denoising steps (needs a GPU).

    python -m benchmarks.step_plans [--models own,flux] [--modes eager,compiled] [--seconds 480]

Runs CogVideoX-2b, FLUX.1-dev and Llama-2-7b at full size with random weights, and a denoiser of a
user's own file. Errors of random weights mean nothing, so the plans are not chosen by error: the
first steps keep the model's own attention, the last one has the second fastest kernel, and those
between the fastest; every other layer changes one step later. A language model, which has no steps,
has the fastest kernel for prefill, and changes its kernel of decode at the middle key length.

Modes are `eager`, `compiled` (the denoiser or the decoder), `reduce-overhead` (compiled with CUDA
graphs) and `verify`, the public function, which builds the model in another process. Writes
`benchmarks/results/step_plans.csv`: a line for each phase, and for the run, in each mode. A line
`holds` if the prediction is within 3 % of the measurement, with no graph break, no recompilation
across steps (of a language model: in a second run), and a refusal of a CUDA graph that the user
captures. The last printed line says what a plan costs a call. Every line is written at once.
"""

from __future__ import annotations

import argparse
import gc
import logging
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch._dynamo.utils import (
    clear_compilation_metrics,
    counters,
    get_compilation_metrics,
)

import attention_replay as ar
import models
from benchmarks import results
from benchmarks.gpu import MACHINE, gpu, measured_on
from benchmarks.plan_by_step import plan_of, text_of
from benchmarks.plan_cost import plan_cost
from capture.hooks.modules import denoisers
from capture.storage.capture_record import CaptureRecord
from capture.storage.dataset import Dataset
from replay.end_to_end.live_model import LiveModel
from replay.end_to_end.model_check import ModelResult, check
from replay.end_to_end.model_process import Variant
from replay.end_to_end.run_pace import RunPace
from replay.plan.plan import Plan
from replay.plan.plan_device import type_of
from replay.report.cells import interval_text
from replay.rows.row import KernelId, Row
from replay.timing.defaults import MINIMUM_ROUNDS

OWN = "benchmarks/own_denoiser.py:denoiser"
MODELS = {  # steps, recorded calls and modes
    "own": (8, 2, "eager,compiled,reduce-overhead,verify"),
    "cogvideo": (4, 2, "eager,compiled"),
    "flux": (4, 2, "eager,compiled"),
    "llama": (32, 6, "eager,compiled"),
}
KERNELS = {
    "cuda": "torch-default,torch-flash,torch-cudnn,triton-fa3,triton-fp8,triton-sage-fp8,"
    "triton-decode",
    "cpu": "torch-default,torch-math,torch-flash",
}
WITHIN = 0.03
logger = logging.getLogger(__name__)
COLUMNS = (
    *("model", "mode", "span", "steps", "plan", "attention_share", "predicted", "measured", "low"),
    *("high", "error", "graphs", "graph_breaks", "recompiled", "recompiled_again", "plan_us"),
    *("step_us", "cuda_graph", "holds", "reason"),
    *MACHINE,
)


class TimeUp(Exception):
    """The time limit is over."""


class Limit(NamedTuple):
    """Time limit of the benchmark, on the clock of `time.monotonic`."""

    end: float

    def check(self) -> None:
        """Raise TimeUp after the end."""
        if time.monotonic() > self.end:
            raise TimeUp("not run: --seconds is over")


class Ready(NamedTuple):
    """Model with its recording, the rows and the plan."""

    device: str
    runnable: models.Runnable
    capture: CaptureRecord
    recorded: Path
    rows: list[Row]
    plan: Plan
    file: Path


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--models", default=",".join(MODELS))
    parser.add_argument("--modes", help="default: eager and compiled, and all for `own`")
    parser.add_argument("--size", default="full", help="model size: full, or tiny for a trial run")
    parser.add_argument("--steps", type=int, help="denoising steps or new tokens, at least 4")
    parser.add_argument("--backend", default="inductor", help="compiler; aot_eager is a fast trial")
    parser.add_argument("--seconds", type=float, default=480, help="time limit")
    parser.add_argument("--out", type=Path, default=results.DIRECTORY / "step_plans.csv")
    arguments = parser.parse_args()
    logging.basicConfig(format="%(asctime)s %(message)s", level=logging.INFO)
    device = gpu() if arguments.size == "full" else torch.device("cpu")
    limit = Limit(time.monotonic() + arguments.seconds)
    common = measured_on(device) | plan_cost(device)._asdict()
    lines: list[dict[str, Any]] = []

    def write(found: dict[str, Any]) -> None:
        lines.append(common | found)
        lines[-1]["holds"] = holds(lines[-1])
        results.write_lines(lines, COLUMNS, arguments.out)
        print(shown(lines[-1]), flush=True)

    for name in arguments.models.split(","):
        steps, calls, modes = MODELS[name]
        steps = arguments.steps or steps
        with tempfile.TemporaryDirectory() as scratch:
            try:
                ready = prepare(name, arguments.size, steps, calls, Path(scratch), limit)
            except Exception as error:
                write({"model": name, "steps": steps, "reason": sentence(error)})
                continue
            for mode in (arguments.modes or modes).split(","):
                line = {"model": name, "mode": mode, "steps": steps, "plan": text_of(ready.plan)}
                try:
                    for more in measured(ready, mode, arguments.backend, limit):
                        write(line | more)
                except Exception as error:
                    write(line | {"reason": sentence(error)})
            del ready
            gc.collect()
            torch.cuda.empty_cache()
    print("\n", *map(shown, lines), sep="\n")
    print(
        f"{sum(line['holds'] for line in lines)} of {len(lines)} lines hold; a plan costs a call "
        f"{common['plan_us']:.2f} µs, and its steps {common['step_us']:.2f} µs more; CUDA graph "
        f"{common['cuda_graph']}"
    )


def sentence(error: Exception) -> str:
    return f"{type(error).__name__}: {error}".splitlines()[0]


def shown(line: dict[str, Any]) -> str:
    head = f"{line['model']:<9}{line.get('mode', ''):<16}{line.get('span', ''):<8}"
    if line.get("predicted") is None:
        return f"{head} {line['reason']}"
    found = interval_text(line["measured"], line["low"], line["high"])
    text = (
        f"{head} attention {line['attention_share']:.0%}, predicted {line['predicted']:.3f}×, "
        f"measured {found}, {line['error']:+.1%}"
    )
    if "graphs" in line:
        text += (
            f", {line['graphs']} graphs, {line['graph_breaks']} breaks, recompiled "
            f"{line['recompiled']} then {line['recompiled_again']} times"
        )
    return f"{text}: {'holds' if line['holds'] else 'MISSED'}"


def holds(line: dict[str, Any]) -> bool:
    # The graphs of prefill and of decode with growing lengths differ, so only those of steps count.
    recompiled = "recompiled_again" if line["model"] == "llama" else "recompiled"
    within = line.get("error") is not None and abs(line["error"]) <= WITHIN
    one_graph = not line.get("graph_breaks") and not line.get(recompiled) and line.get("graphs", 1)
    is_refused = not line["cuda_graph"].startswith("captured")
    return bool(within and one_graph and is_refused)


def prepare(name: str, size: str, steps: int, calls: int, scratch: Path, limit: Limit) -> Ready:
    """Build a model, record a run, compare kernels and make a plan."""
    limit.check()
    kind: dict[str, Any] = {} if name == "own" else {"size": size, "weights": "random"}
    device = "cuda" if size == "full" else "cpu"
    runnable = models.load(OWN if name == "own" else name, steps=steps, device=device, **kind)
    recorded, watched = scratch / "recorded", runnable.pipeline or runnable.roots
    settings, weights = runnable.settings, runnable.weights
    name = Path(runnable.name).name
    with ar.record(watched, recorded, max=calls, name=name, weights=weights, settings=settings):
        runnable.run()
    limit.check()
    rows = ar.replay(
        recorded, kernels=KERNELS[device], device=device, max_seconds=1, for_model=True
    )
    capture = Dataset.open(str(recorded)).captures[0]
    plan = plan_of(capture, rows, type_of(torch.device(device)))
    plan.save(scratch / "plan.json")
    return Ready(device, runnable, capture, recorded, list(rows), plan, scratch / "plan.json")


def measured(ready: Ready, mode: str, backend: str, limit: Limit) -> Iterator[dict[str, Any]]:
    """Run the model in a mode, and yield a line for each phase and the run."""
    limit.check()
    if mode == "verify":
        found = ar.verify(
            ready.recorded,
            ready.rows,
            kernels="torch-default",
            plan=ready.file,
            model_rounds=MINIMUM_ROUNDS,
            trust_code=True,
            device=ready.device,
        )
        yield from spans(found[-1], {})
        return
    roots = ready.runnable.roots
    main = [roots[name] for name in denoisers(roots)] or list(roots.values())
    compiled: dict[str, int] = {}
    try:
        if mode != "eager":
            for module in main:
                module.compile(backend=backend, mode=None if mode == "compiled" else mode)
            compiled = compilations(ready)
        name = ready.file.name
        pace = RunPace()
        pace.changed = limit.check
        found = check(
            ready.capture,
            ready.rows,
            [Variant(name, plan=ready.file)],
            LiveModel(ready.runnable, pace),
            rounds=MINIMUM_ROUNDS,
            kernel_at={name: lambda *where: KernelId(ready.plan.kernel_at(*where))},
        )
    finally:
        for module in main:
            module._compiled_call_impl = None
    yield from spans(found[-1], compiled)


def compilations(ready: Ready) -> dict[str, int]:
    """Count graphs and graph breaks, and the recompilations of two runs with the plan."""
    torch._dynamo.reset()
    counters.clear()
    again: list[int] = []
    for _ in range(2):
        clear_compilation_metrics()
        with ar.use_plan(ready.plan, ready.runnable.roots):
            ready.runnable.run()
        made = get_compilation_metrics()
        again.append(sum(each.recompile_reason is not None for each in made))
    breaks, graphs = sum(counters["graph_break"].values()), counters["stats"]["unique_graphs"]
    counts = {"graphs": graphs, "graph_breaks": breaks}
    return {**counts, "recompiled": again[0], "recompiled_again": again[1]}


def spans(checked: ModelResult, compiled: dict[str, int]) -> Iterator[dict[str, Any]]:
    """Yield a line for each phase that was predicted and measured, and for the run."""
    if checked.status != "ok":
        raise RuntimeError(checked.reason)
    for span, found in checked.measured.items():
        predicted, speedup = checked.predicted(span), found.speedup
        assert speedup is not None  # the plan is not the baseline
        line = {"span": span, "measured": speedup.ratio, "low": speedup.low, "high": speedup.high}
        if predicted is None or predicted.speedup is None:
            yield {**line, "reason": checked.unpredicted or (predicted and predicted.reason)}
            continue
        yield {
            **line,
            **compiled,
            "attention_share": predicted.attention_share,
            "predicted": predicted.speedup.value,
            "error": checked.prediction_error(span),
        }


if __name__ == "__main__":
    main()
