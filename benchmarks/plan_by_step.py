"""Plans whose kernels change with the denoising step or the key length, whatever their errors."""

from __future__ import annotations

import statistics
from collections.abc import Sequence

from capture.storage.capture_record import CaptureRecord
from replay.plan.key_lengths import KeyLengths
from replay.plan.plan import Budget, LayerChoice, Plan
from replay.plan.step_ranges import KernelsByStep, StepRange
from replay.rows.row import Row


def plan_of(capture: CaptureRecord, rows: Sequence[Row], device: str) -> Plan:
    """Return a plan whose layers change their kernels with the step or the key length."""
    lengths: dict[tuple[str, str], list[int]] = {}
    last: dict[tuple[str, str], int] = {}
    for row in capture.census["rows"]:
        layer = row["module"], row["phase"]
        key = capture.census["signatures"][row["signature"]]["key"]
        lengths.setdefault(layer, []).append(key[-2])
        last[layer] = max(last.get(layer, 0), row["last_step"])
    choices: list[LayerChoice] = []
    for (module, phase), kv_lens in lengths.items():
        fastest, second = fastest_two(rows, phase)
        low, high, middle = min(kv_lens), max(kv_lens), statistics.median_high(kv_lens)
        number = sum(choice.phase == phase and choice.kernel == second for choice in choices)
        if phase == "denoise":
            start, end = 1 + number % 2, last[module, phase]
            parts = [(fastest, (start, end - 1)), (second, (end, end))]
            for kernel, steps in parts:
                choices.append(choice_of(module, phase, kernel, (low, high), StepRange(*steps)))
        elif phase == "decode" and low < middle:
            choices.append(choice_of(module, phase, second, (low, middle - 1)))
            choices.append(choice_of(module, phase, fastest, (middle, high)))
        elif phase in ("prefill", "decode"):
            choices.append(choice_of(module, phase, fastest, (low, high)))
    budget = Budget("cosine", -1.0)
    return Plan(capture.model, capture.weights, budget, "torch-default", choices, {}, device)


def fastest_two(rows: Sequence[Row], phase: str) -> list[str]:
    """Return the two kernels that are fastest on a phase's calls, among those right on all."""
    mine = [row for row in rows if row.call.phase == phase]
    ms: dict[str, list[float]] = {}
    for row in mine:
        if row.status == "ok" and row.time_ms is not None and not row.is_unconfirmed:
            ms.setdefault(row.kernel, []).append(row.time_ms.p50)
    calls = len({row.call.name for row in mine})
    total = {kernel: sum(each) for kernel, each in ms.items() if len(each) == calls}
    ranked = sorted(total, key=lambda kernel: total[kernel])
    return [*ranked, "torch-default", "torch-default"][:2]


def choice_of(
    module: str, phase: str, kernel: str, kv_lens: tuple[int, int], steps: StepRange | None = None
) -> LayerChoice:
    """Return a choice without figures."""
    return LayerChoice(
        module=module,
        phase=phase,
        kernel=kernel,
        covered=True,
        inside=True,
        worst=None,
        time_ms=None,
        baseline_ms=None,
        saved_ms=0.0,
        calls=0,
        captured=0,
        kv_lens=KeyLengths(*kv_lens),
        steps=steps,
    )


def text_of(plan: Plan) -> str:
    """Name the kernels of the plan, without the modules."""
    texts = []
    for at in plan.by_module.values():
        for phase, kernels in at.items():
            text = str(kernels)
            if not isinstance(kernels, KernelsByStep):
                text = ", ".join(f"{name} from {start} keys" for start, name in reversed(kernels))
            texts.append(f"{phase} {text}")
    return " | ".join(dict.fromkeys(texts))
