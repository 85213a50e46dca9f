"""End-to-end checks in a report: predicted and measured speed-ups of the model."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from replay.end_to_end import drift
from replay.end_to_end.predicted_times import RUN
from replay.report.cells import interval_text
from replay.report.explanation import span_name
from replay.sketches.foretold_drift import ForetoldDrift

LINE = 0.005
"""Width of a line in a chart, as a share of its height."""

Check = Mapping[str, Any]
"""Check of one kernel in one model, as a line of the JSON file of checks."""


def answers(checks: Sequence[Check]) -> Iterator[str]:
    """Yield a sentence on the fastest kernel and its output, for the whole run, then its parts."""
    for span in _spans(checks):
        right = [each for each in checks if each["status"] == "ok" and not each.get("wrong")]
        timed = [each for each in right if _speedup(each, span)]
        if not timed:
            continue
        best = max(timed, key=lambda each: _speedup(each, span)["ratio"])
        speedup, predicted = _speedup(best, span), _predicted(best, span)
        ends = speedup["low"], speedup["high"]
        text = f"{best['kernel']} {interval_text(speedup['ratio'], *ends)}"
        if predicted is not None:
            text += f", predicted {predicted['value']:.2f}×"
        if speedup["verdict"] != "fast":
            text = f"no kernel is shown to make it faster; the fastest is {text}"
        yield f"{span_name(span, best.get('steps', 0))}: {text}; output: {_output(best)}"


def model_data(checks: Sequence[Check]) -> dict[str, Any]:
    """Return everything that the page draws for one model."""
    return {
        "spans": [
            {
                "span": span_name(span, each.get("steps", 0)),
                "kernel": each["kernel"],
                "ms": 1000 * each["measured"][span]["seconds"],
                "measured": _speedup(each, span),
                "predicted": _predicted(each, span),
            }
            for span in _spans(checks)
            for each in checks
            if each["status"] == "ok" and span in each["measured"]
        ],
        "kernels": [
            {
                "kernel": each["kernel"],
                **_per_step(each),
                "answered": each["hits"],
                "fell back": sum(each["fallbacks"].values()),
                "output": _output(each),
                "status": "trains wrongly" if each.get("wrong") else each["status"],
                "reason": each.get("wrong") or each["reason"] or "; ".join(each["fallbacks"]),
            }
            for each in checks
        ],
        "losses": [
            {"kernel": names, "step": step, "loss": loss}
            for names, losses in _curves(checks).items()
            for step, loss in enumerate(losses, start=1)
        ],
        "foretold": [
            _foretold(each["kernel"], found)
            for each in checks
            if (found := each.get("foretold")) and found.get("by_place")
        ],
    }


def _foretold(kernel: str, found: Mapping[str, Any]) -> dict[str, Any]:
    """Return the map of a kernel's or a plan's foretold error, with its rows and columns."""
    kinds = ("denoising step" if each.isdigit() else "phase" for each in found["columns"])
    return {
        "name": kernel,
        "error": str(ForetoldDrift(**found)),
        "columns": found["columns"],
        "axis": " or ".join(dict.fromkeys(kinds)),
        "shares": found["by_place"],
    }


def _per_step(checked: Check) -> dict[str, float]:
    if not checked.get("steps") or RUN not in checked["measured"]:
        return {}
    return {"ms/step": round(1000 * checked["measured"][RUN]["seconds"] / checked["steps"], 3)}


def _curves(checks: Sequence[Check]) -> dict[str, list[float | None]]:
    """Return the loss curves of several steps; those like the baseline's share its line."""
    found = {
        each["kernel"]: [loss if loss and math.isfinite(loss) else None for loss in losses]
        for each in checks
        if len(losses := each.get("curves", {}).get("loss", [])) > 1
    }
    if not found:
        return {}
    first = next(iter(found.values()))
    equal = [kernel for kernel, losses in found.items() if _is_one_line(first, losses)]
    names = "all kernels" if len(equal) == len(checks) else ", ".join(equal)
    return {names: first} | {name: each for name, each in found.items() if name not in equal}


def _is_one_line(one: Sequence[float | None], other: Sequence[float | None]) -> bool:
    """Return True if two curves lie on each other at the size of a chart."""
    known = [each for each in one if each is not None]
    line = LINE * (max(known) - min(known)) if known else 0.0
    return all(
        before == after
        or (before is not None and after is not None and abs(before - after) <= line)
        for before, after in zip(one, other, strict=True)
    )


def _spans(checks: Sequence[Check]) -> list[str]:
    """Return the measured parts of a run, the whole run first."""
    spans = dict.fromkeys(span for each in checks for span in each["measured"])
    return sorted(spans, key=lambda span: span != RUN)


def _speedup(checked: Check, span: str) -> Any:
    """Return the speed-up with its interval and verdict; None for the model's own attention."""
    return checked["measured"].get(span, {}).get("speedup")


def _predicted(checked: Check, span: str) -> Any:
    """Return the predicted speed-up with its interval; None without a prediction."""
    found = checked["prediction"] or {"run": None, "phases": {}}
    place = found["run"] if span == RUN else found["phases"].get(span)
    return place and place["speedup"]


def _output(checked: Check) -> str:
    found = dict(checked["drift"])
    return (found and ", ".join(drift.cells(found))) or "not compared"
