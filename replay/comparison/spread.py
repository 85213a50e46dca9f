"""Spread between two equal runs on a machine, as specified by the user."""

from __future__ import annotations

from pathlib import Path

from capture.storage.json_data import parsed
from capture.storage.plain_files import given_text
from replay.comparison.baselines import as_run
from replay.comparison.comparison import measured_spread
from replay.comparison.conditions import read_share
from replay.comparison.row_matching import ComparisonError, Run
from replay.comparison.speed_change import NO_SPREAD, Basis, Spread
from replay.rows.row_files import BEGINNING, read_jsonl

CHECK = "run to run"
"""Name of the self-test's check."""


def read_spread(given: str | None, before: Run, basis: Basis | None = None) -> Spread:
    """Read the spread from `1.5%`, a file of `replay selftest --json`, or rows of a repetition.

    The repetition is a second run of the kernels and calls of `before`. None means no spread.

    Raises:
        ComparisonError: the text has none of these forms, or the file describes other machines or
            kernels.
        RowsError: the rows cannot be read.
    """
    if given is None:
        return NO_SPREAD
    path = Path(given)
    if not path.exists():
        try:
            return Spread(read_share(given, "--spread "), "--spread")
        except ComparisonError as error:
            raise ComparisonError(
                f"--spread {given}: no such file, and not a share as 1.5%"
            ) from error
    if _begins_like_rows(path):
        return measured_spread(before, as_run(given, read_jsonl(path)), basis)
    return _of_selftest(given, path, before)


def _begins_like_rows(path: Path) -> bool:
    try:
        return given_text(path).startswith(BEGINNING)
    except UnicodeDecodeError:
        return False
    except OSError as error:
        raise ComparisonError(f"cannot read {path}: {error.strerror}") from error


def _of_selftest(given: str, path: Path, before: Run) -> Spread:
    try:
        found = parsed(given_text(path))
        checks = {check["name"]: check for check in found["checks"]}
        device = str(found["machine"]["device"])
        share = float(checks[CHECK]["figures"]["spread"]) if CHECK in checks else None
    except (ValueError, KeyError, TypeError) as error:
        raise ComparisonError(
            f"--spread {given}: not what `replay selftest --json` or `replay --json` writes"
        ) from error
    if device not in before.devices:
        raise ComparisonError(
            f"--spread {given} is of {device}, and {before.name} of {' and '.join(before.devices)}:"
            " make the self-test there"
        )
    if share is None or not 0 <= share < 1:
        raise ComparisonError(
            f"--spread {given}: that self-test could not measure it, give a share as 1.5%"
        )
    return Spread(share, f"self-test {given}")
