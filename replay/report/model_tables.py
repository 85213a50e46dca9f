"""Tables of an end-to-end check in 80 columns: the model's times, then its output."""

from __future__ import annotations

from collections.abc import Sequence

from rich.console import Console
from rich.table import Table
from rich.text import Text

from capture.text.counted import counted
from capture.text.printable import printable
from replay.end_to_end import drift
from replay.end_to_end.model_check import MeasuredSpan, ModelResult
from replay.end_to_end.predicted_times import RUN, PredictedTime
from replay.end_to_end.prediction import NO_BACKWARD
from replay.end_to_end.reasons import is_off
from replay.end_to_end.time_breakdown import main_phase
from replay.report.cells import interval_text, model_speedup_text
from replay.report.explanation import explanation, most_disappointing, span_name
from replay.report.fitted import FittedTable
from replay.report.groups import names_by_sentence

DELAYED = 0.05
"""Minimum increase of the share of time lost to delays, over the baseline's, to be reported."""

LEGEND = (
    "predicted: speed-up computed from the replay's times and the recorded number of calls · "
    "measured: speed-up in the model, from each run's typical forwards, over adjacent runs of its "
    "own attention behind the same hook · in brackets: 95 % intervals, `same` if within "
    "±3 %, `?` if inconclusive · error: predicted / measured - 1 · "
    "answered, fell back: attention calls per run that the kernel ran, and that it "
    "left to the model's own attention"
)


def print_checks(checks: Sequence[ModelResult], console: Console) -> None:
    """Print the results of one model; the first result is for the model's own attention."""
    own, *others = checks
    ran = [each for each in others if each.measured] or [own]  # The baseline runs more often.
    rounds = max(measured.ms.n for each in ran for measured in each.measured.values())
    title = f"{own.model} end to end · {counted(rounds, 'round')}"
    console.print(Text(printable(title), style="bold"))
    console.print(Text(printable(f"weights: {own.weights}"), style="dim"))
    for span in own.measured:
        predictions = [each.predicted(span) for each in others]
        predicted = next((each for each in predictions if each), None)
        console.print(_title(span_name(span, own.steps), predicted))
        console.print(_span(span, own, others))
        console.print()
    if others:
        console.print(_outcome(others))
    else:
        console.print(Text("no kernel to run in the model: choose some with --kernels", "yellow"))
    for note in (
        *_unpredicted(others),
        *filter(None, [own.short_census]),
        *(f"✗ {each.kernel} trains wrongly: {each.wrong}" for each in others if each.wrong),
        *(note for each in others for note in _notes(each, own)),
    ):
        console.print(Text(printable(note), style="yellow"))
    console.print(Text(LEGEND, style="dim"))
    worst = most_disappointing(others)
    for each in others:
        if each is worst or (not each.wrong and is_off(each, main_phase(each))):
            console.print()
            console.print(Text(printable(explanation(each))))
    console.print()


def _title(name: str, predicted: PredictedTime | None) -> Text:
    """Name the span and the share of it that attention takes according to the replay."""
    parts = [name]
    if predicted is not None:
        is_least = predicted.not_recorded or predicted.reason == NO_BACKWARD
        least = "at least " if is_least else ""
        parts.append(f"attention {least}{100 * predicted.attention_share:.0f} %")
        if predicted.waiting_share:
            parts.append(f"GPU waits for the host {100 * predicted.waiting_share:.0f} %")
    return Text(printable(" · ".join(parts)), style="bold")


