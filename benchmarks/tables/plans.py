"""Tables of plans: beside simpler choices, errors foretold, and tuned within random budgets."""

from __future__ import annotations

import statistics

from benchmarks import results
from benchmarks.foretold_figures import HEADINGS, figures
from benchmarks.tables.markdown import machine_line, markdown_table

SHOWN = "0.15"
"""Budget of the full-size models in the table."""

ALTERNATIVES = {
    "best exact kernel": "exact_ms",
    "best single kernel": "single_ms",
    "best first/last N": "ends_ms",
    "greedy by layer": "by_layer_ms",
    "plan": "plan_ms",
    "ceiling": "ceiling_ms",
}


def plan_alternatives() -> str:
    """List the attention time that each choice saves, and how close plans are to the optimum."""
    rows = results.read(results.DIRECTORY / "plan_alternatives.csv")
    reduced = [row for row in rows if row["size"] == "reduced"]
    full = [row for row in rows if row["size"] == "full"]
    lines = {
        f"{row['model']}, {row['kernels']}": [
            f"{100 * (1 - float(row[name]) / float(row['baseline_ms'])):.1f} %"
            for name in ALTERNATIVES.values()
        ]
        for row in full
        if row["budget"] == SHOWN
    }
    headings = ["model, kernels", *ALTERNATIVES]
    return markdown_table(headings, lines) + f"\n{_summary(reduced, full)}\n" + machine_line(rows)


def _summary(reduced: list[dict[str, str]], full: list[dict[str, str]]) -> str:
    def slower(name: str, than: str) -> list[float]:
        ratios = (float(row[name]) / float(row[than]) - 1 for row in reduced)
        return [100 * ratio for ratio in ratios if ratio > 1e-6]

    behind = slower("plan_ms", "optimum_ms")
    lines = {}
    for name, column in ALTERNATIVES.items():
        if column not in ("plan_ms", "ceiling_ms"):
            ahead, after = slower("plan_ms", column), slower(column, "plan_ms")
            lines[name] = [str(len(ahead)), str(len(after)), f"{max(after, default=0.0):.1f} %"]
    headings = ["with the same error", "faster than the plan", "slower", "by up to"]
    bound = 100 * max(float(row["gap"]) for row in full)
    return (
        f"{len(reduced)} reduced problems of up to 9 cells, small enough to try every choice: the "
        f"plan takes at most {max(behind, default=0.0):.1g} % more time than the optimum.\n\n"
        f"{markdown_table(headings, lines)}\n"
        f"{len(full)} full-size problems of up to 2,000 cells: bound on the planned objective "
        f"within {bound:.1g} %."
    )


def foretold_drift() -> str:
    """List how well each predictor foretells the errors of random plans."""
    rows = results.read(results.DIRECTORY / "foretold_drift.csv")
    devices = dict.fromkeys(f"{row['model']} on {row['device']}" for row in rows)
    return (
        markdown_table(["model, predictor", *HEADINGS], figures(rows))
        + f"\n{', '.join(devices)}.\n"
    )


def tuning_budgets() -> str:
    """Count, for each model and metric, the tuned plans that hold on other prompts."""
    rows = results.read(results.DIRECTORY / "tuning_budgets.csv")
    groups: dict[str, list[dict[str, str]]] = {}
    for row in rows:
        groups.setdefault(f"{row['model']}, `{row['metric']}`", []).append(row)
    lines = {name: _tunings(group) for name, group in groups.items()}
    lines["all"] = _tunings(rows)
    headings = [
        "model, budget",
        "tunings",
        "plans",
        "plans that hold",
        "attention time saved (mean)",
        "plans judged (median)",
    ]
    return markdown_table(headings, lines) + machine_line(rows)


def sketched_tuning() -> str:
    """List the attention time that plans save without a sketch and with one, by budget."""
    rows = results.read(results.DIRECTORY / "sketched_tuning.csv")
    lines = {}
    for without, with_sketch in zip(rows[::2], rows[1::2], strict=True):
        name = f"{without['model']}, `{without['metric']}={float(without['limit']):.2g}`"
        both = without, with_sketch
        saved = [f"{100 * float(row['saved']):.1f} %" for row in both]
        drifts = [f"{float(row['search']):.2g}" if row["search"] else "–" for row in both]
        lines[name] = [*saved, *drifts]
    headings = [
        "model, budget",
        "saved, single errors",
        "saved, sketch",
        "measured, single errors",
        "measured, sketch",
    ]
    return markdown_table(headings, lines) + machine_line(rows)


def sparse_tuning() -> str:
    """Compare tuned block-sparse plans with exhaustive search, by the weight of errors."""
    rows = results.read(results.DIRECTORY / "sparse_tuning.csv")
    weights = {"foretold": "their foretold sensitivity", "none": "one (no gradients)"}
    lines = {}
    for weight, name in weights.items():
        # Several budgets may lead to one plan.
        plans = {
            (row["prompt"], row["drift"], row["blocks"]): row
            for row in rows
            if row["sensitivities"] == weight
        }
        speeds = [float(row["speed"]) for row in plans.values()]
        drifts = [float(row["drift"]) for row in plans.values()]
        lines[name] = [
            str(len(plans)),
            f"{min(drifts):.2g} to {max(drifts):.2g}",
            f"{statistics.fmean(speeds):.1%}",
            f"{min(speeds):.1%}",
            f"{sum(speed >= 0.95 for speed in speeds)} of {len(speeds)}",
        ]
    headings = [
        "weight of a head's error",
        "plans",
        "drift (relative L1)",
        "speed, mean",
        "worst",
        "at least 95 %",
    ]
    return markdown_table(headings, lines) + machine_line(rows)


def _tunings(rows: list[dict[str, str]]) -> list[str]:
    plans = [row for row in rows if row["third"]]  # the others keep the model's own attention
    return [
        str(len(rows)),
        str(len(plans)),
        str(sum(row["holds"] == "True" for row in plans)),
        f"{100 * statistics.fmean(float(row['saved']) for row in rows):.1f} %",
        f"{statistics.median(int(row['judged']) for row in rows):g}",
    ]
