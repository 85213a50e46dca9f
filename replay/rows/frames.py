"""The conversion of rows to a data frame; pandas and polars are optional."""

from __future__ import annotations

import importlib.util
from collections.abc import Iterable
from typing import Any, Literal

from attention_replay.errors import Error
from capture.errors import MissingPackage
from replay.rows.fields import FIELDS, leaf
from replay.rows.row import Row
from replay.rows.row_files import row_to_json

Library = Literal["pandas", "polars"]
LIBRARIES: tuple[Library, ...] = ("pandas", "polars")


class UnknownLibrary(Error):
    """Name of a library other than pandas and polars."""


def to_dataframe(rows: Iterable[Row], *, library: Library | None = None) -> Any:
    """Make a data frame with a line per row and a column per field, named by its dotted path.

    The columns are those of CSV (docs/fields.md): `kernel`, `call.shape.head_dim`, `time_ms.p50`,
    `speedup.ratio`, `accuracy.reference.cosine` … A field without values gives an empty column.

    Args:
        library: `pandas` or `polars`; by default pandas if it is installed, else polars.

    Returns:
        A `pandas.DataFrame` or a `polars.DataFrame`.

    Example:
        >>> frame = to_dataframe(Rows.read("rows.jsonl"))
        >>> frame.groupby("kernel")["speedup.ratio"].median()

    Raises:
        MissingPackage: the library is not installed.
        UnknownLibrary: the library is neither pandas nor polars.
    """
    if library is not None and library not in LIBRARIES:
        raise UnknownLibrary(f"unknown library {library!r}: choose from {', '.join(LIBRARIES)}")
    trees = [row_to_json(row) for row in rows]
    columns = {field.path: [leaf(tree, field.path) for tree in trees] for field in FIELDS}
    wanted = LIBRARIES if library is None else (library,)
    found = next((name for name in wanted if importlib.util.find_spec(name)), None)
    if found is None:
        raise MissingPackage(
            f"a data frame requires {' or '.join(wanted)}: pip install {wanted[0]}"
        )
    if found == "pandas":
        import pandas

        return pandas.DataFrame(columns)
    import polars

    # Types are inferred from all rows, because the first kernel may not have run.
    return polars.DataFrame(columns, strict=False, infer_schema_length=None)
