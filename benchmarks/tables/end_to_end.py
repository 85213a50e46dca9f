"""Speed-up of whole models: predicted, and measured."""

from __future__ import annotations

from collections.abc import Sequence

from benchmarks import results
from benchmarks.tables.markdown import machine_line, markdown_table

WIDE = 0.05
"""Width, as a share of a measured speed-up, above which its interval is shown."""

SCENES = {
    ("cogvideo", "denoise"): "CogVideoX-2b, a denoising step",
    ("flux", "denoise"): "FLUX.1-dev, a denoising step",
    ("llama", "prefill"): "Llama-2-7b, prefill of 4,096 tokens",
    ("llama", "decode"): "Llama-2-7b, a decoded token",
}


def speedups(kernels: Sequence[str] = ()) -> str:
    """List predicted / measured speed-ups of a step and the prediction error, for all kernels by
    default.
    """
    rows = results.read(results.DIRECTORY / "end_to_end.csv")
    found = {(row["model"], row["span"], row["kernel"]): row for row in rows}
    scenes = [scene for scene in SCENES if any(key[:2] == scene for key in found)]
    lines = {
        "*the model's own attention*": [_own_cell(rows, *scene) for scene in scenes],
        **{
            kernel: [_speedup_cell(found, *scene, kernel) for scene in scenes]
            for kernel in dict.fromkeys(
                row["kernel"] for row in rows if row["predicted.speedup.low"]
            )
            if not kernels or kernel in kernels
        },
    }
    headings = ["kernel", *(SCENES[scene] for scene in scenes)]
    return markdown_table(headings, lines) + machine_line(rows)


def _own_cell(rows: list[dict[str, str]], model: str, span: str) -> str:
    """Format the model's own time and attention's share of it."""
    mine = [row for row in rows if (row["model"], row["span"]) == (model, span)]
    shares = [
        float(row["predicted.attention_share"]) for row in mine if row["predicted.speedup.low"]
    ]
    if not mine or not shares:
        return ""
    return f"{float(mine[0]['measured.ms.p50']):.4g} ms, attention {100 * shares[0]:.0f} %"


def _speedup_cell(
    found: dict[tuple[str, str, str], dict[str, str]], model: str, span: str, kernel: str
) -> str:
    row = found.get((model, span, kernel)) or found.get((model, "", kernel))
    if row is None:
        return ""
    if row["status"] != "ok":
        return row["status"]
    if not row["measured.speedup.ratio"]:
        return ""
    ratio, low, high = (float(row[f"measured.speedup.{name}"]) for name in ("ratio", "low", "high"))
    measured = f"{ratio:.2f}×"
    if high - low > WIDE * ratio:
        measured += f" [{low:.2f}-{high:.2f}]"
    if not row["prediction_error"]:
        return f"- / {measured}"
    error = 100 * float(row["prediction_error"])
    return f"{float(row['predicted.speedup.value']):.2f}× / {measured} ({error:+.1f} %)"
