"""The errors of an output, as a row stores them."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated, Literal

from replay.rows.meaning import Column, Meaning, digits, floored, nonzero

AccuracyClass = Literal["exact", "quantised", "sparse"]
"""Rule that an output is judged by."""


@dataclass(frozen=True)
class Errors:
    """Errors of an output against a reference, both (B, H, S, Dv).

    The cosine of two zero rows is 1; if only one row is zero, the cosine is 0. `relative_l1` is 0
    if output and reference are zero, and infinite if only the reference is zero. A NaN row counts
    as the worst row and makes the three row cosines NaN.
    """

    cosine: Annotated[float, "cosine similarity of the flattened outputs"]
    relative_l1: Annotated[float, "Σ|output - reference| / Σ|reference|"]
    rmse: Annotated[float, "root of the mean squared error"]
    max_abs: Annotated[float, "largest absolute error"]
    mae: Annotated[float, "mean absolute error"]
    mse: Annotated[float, "mean squared error"]
    nan_count: Annotated[int, "NaN elements in the output"]
    inf_count: Annotated[int, "infinite elements in the output"]
    mismatched_nonfinite: Annotated[int, "NaN or infinite in one of the two and not in the other"]
    row_cosine_p1: Annotated[
        float, "1st percentile of the cosines of single rows (one query of one head)"
    ]
    row_cosine_p10: Annotated[float, "10th percentile of the same"]
    row_cosine_min: Annotated[float, "the worst row's cosine"]
    worst_row: Annotated[tuple[int, int, int], "batch, head and query of that row"]
    worst_head: Annotated[tuple[int, int], "batch and head with the largest relative L1"]
    worst_head_cosine: Annotated[float, "that head's cosine"]
    worst_head_relative_l1: Annotated[float, "that head's relative L1"]


@dataclass(frozen=True)
class Where:
    """Locations of errors: relative L1 of every head in up to 64 ranges of queries."""

    worst: Annotated[float, "the largest relative L1 of a head in one of 64 ranges of queries"]
    typical: Annotated[float, "median of the same over heads and ranges"]
    head: Annotated[tuple[int, int], "batch and head of the largest"]
    queries: Annotated[tuple[int, int], "first and last query of the largest"]
    relative_l1: tuple[tuple[float, ...], ...]
    """Values by head of each batch and by range of queries, with three digits; only in JSON."""


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
    """Errors against each available output."""

    reference: Annotated[
        Errors,
        Meaning(
            "{}; against the high-precision reference, of all keys also for sparse kernels",
            columns=_ERROR_COLUMNS,
        ),
    ]
    captured: Annotated[Errors | None, "{}; against the output the model recorded"] = None
    kernel: Annotated[
        Errors | None, "{}; against the output of the kernel named with --errors-against"
    ] = None
    noise_floor: Annotated[Errors | None, "{}; of the recorded output against the reference"] = None
    chosen: Annotated[
        Errors | None, "{}; of a sparse kernel against the reference for the keys it chose"
    ] = None
    where: Annotated[
        Where | None, "{}, against the reference (a sparse kernel's for the keys it chose)"
    ] = None

    def against(self, which: str) -> Errors | None:
        """Return the errors against `reference`, `captured`, or the named kernel."""
        if which == "reference":
            return self.reference
        return self.captured if which == "captured" else self.kernel


@dataclass(frozen=True)
class Summary:
    """Range, mean and population standard deviation of a tensor; all NaN if an element is NaN."""

    min: Annotated[float, "minimum"]
    max: Annotated[float, "maximum"]
    mean: Annotated[float, "mean"]
    std: Annotated[float, "standard deviation"]