def _span(span: str, own: ModelResult, others: Sequence[ModelResult]) -> Table:
    measured = own.measured[span]
    in_seconds = measured.seconds >= 1
    # Tokens of a forward pass alone say nothing about a training step.
    has_tokens = measured.tokens_per_second is not None and not own.steps
    steps = own.steps if span == RUN else 0
    headings = ["s" if in_seconds else "ms", *["tokens/s"] * has_tokens, *["ms/step"] * bool(steps)]
    table = FittedTable("kernel")
    for heading in (*headings, "predicted", "measured", "error"):
        table.add_column(heading, justify="right", no_wrap=True)

    def times(found: MeasuredSpan) -> list[str]:
        cells = [f"{found.seconds * (1 if in_seconds else 1000):.4g}"]
        cells += [_rate(found.tokens_per_second or 0.0)] if has_tokens else []
        return cells + ([f"{1000 * found.seconds / steps:.4g}"] if steps else [])

    table.add_row(Text(own.kernel), *times(measured), "", "", "")
    for checked in others:
        found = checked.measured.get(span)
        if found is None or found.speedup is None or checked.status != "ok":
            continue
        error = checked.prediction_error(span)
        table.add_row(
            Text(checked.kernel),
            *times(found),
            _predicted(checked.predicted(span)),
            model_speedup_text(found.speedup),
            "-" if error is None else f"{100 * error:+.1f} %",
        )
    return table


def _rate(per_second: float) -> str:
    return f"{per_second:.4g}" if per_second < 1000 else f"{per_second:.0f}"


def _outcome(others: Sequence[ModelResult]) -> Table:
    table = FittedTable("kernel")
    has_memory = any(each.peak_bytes for each in others)
    for heading in ("answered", "fell back", *["peak GB"] * has_memory):
        table.add_column(heading, justify="right", no_wrap=True)
    table.add_column("output against the model's own", no_wrap=True)
    for checked in others:
        if checked.status != "ok":
            blanks = [""] * (len(table.columns) - 2)
            table.add_row(Text(checked.kernel), *blanks, Text(checked.status, "red"))
            continue
        cells = [str(checked.hits), str(sum(checked.fallbacks.values()))]
        if has_memory:
            cells.append(f"{(checked.peak_bytes or 0) / 1e9:.2f}")
        differs = "\n".join(drift.cells(checked.drift)) or "nothing to compare"
        if checked.foretold is not None:
            differs += f"\nforetold: {checked.foretold}"
        style = "red" if checked.wrong else ""
        mark = "✗ trains wrongly\n" if checked.wrong else ""
        table.add_row(Text(checked.kernel, style), *cells, Text(mark + differs, style))
    return table


def _unpredicted(others: Sequence[ModelResult]) -> list[str]:
    """Return the reasons for missing predictions, each with the names of the kernels."""
    found = names_by_sentence(
        (checked.kernel, reason)
        for checked in others
        if (reason := checked.unpredicted or (checked.prediction and checked.prediction.run.reason))
        and not checked.wrong
    )
    return [f"not predicted: {names}: {reason}" for reason, names in found.items()]


def _notes(checked: ModelResult, own: ModelResult) -> list[str]:
    if checked.status != "ok":
        return [f"{checked.kernel}: {checked.reason}"]
    notes = [
        f"{checked.kernel}: {counted(count, 'call')} fell back: {reason}"
        for reason, count in checked.fallbacks.items()
    ]
    notes += [
        f"{checked.kernel}: changes its {each} in place: a model that reads the {each} again, e.g. "
        "from a key/value cache, reads the changed values"
        for each in checked.changed_inputs
    ]
    if checked.delayed - own.delayed > DELAYED:
        notes.append(
            f"{checked.kernel}: {100 * checked.delayed:.0f} % of the time "
            f"({100 * own.delayed:.0f} % without the kernel) went to delays of single forwards, "
            "which are left out: other load on the machine, or occasional work of the kernel "
            "(compilation, allocation)"
        )
    if checked.own_calls:
        own_calls = counted(checked.own_calls, "call")
        notes.append(f"{checked.kernel}: {own_calls} left to the model's own attention")
    if checked.missing:
        notes.append(f"{checked.kernel}: not in the model: {', '.join(checked.missing)}")
    return notes


def _predicted(predicted: PredictedTime | None) -> str:
    if predicted is None or predicted.speedup is None:
        return "-"
    return interval_text(predicted.speedup.value, predicted.speedup.low, predicted.speedup.high)
