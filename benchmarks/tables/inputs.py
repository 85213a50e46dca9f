"""Tables about the values of inputs: errors by kind of weights, figures on random inputs."""

from __future__ import annotations

from collections import defaultdict

from benchmarks import results
from benchmarks.tables.markdown import machine_line, markdown_table

UNSMOOTHED = "[smooth_k=off]"


def trained_weights() -> str:
    """List errors by kind of values, and the drift of the trained model's output."""
    rows = results.read(results.DIRECTORY / "trained_weights.csv")
    kinds = ("trained weights", "random weights", "random values")
    found = {(row["model"], row["phase"], row["kernel"], row["values"]): row for row in rows}
    headings = ["kernel", kinds[0], "K not smoothed", *kinds[1:], "trained model's output"]
    lines: dict[str, list[str]] = {}
    for model, phase, kernel in dict.fromkeys(key[:3] for key in found):
        if kernel in ("torch-default", "torch-cudnn") or kernel.endswith(UNSMOOTHED):
            continue  # the model's own attention; and variants, which have their own column
        trained, *others = [found.get((model, phase, kernel, kind)) for kind in kinds]
        plain = found.get((model, phase, kernel + UNSMOOTHED, kinds[0]))
        drift = _drift_cell(trained, phase) if trained else ""
        lines[f"{kernel}, {model} {phase}"] = [*map(_error_cell, (trained, plain, *others)), drift]
    return markdown_table(headings, lines) + machine_line(rows)


def misleading_inputs() -> str:
    """List, by size and machine, figures on recorded calls and on random values."""
    tables: dict[tuple[str, str], list[dict[str, str]]] = defaultdict(list)
    for row in results.read(results.DIRECTORY / "misleading_inputs.csv"):
        tables[row["size"], row["machine.device"]].append(row)
    text = []
    for (size, _), rows in tables.items():
        lines = {
            f"{row['kernel'].rpartition('/')[2]}, {row['model']} {row['phase']}": [
                _misled_cell(row, "time", ".4g", " ms"),
                _misled_cell(row, "speedup", ".2f", "×"),
                _misled_cell(row, "error", ".1e", ""),
                _misled_cell(row, "power", ".0f", " W"),
            ]
            for row in rows
        }
        headings = [f"{size} models", "time", "speed-up", "relative L1", "power"]
        text.append(markdown_table(headings, lines) + machine_line(rows))
    return "\n".join(text)


def sparse_inputs() -> str:
    """List errors of block-sparse attention by model, share of the blocks and kind of values."""
    rows = results.read(results.DIRECTORY / "sparse_inputs.csv")
    lines: dict[str, list[str]] = defaultdict(list)
    for row in rows:
        key = f"{row['model']}, {100 * float(row['keep']):.0f} % of the blocks"
        lines[key].append(f"{float(row['cosine.median']):.3f}, {_error_cell(row)}")
    headings = ["cosine, relative L1", "recorded", "standard normal", "recorded moments"]
    return markdown_table(headings, lines) + machine_line(rows)


def _error_cell(row: dict[str, str] | None) -> str:
    if row is None:
        return ""
    median, worst = (float(row[f"relative_l1.{name}"]) for name in ("median", "worst"))
    return f"{median:.2g} ({worst:.2g})"


def _drift_cell(row: dict[str, str], phase: str) -> str:
    if phase == "decode":
        kl, tokens = row["drift.generated_kl"], row["drift.generated_compared"]
        return f"KL {float(kl):.2g} over {tokens} token{'s' * (tokens != '1')}" if kl else ""
    if row["drift.perplexity"]:
        before, after = (float(row[f"drift.{name}perplexity"]) for name in ("baseline_", ""))
        return f"perplexity {before:.3f} → {after:.3f}"
    if row["drift.psnr"]:
        return f"PSNR {float(row['drift.psnr']):.1f} dB, SSIM {float(row['drift.ssim']):.3f}"
    return ""


def _misled_cell(row: dict[str, str], figure: str, form: str, unit: str) -> str:
    """Format `9.15 ms (0.98×, 0.99×)`: recorded calls, then ratios on random and matched values."""
    recorded, *twins = (row[f"{figure}.{values}"] for values in ("recorded", "random", "matched"))
    if not recorded:
        return ""
    multiples = ", ".join(f"{float(twin) / float(recorded):.2f}×" for twin in twins if twin)
    return f"{float(recorded):{form}}{unit} ({multiples})"
