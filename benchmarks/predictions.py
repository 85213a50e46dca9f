"""Compares predicted and measured speed-ups of models, on a CPU or on a GPU.

    python -m benchmarks.predictions [--models plain,bert] [--kernels NAMES] [--rounds 20]
    python -m benchmarks.predictions --device cuda

Records models and runs each with every kernel: on a CPU the built-in models and those of
`benchmarks/small_models.py`, on a GPU Llama and Flux, tiny and at full size (random weights).
Prints each model's phases with the prediction, its interval and the measurement, and how many
predictions hold: those within 3 % of the measurement, or whose interval contains it. On a CPU, one
thread is used, so that other programs disturb a forward less often; the measurement's own interval
is printed as its noise. Writes `benchmarks/results/predictions.csv`, or `predictions_gpu.csv`,
after each model.
"""

from __future__ import annotations

import argparse
import os
import tempfile
from collections.abc import Iterator
from pathlib import Path
from statistics import median
from typing import Any

from benchmarks import results
from benchmarks.full_size import run

MODELS = {
    "cpu": {
        "llama": "--model llama --weights random --steps 8 --max per-layer",
        "flux": "--model flux --weights random --steps 4 --max per-layer",
        **{
            name: f"--model benchmarks/small_models.py:{name} --max per-layer"
            for name in ("plain", "dit", "bert", "eager_bert", "vit", "gpt2")
        },
    },
    "cuda": {
        "llama": "--model llama --size tiny --weights random --steps 32 --max 8",
        "flux": "--model flux --size tiny --weights random --steps 8 --max 8",
        "llama-full": "--model llama --size full --weights random --steps 32 --max 6",
        "flux-full": "--model flux --size full --weights random --steps 4 --max 4",
    },
}
"""Options of `capture` for each model, by type of device."""
KERNELS = {
    "cpu": "torch-default,torch-math,torch-flash,eager,torch-masked",
    "cuda": "torch-default,torch-flash,flex",
}
OUT = {"cpu": "predictions.csv", "cuda": "predictions_gpu.csv"}
WITHIN = 0.03
COLUMNS = (
    "model",
    "span",
    "kernel",
    "predicted",
    "predicted_low",
    "predicted_high",
    "measured",
    "measured_low",
    "measured_high",
    "error",
    "holds",
)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0] if __doc__ else None)
    parser.add_argument("--device", choices=tuple(MODELS), default="cpu")
    parser.add_argument("--models", help="default: all of the device")
    parser.add_argument("--kernels", help="default: those of the device")
    parser.add_argument("--rounds", type=int, default=20, help="timed runs of the model per kernel")
    parser.add_argument("--out", type=Path)
    arguments = parser.parse_args()
    device = arguments.device
    kernels = arguments.kernels or KERNELS[device]
    out = arguments.out or results.DIRECTORY / OUT[device]
    if device == "cpu":
        os.environ |= {"OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": ""}
    lines: list[dict[str, Any]] = []
    for model in arguments.models.split(",") if arguments.models else MODELS[device]:
        with tempfile.TemporaryDirectory() as scratch:
            recorded, checks = Path(scratch) / "recorded", Path(scratch) / "checks.jsonl"
            run(f"capture {MODELS[device][model]} --out {recorded} --quiet")
            run(
                f"replay verify --dir {recorded} --trust-code --kernels {kernels} --max-seconds 2 "
                f"--device {device} --model-rounds {arguments.rounds} --checks {checks} --quiet"
            )
            for checked in results.read_jsonl(checks):
                lines += [{"model": model, **line} for line in spans(checked)]
        results.write_lines(lines, COLUMNS, out)
    if not lines:
        raise SystemExit("no speed-up was both predicted and measured")
    for line in lines:
        print(
            f"{line['model']:<10} {line['span']:<8} {line['kernel']:<13} predicted "
            f"{line['predicted']:.3f} ({line['predicted_low']:.3f}-{line['predicted_high']:.3f}) "
            f"measured {line['measured']:.3f} ({line['measured_low'] or 0:.3f}-"
            f"{line['measured_high'] or 0:.3f}) {100 * line['error']:+.1f} % "
            f"{'' if line['holds'] else 'MISSED'}"
        )
    widths = [
        (line["predicted_high"] - line["predicted_low"]) / 2 / line["predicted"] for line in lines
    ]
    held = sum(line["holds"] for line in lines)
    print(
        f"{held} of {len(lines)} predictions hold ({held / len(lines):.0%}); median error "
        f"{100 * median(line['error'] for line in lines):+.1f} %, median half-width "
        f"{100 * median(widths):.1f} %"
    )


def spans(checked: dict[str, Any]) -> Iterator[dict[str, Any]]:
    """Yield a line for each phase that was predicted and measured."""
    phases = (checked["prediction"] or {"phases": {}})["phases"]
    for span, measured in (checked["measured"] or {}).items():
        predicted = phases.get(span) and phases[span]["speedup"]
        error = checked["prediction_error"].get(span)
        if predicted is None or error is None:
            continue
        ratio = measured["speedup"]["ratio"]
        yield {
            "span": span,
            "kernel": checked["kernel"],
            "predicted": predicted["value"],
            "predicted_low": predicted["low"],
            "predicted_high": predicted["high"],
            "measured": ratio,
            "measured_low": measured["speedup"]["low"],
            "measured_high": measured["speedup"]["high"],
            "error": error,
            "holds": abs(error) <= WITHIN or predicted["low"] <= ratio <= predicted["high"],
        }


if __name__ == "__main__":
    main()
