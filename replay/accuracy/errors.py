"""Errors of an output against a reference; `replay.accuracy.verdict` judges them.

Sums are in float64, one per row; a row is the Dv numbers of one (batch, head, query). Figures are
never rounded.

An element that is NaN, or the same infinity, in both tensors counts as zero in both. Any other
non-finite element makes the figures that include it NaN or infinite, and is counted in
`mismatched_nonfinite`. In exposed rows (`replay.accuracy.nonfinite`), non-finite output elements
count as zero in both too. If nothing else remains, the figures are NaN. `nan_count` and `inf_count`
count all NaN and infinite output elements.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass, replace

import torch
from torch import Tensor
from torch.linalg import vector_norm as norm

from replay.rows.errors_of_output import Errors, Summary, Where

CHUNK_ELEMENTS = 2**22
"""Number of output elements that are compared at a time; each float64 temporary is 32 MiB."""

QUERY_BINS = 64
"""Maximum number of ranges of queries that a head's errors are divided into."""


def compare(output: Tensor, reference: Tensor) -> Errors:
    """Compare `output` with `reference`, both (B, H, S, Dv), of any float dtypes and devices.

    Raises:
        ValueError: the shapes differ, are not four-dimensional, or are empty.
    """
    return row_errors(output, reference).errors()


