"""Compares kernel errors on trained weights, random weights and random values (needs a GPU).

    python -m benchmarks.trained_weights [--kernels NAMES] [--out FILE]

Records the built-in models with trained and random weights, replays both recordings and random
values of the same shapes through every kernel, and runs the trained models with each kernel. Writes
`benchmarks/results/trained_weights.csv`: one line per kernel, model, phase and kind of values.
"""

from __future__ import annotations

import argparse
import statistics
import tempfile
from collections import defaultdict
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from benchmarks import results
from benchmarks.full_size import run
from benchmarks.gpu import gpu
from models import pretrained_weights
from replay.workloads.synthetic_counterparts import MATCHED, RANDOM

MODELS = ("cogvideo", "flux", "llama")
KERNELS = (
    "torch-default,torch-flash,flashinfer-fa3,triton-fa2,triton-fa3,?age1,triton-sage,triton-sage[smooth_k=off],"
    "triton-fp8,triton-fp8[smooth_k=off],triton-sage-fp8,triton-sage-fp8[smooth_k=off],"
    "triton-sparse-decode"
)
VALUES = {"pretrained": "trained weights", "random": "random weights"}
DRIFT = (
    *("relative_l1", "psnr", "ssim", "kl", "top1_agreement", "baseline_perplexity", "perplexity"),
    *("generated_kl", "generated_compared"),
)
MACHINE = ("device", "torch", "cuda", "triton")
COLUMNS = (
    "model",
    "phase",
    "values",
    "kernel",
    "calls",
    "status",
    "relative_l1.median",
    "relative_l1.worst",
    "cosine.worst",
    "drift.status",
    *(f"drift.{name}" for name in DRIFT),
    *(f"machine.{name}" for name in MACHINE),
)

Key = tuple[str, str, str, str]
"""Model, phase, kind of values, and kernel."""


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0] if __doc__ else None)
    parser.add_argument("--kernels", default=KERNELS)
    parser.add_argument("--models", default=",".join(MODELS))
    parser.add_argument("--out", type=Path, default=results.DIRECTORY / "trained_weights.csv")
    arguments = parser.parse_args()
    gpu()
    lines: list[dict[str, Any]] = []
    for model in arguments.models.split(","):
        with tempfile.TemporaryDirectory() as scratch:
            rows: list[dict[str, Any]] = []
            for weights in VALUES:
                recorded, file = f"{scratch}/{weights}", Path(scratch) / f"{weights}.jsonl"
                run(
                    f"capture --model {model} --size tiny --weights {weights} --dtype bfloat16 "
                    f"--max 10 --out {recorded}"
                )
                run(
                    f"replay --dir {recorded} --kernels {arguments.kernels} --versus-random "
                    f"--max-seconds 0.1 --metric accuracy --json {file}"
                )
                rows += [row | {"of": VALUES[weights]} for row in results.read_jsonl(file)]
            held_out = pretrained_weights.ROOT / "llama" / "held_out.txt"
            text = f"--text {held_out}" if model == "llama" else ""
            checks = Path(scratch) / "checks.jsonl"
            run(
                f"replay verify --dir {scratch}/pretrained --kernels {arguments.kernels} {text} "
                f"--max-seconds 0.1 --model-rounds 3 --checks {checks}"
            )
            lines += summary(rows, {each["kernel"]: each for each in results.read_jsonl(checks)})
            results.write_lines(lines, COLUMNS, arguments.out)


RANDOM_VALUES = {RANDOM: "random values", MATCHED: "random values, matched"}


def summary(
    rows: list[dict[str, Any]], checks: dict[str, dict[str, Any]]
) -> Iterator[dict[str, Any]]:
    """Summarise errors by kind of values, with the drift of the trained model's output.

    Args:
        checks: the objects of `replay verify --checks` for the trained model, by kernel.
    """
    groups: dict[Key, list[dict[str, Any]]] = defaultdict(list)
    for row in rows:
        if row["status"] not in ("unavailable", "unsupported"):
            call = row["call"]
            values = RANDOM_VALUES.get(call["weights"], row["of"])
            groups[call["model"], call["phase"], values, row["kernel"]].append(row)
    for (model, phase, values, kernel), group in groups.items():
        errors = [row["accuracy"]["reference"] for row in group if row["accuracy"]]
        if not errors:
            continue
        machine = group[0]["machine"]
        checked = checks.get(kernel) if values == VALUES["pretrained"] else None
        drift = {} if checked is None else checked["drift"]
        yield {
            "model": model,
            "phase": phase,
            "values": values,
            "kernel": kernel,
            "calls": len(group),
            "status": " ".join(sorted({row["status"] for row in group})),
            "relative_l1.median": statistics.median(each["relative_l1"] for each in errors),
            "relative_l1.worst": max(each["relative_l1"] for each in errors),
            "cosine.worst": min(each["cosine"] for each in errors),
            "drift.status": None if checked is None else checked["status"],
            **{f"drift.{name}": drift.get(name) for name in DRIFT},
            **{f"machine.{name}": machine.get(name) for name in MACHINE},
        }


if __name__ == "__main__":
    main()
