"""End-to-end checks in a report: predicted and measured speed-ups of the model."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from replay.end_to_end import drift
from replay.end_to_end.predicted_times import RUN
from replay.report.explanation import SPANS

Check = Mapping[str, Any]
"""Check of one kernel in one model, as a line of the JSON file of checks."""


def answers(checks: Sequence[Check]) -> Iterator[str]:
    """Yield a sentence on the fastest kernel and its output, for the whole run, then its parts."""
    for span in _spans(checks):
        timed = [each for each in checks if each["status"] == "ok" and _speedup(each, span)]
        if not timed:
            continue
        best = max(timed, key=lambda each: _speedup(each, span)["ratio"])
        speedup, predicted = _speedup(best, span), _predicted(best, span)
        text = f"{best['kernel']} {speedup['ratio']:.2f}×"
        if speedup["low"] is not None:
            text += f" ({speedup['low']:.2f}-{speedup['high']:.2f})"
        if predicted is not None:
            text += f", predicted {predicted['value']:.2f}×"
        if speedup["verdict"] != "fast":
            text = f"no kernel is shown to make it faster; the fastest is {text}"
        yield f"{SPANS.get(span, span)}: {text}; output: {_output(best)}"


def model_data(checks: Sequence[Check]) -> dict[str, Any]:
    """Return everything that the page draws for one model."""
    return {
        "spans": [
            {
                "span": SPANS.get(span, span),
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
                "status": each["status"],
                "answered": each["hits"],
                "fell back": sum(each["fallbacks"].values()),
                "output": _output(each),
                "reason": each["reason"] or "; ".join(each["fallbacks"]),
            }
            for each in checks
        ],
        "losses": [
            {"kernel": each["kernel"], "step": step, "loss": loss}
            for each in checks
            if len(losses := each.get("curves", {}).get("loss", [])) > 1
            for step, loss in enumerate(losses, start=1)
        ],
    }


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