@dataclass(frozen=True)
class RowErrors:
    """Sums over each row of an output and a reference."""

    sums: Tensor
    """(7, B, H, S) in float64: sums of output · reference, output², reference², |reference|,
    error², |error| and error · reference. The figures of heads and of the whole output are computed
    from these sums."""
    elements: int
    max_abs: float
    nan_count: int
    inf_count: int
    mismatched_nonfinite: int
    spoilt: Tensor | None = None
    """(B, H, S) bool: exposed rows with a non-finite output element where the reference is finite;
    None if no element of the output is non-finite."""
    has_figures: bool = True
    """False if no element is finite in both tensors."""

    @property
    def lengths(self) -> Tensor:
        """(B, H, S): ‖output - reference‖ of each row."""
        return self.sums[4].sqrt()

    @property
    def along(self) -> Tensor:
        """(B, H, S): (output - reference) · reference of each row."""
        return self.sums[6]

    @property
    def reference_lengths(self) -> Tensor:
        """(B, H, S): ‖reference‖ of each row."""
        return self.sums[2].sqrt()

    @property
    def head_errors(self) -> Tensor:
        """(B, H): relative L1 of each head."""
        return _relative_l1s(self.sums.sum(dim=3))

    def errors(self) -> Errors:
        """Compute the figures for a kernel's row in the results."""
        found = self._errors()
        if self.has_figures:
            return found
        figures = {name: math.nan for name, value in vars(found).items() if type(value) is float}
        return replace(found, **figures)  # type: ignore[arg-type]

    def _errors(self) -> Errors:
        row_cosines = cosines(*self.sums[:3])
        head_sums, head_errors = self.sums.sum(dim=3), self.head_errors
        sums = head_sums.sum(dim=(1, 2))
        mse, mae = (sums[4:6] / self.elements).tolist()
        batch, head, query = _position_of_lowest(row_cosines)
        worst_head = _position_of_lowest(-head_errors)
        lowest, p1, p10 = _percentiles(row_cosines, (0, 1, 10))
        return Errors(
            cosine=float(cosines(*sums[:3])),
            relative_l1=float(_relative_l1s(sums)),
            rmse=math.sqrt(mse),
            max_abs=self.max_abs,
            mae=mae,
            mse=mse,
            nan_count=self.nan_count,
            inf_count=self.inf_count,
            mismatched_nonfinite=self.mismatched_nonfinite,
            row_cosine_p1=p1,
            row_cosine_p10=p10,
            row_cosine_min=lowest,
            worst_row=(batch, head, query),
            worst_head=(worst_head[0], worst_head[1]),
            worst_head_cosine=float(cosines(*head_sums[:3])[worst_head]),
            worst_head_relative_l1=float(head_errors[worst_head]),
        )

    def where(self) -> Where:
        """Compute the relative L1 of each head in at most `QUERY_BINS` ranges of queries."""
        length = self.sums.shape[3]
        bins = min(QUERY_BINS, length)
        places = torch.arange(length, device=self.sums.device) * bins // length
        binned = self.sums.new_zeros((*self.sums.shape[:3], bins))
        found = _relative_l1s(binned.index_add_(3, places, self.sums))
        batch, head, worst = _position_of_lowest(-found)
        # Bin b holds the queries with position · bins // length = b.
        first, after = (-(-edge * length // bins) for edge in (worst, worst + 1))
        return Where(
            worst=float(found[batch, head, worst]),
            typical=float(found.nanmedian()),
            head=(batch, head),
            queries=(first, after - 1),
            relative_l1=tuple(
                tuple(float(f"{value:.3g}") for value in by_head)
                for by_head in found.flatten(0, 1).tolist()
            ),
        )


def row_errors(output: Tensor, reference: Tensor, exposed: Tensor | None = None) -> RowErrors:
    """Compare `output` with `reference` row by row; see `compare`.

    Args:
        exposed: (B, H, S) bool, the rows whose non-finite output elements are not errors.
    """
    check_comparable(output, reference)
    spoilt, has_figures = None, False
    sums = torch.empty((7, *output.shape[:3]), dtype=torch.float64, device=output.device)
    largest_errors = []
    nan_count = inf_count = mismatched = 0
    for rows, part, expected in chunks(output, reference):
        error = part - expected
        largest = float(norm(error, ord=math.inf))
        if not math.isfinite(largest):  # count non-finite elements only if some exist
            nan_count += int(part.isnan().sum())
            inf_count += int(part.isinf().sum())
            both = part.isfinite() & expected.isfinite()
            has_figures = has_figures or bool(both.any())
            if exposed is not None:
                part, expected, spoilt_rows = _without_exposed(part, expected, exposed[:, :, rows])
                if spoilt is None:
                    spoilt = torch.zeros(output.shape[:3], dtype=torch.bool, device=output.device)
                spoilt[:, :, rows] = spoilt_rows
            part, expected, odd = _without_agreed_nonfinite(part, expected)
            mismatched += odd
            error = part - expected
            largest = float(norm(error, ord=math.inf))
        else:
            has_figures = True
        sums[0, :, :, rows] = (part * expected).sum(-1)
        sums[1, :, :, rows] = norm(part, dim=-1).square_()
        sums[2, :, :, rows] = norm(expected, dim=-1).square_()
        sums[3, :, :, rows] = norm(expected, ord=1, dim=-1)
        sums[4, :, :, rows] = norm(error, dim=-1).square_()
        sums[5, :, :, rows] = norm(error, ord=1, dim=-1)
        sums[6, :, :, rows] = error.mul_(expected).sum(-1)
        largest_errors.append(largest)
    max_abs = float(torch.tensor(largest_errors, dtype=torch.float64).amax())  # keeps NaN
    return RowErrors(
        sums, output.numel(), max_abs, nan_count, inf_count, mismatched, spoilt, has_figures
    )


def summary(tensor: Tensor) -> Summary:
    """Return the range, mean and population standard deviation of `tensor`, summed in float64.

    Raises:
        ValueError: the tensor is empty.
    """
    if tensor.numel() == 0:
        raise ValueError("an empty tensor has no range, mean or deviation")
    low, high = torch.aminmax(tensor)
    mean = float(tensor.sum(dtype=torch.float64)) / tensor.numel()
    values = tensor.flatten()
    squares = 0.0
    for first in range(0, values.numel(), CHUNK_ELEMENTS):
        part = values[first : first + CHUNK_ELEMENTS].to(torch.float64)
        squares += float((part - mean).square().sum())
    return Summary(float(low), float(high), mean, math.sqrt(squares / values.numel()))


def check_comparable(output: Tensor, reference: Tensor) -> None:
    """Raise ValueError unless both tensors have the same shape (B, H, S, Dv) and are not empty."""
    if output.shape != reference.shape or output.ndim != 4 or output.numel() == 0:
        raise ValueError(
            f"cannot compare an output of shape {tuple(output.shape)} with a reference of shape "
            f"{tuple(reference.shape)}: both must be the same (B, H, S, Dv), and not empty"
        )


def chunks(output: Tensor, reference: Tensor) -> Iterator[tuple[slice, Tensor, Tensor]]:
    """Yield ranges of queries, with both tensors' rows in float64 on the output's device."""
    batch, heads, length, width = output.shape
    step = max(1, CHUNK_ELEMENTS // (batch * heads * width))
    for first in range(0, length, step):
        rows = slice(first, first + step)
        yield (
            rows,
            output[:, :, rows].to(torch.float64),
            reference[:, :, rows].to(output.device, torch.float64),
        )


def _without_exposed(
    part: Tensor, expected: Tensor, exposed: Tensor
) -> tuple[Tensor, Tensor, Tensor]:
    """Return both tensors with zeros where an exposed row is not finite, and these rows."""
    spoilt = ~part.isfinite() & expected.isfinite() & exposed.to(part.device)[..., None]
    return part.masked_fill(spoilt, 0.0), expected.masked_fill(spoilt, 0.0), spoilt.any(-1)


def _without_agreed_nonfinite(part: Tensor, expected: Tensor) -> tuple[Tensor, Tensor, int]:
    """Return both tensors with zeros where non-finite elements agree, and the number of others."""
    both_finite = part.isfinite() & expected.isfinite()
    if both_finite.all():
        return part, expected, 0
    agreed = ~both_finite & ((part == expected) | (part.isnan() & expected.isnan()))
    mismatched = int((~both_finite & ~agreed).sum())
    return part.masked_fill(agreed, 0.0), expected.masked_fill(agreed, 0.0), mismatched


def cosines(dot: Tensor, output_square: Tensor, reference_square: Tensor) -> Tensor:
    """Return cosines from sums of output · reference, output² and reference²; 1 if both are 0."""
    norms = output_square.sqrt() * reference_square.sqrt()
    both_zero = (output_square == 0) & (reference_square == 0)
    one_zero = (output_square == 0) ^ (reference_square == 0)
    found: Tensor = (dot / norms).clamp(-1.0, 1.0)
    return found.masked_fill(both_zero, 1.0).masked_fill(one_zero, 0.0)


def _relative_l1s(sums: Tensor) -> Tensor:
    """Return relative L1 from the sums (7, …) of `RowErrors`; 0 if both tensors are zero."""
    magnitude, error = sums[3], sums[5]
    return (error / magnitude).masked_fill((error == 0) & (magnitude == 0), 0.0)


def _position_of_lowest(values: Tensor) -> tuple[int, ...]:
    flat = int(values.nan_to_num(nan=-math.inf, neginf=-math.inf, posinf=math.inf).argmin())
    return unravelled(flat, values.shape)


def unravelled(flat: int, shape: torch.Size) -> tuple[int, ...]:
    """Return the index of the element at a flat position in a tensor of the given shape.

    `torch.unravel_index` imports SymPy first, which takes half a second.
    """
    index = []
    for size in reversed(shape):
        flat, place = divmod(flat, size)
        index.append(place)
    return tuple(reversed(index))


def _percentiles(values: Tensor, percents: tuple[float, ...]) -> list[float]:
    """Return percentiles by linear interpolation; NaN if any value is NaN.

    `torch.quantile` is limited to 2²⁴ values.
    """
    ordered = values.flatten().sort().values
    if ordered[-1].isnan():
        return [math.nan for _ in percents]
    positions = [(ordered.numel() - 1) * percent / 100 for percent in percents]
    return [
        float(torch.lerp(ordered[math.floor(place)], ordered[math.ceil(place)], place % 1))
        for place in positions
    ]
