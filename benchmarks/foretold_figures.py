"""Figures of predictors of a plan's error, from the lines of `benchmarks.foretold_drift`.

- Spearman's rank correlation with the measured errors: over all plans, and over the half of the
  plans that replace half of the places.
- Error in dB, 20 log10(foretold / measured): median and 90 % quantile of its size, and its mean.
- Wrongly passed: share of plans foretold within a budget that their error exceeds; mean over
  budgets at the errors of all plans. The sketch's standard error is added first.

Predictors other than the sketch foretell no amount. Their constant, the mean error in dB, is fitted
on the other half of the plans. The last line of a model shows what measurements tell of other
prompts: errors on the first half of the test prompts are compared with those on the other half.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Mapping, Sequence

from rich.table import Table

PREDICTORS = {
    "foretold": "sketch",
    "root_sum_squares": "root of summed squares",
    "sum": "sum",
    "max": "maximum",
    "last_layer": "last layer only",
}
"""Columns of the predictors, with their names: the sketch, and the errors of single outputs."""

USABLE = 0.1
"""Largest error, relative L2 or √KL, of plans that are also judged alone."""

HEADINGS = ("plans", "runs", "rank", "rank, half", "dB, 50 %", "dB, 90 %", "bias", "wrongly passed")

Lines = Sequence[Mapping[str, str]]


def figures(lines: Lines) -> dict[str, list[str]]:
    """Return the cells of `HEADINGS` for each model and predictor."""
    found = {}
    for model in dict.fromkeys(line["model"] for line in lines):
        mine = [line for line in lines if line["model"] == model]
        usable = [line for line in mine if float(line["measured"]) <= USABLE]
        for column, name in PREDICTORS.items():
            found[f"{model}, {name}"] = _cells(mine, column)
            if column == "foretold" and 10 <= len(usable) < len(mine):
                found[f"{model}, {name}, errors ≤ {USABLE}"] = _cells(usable, column)
        if all(line.get("errors") for line in mine):
            halves = [_halves(line) for line in mine]
            prompts = mine[0]["errors"].count(";") // 2 + 1
            name = f"{model}, {prompts} prompts measured, against {prompts} others"
            found[name] = _cells(halves, "foretold")
            found[name][1] = f"{prompts} a plan"
    return found


def _halves(line: Mapping[str, str]) -> dict[str, str]:
    """Return a line whose foretold error is that of half of the prompts, and measured the other."""
    errors = [float(error) for error in line["errors"].split("; ")]
    half = len(errors) // 2
    first, second = (str(statistics.geometric_mean(e)) for e in (errors[:half], errors[half:]))
    return {**line, "foretold": first, "upper": first, "measured": second}


def printed_table(lines: Lines) -> Table:
    """Return the table for a terminal."""
    table = Table(box=None, header_style="dim")
    table.add_column("model, predictor")
    for heading in HEADINGS:
        table.add_column(heading, justify="right")
    for name, cells in figures(lines).items():
        table.add_row(name, *cells)
    return table


def _cells(lines: Lines, column: str) -> list[str]:
    runs = lines[0]["sketch_runs"] if column == "foretold" else "0"
    rank, half, median, p90, bias, passed = judged(lines, column).values()
    return [
        str(len(lines)),
        runs,
        f"{rank:.3f}",
        f"{half:.3f}",
        f"{median:.1f}",
        f"{p90:.1f}",
        f"{bias:+.1f}",
        f"{100 * passed:.1f} %",
    ]


def judged(lines: Lines, column: str) -> dict[str, float]:
    """Return the figures of a predictor over plans."""
    measured = [20 * math.log10(float(line["measured"])) for line in lines]
    foretold = [20 * math.log10(float(line[column])) for line in lines]
    half = [at for at, line in enumerate(lines) if line["half"] == "True"]
    found = {
        "rank": spearman(foretold, measured),
        "half": spearman([foretold[at] for at in half], [measured[at] for at in half]),
    }
    errors = [ours - theirs for ours, theirs in zip(foretold, measured, strict=True)]
    if column != "foretold":
        # A fold has every second pair of plans, so that both folds have plans of both halves.
        folds = [int(line["plan"]) // 2 % 2 for line in lines]
        fitted = [
            statistics.fmean(error for error, at in zip(errors, folds, strict=True) if at == fold)
            for fold in (0, 1)
        ]
        errors = [error - fitted[1 - fold] for error, fold in zip(errors, folds, strict=True)]
    sizes = sorted(map(abs, errors))
    uppers = [level + error for level, error in zip(measured, errors, strict=True)]
    if column == "foretold":
        uppers = [20 * math.log10(float(line["upper"])) for line in lines]
    passed = [
        upper <= budget < level
        for budget in measured
        for level, upper in zip(measured, uppers, strict=True)
    ]
    return found | {
        "median": statistics.median(sizes),
        "p90": sizes[math.ceil(0.9 * len(sizes)) - 1],
        "bias": statistics.fmean(errors),
        "passed": statistics.fmean(passed),
    }


def spearman(first: Sequence[float], second: Sequence[float]) -> float:
    """Return Spearman's rank correlation; NaN for fewer than three values."""
    if len(first) < 3:
        return math.nan
    ranks = []
    for values in (first, second):
        order = sorted(range(len(values)), key=values.__getitem__)
        ranks.append([float(order.index(at)) for at in range(len(values))])
    return statistics.correlation(*ranks)
