"""Draws the README's plot from committed results.

    python -m benchmarks.picture

One dot per kernel: the measured speed-up of a denoising step of full-size CogVideoX-2b
(`end_to_end.csv`) against the worst relative L1 error on calls of the small trained CogVideoX
(`trained_weights.csv`). Writes docs/pictures/speedup_and_error.svg.
"""

from __future__ import annotations

from pathlib import Path

import matplotlib

from benchmarks import results
from replay.kernels.registry import catalogue

PICTURE = Path(__file__).parent.parent / "docs" / "pictures" / "speedup_and_error.svg"
COLOURS = {"exact": "#0072b2", "quantised": "#d55e00"}
"""From the Okabe-Ito palette, which is safe for colour-blind readers."""


CLOSE = 0.01
"""Labels of speed-ups closer than this would overlap."""


def dots() -> dict[str, tuple[float, float, float, float]]:
    """Return worst relative L1, speed-up, and the ends of its 95 % interval, by kernel."""
    errors = {
        row["kernel"]: float(row["relative_l1.worst"])
        for row in results.read(results.DIRECTORY / "trained_weights.csv")
        if (row["model"], row["values"], row["status"]) == ("cogvideo", "trained weights", "ok")
    }
    found = {}
    for row in results.read(results.DIRECTORY / "end_to_end.csv"):
        kernel = row["kernel"]
        is_step = (row["model"], row["span"]) == ("cogvideo", "denoise")
        if is_step and kernel in errors and row["measured.speedup.ratio"]:
            ratio, low, high = (
                float(row[f"measured.speedup.{name}"]) for name in ("ratio", "low", "high")
            )
            found[kernel] = (errors[kernel], ratio, low, high)
    return found


def main() -> None:
    matplotlib.use("svg")
    # Makes the file reproducible byte for byte.
    matplotlib.rcParams["svg.hashsalt"] = "attention-replay"
    from matplotlib import pyplot

    figure, axes = pyplot.subplots(figsize=(8, 4.2), layout="constrained")
    found = dots()
    for kernel, (error, ratio, low, high) in found.items():
        colour = COLOURS[catalogue()[kernel].accuracy_class]
        spread = [[ratio - low], [high - ratio]]
        axes.errorbar(error, ratio, yerr=spread, fmt="o", color=colour, capsize=3)
        # Labels of neighbouring dots: the upper one above, the lower one below.
        close = [other[1] for other in found.values() if 0 < abs(other[1] - ratio) < CLOSE]
        shift = sum(8 if ratio > other else -8 for other in close)
        axes.annotate(kernel, (error, ratio), xytext=(8, shift - 3), textcoords="offset points")
    axes.axhline(1, color="grey", linewidth=0.8, linestyle="--")
    axes.annotate("the model's own attention", (0.98, 1), xycoords=("axes fraction", "data"),
                  xytext=(0, 3), textcoords="offset points", ha="right", color="grey")  # fmt: skip
    for name, colour in COLOURS.items():
        axes.plot([], [], "o", color=colour, label=f"{name} kernels")
    axes.legend(frameon=False, loc="lower right")
    axes.set_xscale("log")
    axes.set_xlabel("worst relative L1 error of a recorded call (small trained CogVideoX)")
    axes.set_ylabel("measured speed-up of a denoising step")
    axes.set_title("CogVideoX-2b, NVIDIA H200")
    axes.spines[["top", "right"]].set_visible(False)
    PICTURE.parent.mkdir(exist_ok=True)
    figure.savefig(PICTURE, metadata={"Date": None})


if __name__ == "__main__":
    main()
