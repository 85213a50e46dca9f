"""The tables of an end-to-end check: time by span of the model, then what became of its output."""

from __future__ import annotations

from collections.abc import Sequence

from rich.console import Console
from rich.table import Table
from rich.text import Text

from replay.speedcheck import drift
from replay.speedcheck.check import Checked, Measured
from replay.speedcheck.prediction import RUN, Span
from replay.speedcheck.reasons import reasons

TITLES = {
    "denoise": "one denoising step",
    "prefill": "prefill, the time to the first token",
    "decode": "decode, one token",
    "encode": "one forward",
    RUN: "whole run",
}


def print_checks(checks: Sequence[Checked], console: Console) -> None:
    """Print what a check of one model found; its first result is the model's own attention."""
    own, *others = checks
    console.print(Text(f"{own.model} end to end", style="bold"))
    console.print(Text(f"weights: {own.weights}", style="dim"))
    for span in own.measured:
        console.print(_span(span, own, others))
        console.print()
    console.print(_outcome(others))
    for checked in others:
        for note in _notes(checked):
            console.print(Text(note, style="yellow"), soft_wrap=False)
    console.print()


def _span(span: str, own: Checked, others: Sequence[Checked]) -> Table:
    measured = own.measured[span]
    predictions = [each.predicted(span) for each in others]
    table = Table(
        title=_title(span, measured, next((each for each in predictions if each), None)),
        title_justify="left",
        title_style="none",
        box=None,
        padding=(0, 1, 0, 0),
        header_style="dim",
    )
    has_tokens = measured.tokens_per_second is not None
    for heading in ("kernel", "predicted", "measured", "error", "ms"):
        table.add_column(heading, justify="left" if heading == "kernel" else "right")
    if has_tokens:
        table.add_column("tokens/s", justify="right")
    for checked, predicted in zip(others, predictions, strict=True):
        found = checked.measured.get(span)
        if found is None or found.speedup is None:
            continue
        error = checked.prediction_error(span)
        cells = [
            checked.kernel,
            _ratio(predicted),
            _times(found.speedup.ratio, found.speedup.low, found.speedup.high),
            "-" if error is None else f"{100 * error:+.1f} %",
            f"{found.ms.p50:.4g}",
        ]
        if has_tokens:
            cells.append(f"{found.tokens_per_second:.4g}")
        table.add_row(*cells)
    return table


def _title(span: str, measured: Measured, predicted: Span | None) -> str:
    parts = [f"{TITLES.get(span, span)}: {measured.ms.p50:.4g} ms"]
    parts[0] += f" ({measured.ms.p10:.4g}-{measured.ms.p90:.4g})"
    if measured.tokens_per_second is not None:
        parts.append(f"{measured.tokens_per_second:.4g} tokens/s")
    if predicted is not None:
        least = "at least " if predicted.not_recorded else ""
        parts.append(f"attention {least}{100 * predicted.attention_share:.0f} %")
    return " · ".join(parts)


def _outcome(others: Sequence[Checked]) -> Table:
    table = Table(box=None, padding=(0, 1, 0, 0), header_style="dim")
    headings = ["kernel", "answered", "fell back", "output against the model's own"]
    has_memory = any(each.peak_bytes for each in others)
    if has_memory:
        headings.insert(3, "peak GB")
    for heading in headings:
        table.add_column(heading, justify="right" if heading in headings[1:-1] else "left")
    for checked in others:
        if checked.status != "ok":
            table.add_row(checked.kernel, *[""] * (len(headings) - 2), Text(checked.status, "red"))
            continue
        cells = [checked.kernel, str(checked.hits), str(sum(checked.fallbacks.values()))]
        if has_memory:
            cells.append(f"{(checked.peak_bytes or 0) / 1e9:.2f}")
        table.add_row(*cells, ", ".join(drift.cells(checked.drift)))
    return table


def _notes(checked: Checked) -> list[str]:
    if checked.status != "ok":
        return [f"{checked.kernel}: {checked.reason}"]
    notes = [
        f"{checked.kernel}: {count} calls fell back: {reason}"
        for reason, count in checked.fallbacks.items()
    ]
    unpredicted = checked.unpredicted or (checked.prediction and checked.prediction.run.reason)
    if unpredicted:
        notes.append(f"{checked.kernel}: not predicted: {unpredicted}")
    seen: set[str] = set()
    for span in checked.measured:
        fresh = [each for each in reasons(checked, span) if each not in seen]
        seen.update(fresh)
        notes += [f"{checked.kernel}, {TITLES.get(span, span)}: {each}" for each in fresh]
    return notes


def _ratio(predicted: Span | None) -> str:
    if predicted is None or predicted.speedup is None:
        return "-"
    return _times(predicted.speedup.value, predicted.speedup.low, predicted.speedup.high)


def _times(value: float, low: float, high: float) -> str:
    return f"{value:.2f}× ({low:.2f}-{high:.2f})"
