"""Spread between two equal runs on a machine, as the user specifies it."""

from __future__ import annotations

from pathlib import Path

from replay.comparison.comparison import measured_spread
from replay.comparison.conditions import read_share
from replay.comparison.row_matching import ComparisonError, Run, read_run
from replay.comparison.speed_change import NO_SPREAD, Basis, Spread


def read_spread(given: str | None, before: Run, basis: Basis | None = None) -> Spread:
    """Read the spread from a share such as `1.5%` or the rows of a repetition; None means 0.

    The repetition is a second run of the kernels on the calls of `before`.

    Raises:
        ComparisonError: the string is neither a share nor a file, or the repetition ran other
        kernels or calls.
        RowsError: the rows cannot be read.
    """
    if given is None:
        return NO_SPREAD
    if Path(given).exists():
        return measured_spread(before, read_run(given), basis)
    try:
        return Spread(read_share(given, "--spread "), "--spread")
    except ComparisonError as error:
        raise ComparisonError(
            f"--spread {given}: expected a share such as 1.5%, or a file of rows"
        ) from error
