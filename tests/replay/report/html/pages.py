"""Hand-made rows and checks of a replay on a GPU."""

import math
import random
from dataclasses import asdict
from typing import Any

from replay.end_to_end.model_check import MeasuredSpan, ModelResult
from replay.end_to_end.predicted_times import RUN
from replay.end_to_end.prediction import Prediction
from replay.rows.errors_of_output import Accuracy, AccuracyClass, Where
from replay.rows.row import GpuState, Machine, Roof, Row
from replay.sketches.foretold_drift import ForetoldDrift
from replay.timing.statistics import paired_speedup, summarize
from tests import factories
from tests.replay.end_to_end.predictions import predicted

HOSTILE = "</script><img src=x onerror=document.title='broken'>"
"""Name that is markup."""

CLEAN = {"nan_count": 0, "baseline_nan_count": 0, "frames": 9, "relative_l1": 0.01, "cosine": 0.999}
CLASSES: tuple[AccuracyClass, ...] = ("exact", "quantised")
LIMITS = (0.002, 0.1)


def rows(
    kernels: int = 6, calls: int = 8, heads: int = 4, *, model: str = "model", on_gpu: bool = True
) -> list[Row]:
    """Return rows of `torch-default` and kernels on two layers; the last is wrong once."""
    chance = random.Random(0)
    found = []
    for at in range(calls):
        facts = factories.call_facts(
            f"call-{at}", f"blocks.{at % 2}.attn", step=at // 2, call_index=at, model=model
        )
        own = [chance.gauss(2.0, 0.02) for _ in range(10)]
        for number in range(kernels):
            name = "torch-default" if number == 0 else f"kernel-{number}"
            times = [ms / (1 + number / 10) * chance.gauss(1, 0.005) for ms in own]
            wrong = number == kernels - 1 and at == 1
            error = 0.5 if wrong else 10 ** -(6 - number % 4)
            field = [[error * chance.uniform(0.5, 2) for _ in range(64)] for _ in range(heads)]
            field[0][0] = math.nan if wrong else field[0][0]
            where = Where(2 * error, error, (0, 1), (2, 3), tuple(map(tuple, field)))
            speedup = paired_speedup(own, times)
            found.append(
                factories.row(
                    name,
                    facts,
                    times,
                    "inaccurate" if wrong else "ok",
                    "cosine 0.8 is below 0.99" if wrong else "",
                    speedup=(
                        None if number == 0 else factories.speedup_over("torch-default", speedup)
                    ),
                    accuracy=Accuracy(
                        factories.errors(cosine=1 - error, relative_l1=error),
                        where=where,
                        tolerance_ratio=error / LIMITS[number % 2],
                    ),
                    accuracy_class=CLASSES[number % 2],
                    tflops=300.0 * (1 + number / 10),
                    gb_per_s=900.0,
                    flop_per_byte=300.0,
                    roof=Roof(700.0, 4000.0),
                    roof_share=0.43 * (1 + number / 10),
                    gpu_during=GpuState(1500 + at, 690.0, 60, (), 2600) if on_gpu else None,
                    machine=Machine(device="NVIDIA H200", torch="2.11.0"),
                )
            )
    return found


def checks(*kernels: str, model: str = "model") -> list[dict[str, Any]]:
    """Return checks of the model's own attention and of kernels 1.1, 1.2 … times as fast."""
    found = [_checked("the model's own", model, None)]
    found += [_checked(name, model, 1 + at / 10) for at, name in enumerate(kernels, start=1)]
    return [asdict(each) for each in found]


def foretold() -> dict[str, Any]:
    """Return a foretold error of an encoder, which is exact, and of two layers and steps.

    The error of the last place cancels a part of the others.
    """
    shares: dict[str, list[float | None]] = {
        "encoder.attn": [0.0, None, None],
        "blocks.0.attn": [None, 0.6, 0.255],
        "blocks.1.attn": [None, 0.15, -0.005],
    }
    columns = ["encode", "0", "1"]
    steps = {"0": 0.75, "1": 0.25}
    modules = {"encoder.attn": 0.0, "blocks.0.attn": 0.855, "blocks.1.attn": 0.145}
    found = ForetoldDrift(0.01, "relative_l2", 0.5, 41.0, modules, steps, columns, shares)
    return asdict(found)


def _checked(kernel: str, model: str, ratio: float | None) -> ModelResult:
    found = ModelResult(kernel, model, "random", hits=12, fallbacks={"takes no mask": 3})
    found.curves["loss"] = [3.25, 2.5, 2.25, math.nan] if ratio is None or ratio < 1.2 else [3.25]
    for span in ("denoise", RUN):
        gain = None if ratio is None else factories.speedup(ratio, ratio - 0.02, ratio + 0.02)
        ms = 100.0 / (ratio or 1)
        found.measured[span] = MeasuredSpan(summarize([ms] * 6), gain, None, ms / 1000)
    if ratio is not None:
        spans = {span: predicted(span, ratio + 0.01) for span in ("denoise", RUN)}
        found.prediction = Prediction(spans.pop(RUN), spans)
        found.drift = {
            "frame_mse": 7.6e-5,
            "psnr": 41.2,
            "ssim": 0.993,
            "worst_psnr": 39.0,
            "black_frames": 0,
        } | CLEAN
    return found
