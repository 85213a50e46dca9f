"""Errors of a kernel's output, as a row stores them."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated, Literal

from replay.rows.meaning import Column, Meaning, digits, floored, nonzero

AccuracyClass = Literal["exact", "quantised", "sparse"]
"""Rule by which a kernel's output is judged."""


@dataclass(frozen=True)
class Errors:
    """Errors of an output relative to a reference, both of shape (B, H, S, Dv).

    The cosine of two zero vectors is 1; if only one of them is zero, the cosine is 0. `relative_l1`
    is 0 if output and reference are zero, and infinite if only the reference is. A row (query of a
    head) with a NaN counts as the worst row, and all three row cosines are then NaN.
    """

    cosine: Annotated[float, "cosine similarity of the flattened outputs"]
    relative_l1: Annotated[float, "Σ|output - reference| / Σ|reference|"]
    rmse: Annotated[float, "root of the mean squared error"]
    max_abs: Annotated[float, "largest absolute error"]
    mae: Annotated[float, "mean absolute error"]
    mse: Annotated[float, "mean squared error"]
    nan_count: Annotated[int, "NaN elements in the output"]
    inf_count: Annotated[int, "infinite elements in the output"]
    mismatched_nonfinite: Annotated[int, "elements that are NaN or infinite in only one of the two"]
    row_cosine_p1: Annotated[
        float, "1st percentile of the cosines of single rows (one query of one head)"
    ]
    row_cosine_p10: Annotated[float, "10th percentile of the cosines of single rows"]
    row_cosine_min: Annotated[float, "lowest cosine of a single row"]
    worst_row: Annotated[tuple[int, int, int], "batch, head and query of the lowest row cosine"]
    worst_head: Annotated[tuple[int, int], "batch and head with the largest relative L1"]
    worst_head_cosine: Annotated[float, "cosine of the worst head"]
    worst_head_relative_l1: Annotated[float, "relative L1 of the worst head"]


@dataclass(frozen=True)
class Where:
    """Places of errors: relative L1 of every head in up to 64 ranges of queries."""

    worst: Annotated[float, "largest relative L1 of a head in one of 64 ranges of queries"]
    typical: Annotated[float, "median relative L1 over heads and ranges"]
    head: Annotated[tuple[int, int], "batch and head of the largest error"]
    queries: Annotated[tuple[int, int], "first and last query of the range with the largest error"]
    relative_l1: tuple[tuple[float, ...], ...]
    """Values by head (over all batches) and range of queries, to three digits; only in JSON."""


_ERROR_COLUMNS = (
    Column("accuracy", "accuracy", "cosine", floored(6), "lowest", "cosine"),
    Column("accuracy", "accuracy", "rel L1", digits(".1e"), "highest", "relative_l1"),
    Column("accuracy", "accuracy", "RMSE", digits(".1e"), "highest", "rmse"),
    Column("accuracy", "accuracy", "max abs", digits(".1e"), "highest", "max_abs"),
    Column("accuracy", "accuracy", "row min", floored(4), "lowest", "row_cosine_min"),
    Column("accuracy", "accuracy", "NaN", nonzero, "highest", "nan_count"),
)


@dataclass(frozen=True)
class Accuracy:
    """Errors of a kernel's output relative to each available other output."""

    reference: Annotated[
        Errors,
        Meaning(
            "{}; relative to the high-precision reference over all keys, even for sparse kernels",
            columns=_ERROR_COLUMNS,
        ),
    ]
    captured: Annotated[Errors | None, "{}; relative to the recorded output"] = None
    kernel: Annotated[
        Errors | None, "{}; relative to the output of the kernel named by --errors-against"
    ] = None
    noise_floor: Annotated[Errors | None, "{}; of the recorded output"] = None
    chosen: Annotated[
        Errors | None,
        "{}; of a sparse kernel, relative to a reference over its chosen keys",
    ] = None
    where: Annotated[
        Where | None,
        "{}, relative to the reference (for sparse kernels, over their chosen keys)",
    ] = None
    spoilt_rows: Annotated[
        int, "rows that are NaN or infinite because of inputs that these rows do not see"
    ] = 0
    tolerance_ratio: Annotated[
        float | None,
        Meaning(
            "largest of the judged errors, each divided by its limit; above 1 is inaccurate; empty "
            "in rows of earlier versions and if elements are NaN or infinite in only one output",
            columns=(
                Column("accuracy", "accuracy", "error / tolerance", digits(".2g"), "highest"),
            ),
        ),
    ] = None

    def against(self, which: str) -> Errors | None:
        """Return the errors relative to `reference`, `captured`, or else the named kernel."""
        if which == "reference":
            return self.reference
        return self.captured if which == "captured" else self.kernel


@dataclass(frozen=True)
class GradientErrors:
    """Errors of one gradient relative to the reference, as `Errors` of an output."""

    tolerance_ratio: Annotated[
        float, "largest of the judged errors, each divided by its limit; above 1 is inaccurate"
    ]
    relative_l1: Annotated[float, "Σ|gradient - reference| / Σ|reference|"]
    max_abs: Annotated[float, "largest absolute error"]
    where: Where | None = None
    """Places of the errors of a wrong gradient, of dK and dV by ranges of keys; only in JSON."""


def _of_gradient(name: str) -> tuple[Column, ...]:
    heading = f"{name} error / tolerance"
    return (Column("gradients", "backward", heading, digits(".2g"), "highest", "tolerance_ratio"),)


@dataclass(frozen=True)
class Gradients:
    """Errors of the gradients that a kernel's backward pass returns."""

    query: Annotated[GradientErrors, Meaning("{}; of dQ", columns=_of_gradient("dQ"))]
    key: Annotated[GradientErrors, Meaning("{}; of dK", columns=_of_gradient("dK"))]
    value: Annotated[GradientErrors, Meaning("{}; of dV", columns=_of_gradient("dV"))]


@dataclass(frozen=True)
class Summary:
    """Range, mean and population standard deviation of a tensor; all NaN if an element is NaN."""

    min: Annotated[float, "minimum"]
    max: Annotated[float, "maximum"]
    mean: Annotated[float, "mean"]
    std: Annotated[float, "standard deviation"]
