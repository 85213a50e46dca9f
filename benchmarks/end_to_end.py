"""Runs full-size models with random weights with every kernel (needs a GPU).

    python -m benchmarks.end_to_end [--models cogvideo,flux,llama] [--kernels NAMES]
                                    [--env NAME=PYTHON] [--out FILE]

Captures and replays CogVideoX-2b (17,776 tokens), FLUX.1-dev (1024²) and Llama-2-7b (a 4,096-token
prompt, then 64 tokens), and runs each with every kernel; speed-ups are predicted and measured.
Writes `benchmarks/results/end_to_end.csv`, one line for each kernel and span of a model, and the
printed output next to it as `.txt`.
"""

from __future__ import annotations

import argparse
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from benchmarks import results
from benchmarks.full_size import run
from benchmarks.gpu import gpu
from replay.rows.fields import leaf

MODELS = {  # length of a run, and number of its calls that are replayed
    "cogvideo": "--steps 2 --max 2",
    "flux": "--steps 4 --max 4",
    "llama": "--steps 64 --max 8",
}
KERNELS = (
    "torch-default,torch-flash,?age1,flashinfer-?a3,?a4,"
    "triton-fa2,triton-fa3,triton-sage,triton-fp8,triton-decode"
)
SPAN = ("ms.p10", "ms.p50", "ms.p90", "tokens_per_second", "speedup.ratio", "speedup.low")
PREDICTED = ("speedup.value", "speedup.low", "speedup.high", "attention_share")
WHOLE = ("hits", "copies", "peak_bytes", "sm_clock_mhz", "power_w")
MACHINE = ("device", "torch", "cuda", "triton")
COLUMNS = (
    "model",
    "weights",
    "span",
    "kernel",
    "status",
    "reason",
    *(f"measured.{name}" for name in (*SPAN, "speedup.high")),
    *(f"predicted.{name}" for name in PREDICTED),
    "prediction_error",
    *WHOLE,
    "fallbacks",
    "drift",
    *(f"machine.{name}" for name in MACHINE),
)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0] if __doc__ else None)
    parser.add_argument("--kernels", default=KERNELS)
    parser.add_argument("--models", default=",".join(MODELS))
    parser.add_argument("--size", default="full", help="model size: full, or tiny for a trial run")
    parser.add_argument("--rounds", type=int, default=9, help="timed runs of the model per kernel")
    parser.add_argument("--out", type=Path, default=results.DIRECTORY / "end_to_end.csv")
    parser.add_argument("--env", action="append", default=[], metavar="NAME=PYTHON")
    arguments = parser.parse_args()
    if arguments.size == "full":
        gpu()
    environments = " ".join(f"--env {each}" for each in arguments.env)
    lines: list[dict[str, str]] = []
    printed = ""
    for model in arguments.models.split(","):
        with tempfile.TemporaryDirectory() as scratch:
            recorded = Path(scratch) / "captured"
            rows, checks = Path(scratch) / "rows.jsonl", Path(scratch) / "checks.jsonl"
            run(
                f"capture --model {model} --size {arguments.size} --weights random {MODELS[model]} "
                f"--out {recorded}"
            )
            printed += run(
                f"replay verify --dir {recorded} --model-rounds {arguments.rounds} --max-seconds 2 "
                f"--kernels {arguments.kernels} {environments} --json {rows} --checks {checks}"
            )
            machine = next(results.read_jsonl(rows))["machine"]
            lines += [
                line | {f"machine.{name}": machine.get(name) for name in MACHINE}
                for checked in results.read_jsonl(checks)
                for line in spans(checked)
            ]
            results.write_lines(lines, COLUMNS, arguments.out)
            arguments.out.with_suffix(".txt").write_text(printed)


def spans(checked: dict[str, Any]) -> Iterator[dict[str, Any]]:
    """Yield a line for each span of one kernel in one model; one line if the kernel failed."""
    line = {name: checked.get(name) for name in ("model", "weights", "kernel", "status", "reason")}
    line |= {name: checked.get(name) for name in WHOLE}
    drift = checked["drift"]
    line["fallbacks"] = "; ".join(f"{n} × {why}" for why, n in checked["fallbacks"].items())
    line["drift"] = "; ".join(f"{name} {results.cell(each)}" for name, each in drift.items())
    prediction = checked["prediction"] or {"phases": {}, "run": None}
    for span, measured in (checked["measured"] or {"": {}}).items():
        predicted = prediction["run"] if span == "run" else prediction["phases"].get(span)
        yield line | {
            "span": span,
            "prediction_error": checked["prediction_error"].get(span),
            **{f"measured.{name}": leaf(measured, name) for name in (*SPAN, "speedup.high")},
            **{f"predicted.{name}": leaf(predicted or {}, name) for name in PREDICTED},
        }


if __name__ == "__main__":
    main()
