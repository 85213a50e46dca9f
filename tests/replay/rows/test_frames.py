"""Rows as data frames: the columns are the fields, the cells the rows' values."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import pandas
import polars
import pytest

from capture.errors import MissingPackage
from replay.rows import frames
from replay.rows.fields import FIELDS, leaf
from replay.rows.frames import UnknownLibrary, to_dataframe
from replay.rows.row_files import row_to_json
from tests.factories import accuracy, errors, full_row, row

PATHS = [field.path for field in FIELDS]


@pytest.mark.parametrize("library", frames.LIBRARIES)
def test_every_field_is_a_column(library: frames.Library) -> None:
    rows = [row("crashed", status="crash"), full_row(), row("timed", ms=2.0)]
    frame = to_dataframe(rows, library=library)
    assert list(frame.columns) == PATHS
    assert len(frame) == 3
    for place, each in enumerate(rows):
        tree = row_to_json(each)
        for path in PATHS:
            found, wanted = frame[path][place], leaf(tree, path)
            if isinstance(found, polars.Series):
                found = found.to_list()
            if wanted is None:
                assert found is None or math.isnan(found), path
            else:
                assert found == wanted, path


@pytest.mark.parametrize("library", frames.LIBRARIES)
def test_figures_are_numbers_where_some_are_missing(library: frames.Library) -> None:
    nan = row("nan", ms=1.0, accuracy=accuracy(errors(cosine=math.nan)))
    frame = to_dataframe([row("crashed", status="crash"), row(ms=2.0), nan], library=library)
    assert frame["time_ms.p50"].mean() == 1.5
    assert frame["accuracy.reference.cosine"].mean() == 1.0


@pytest.mark.parametrize("library", frames.LIBRARIES)
def test_empty_rows_make_an_empty_frame(library: frames.Library) -> None:
    assert list(to_dataframe([], library=library).columns) == PATHS


def without(*missing: str) -> Callable[[str], Any]:
    return lambda name: None if name in missing else object()


def test_polars_is_taken_where_pandas_is_missing(monkeypatch: pytest.MonkeyPatch) -> None:
    assert isinstance(to_dataframe([row()]), pandas.DataFrame)
    monkeypatch.setattr("importlib.util.find_spec", without("pandas"))
    assert isinstance(to_dataframe([row()]), polars.DataFrame)


def test_missing_library_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("importlib.util.find_spec", without("pandas", "polars"))
    with pytest.raises(MissingPackage, match="requires pandas or polars: pip install pandas"):
        to_dataframe([row()])
    with pytest.raises(MissingPackage, match="requires polars: pip install polars"):
        to_dataframe([row()], library="polars")
    with pytest.raises(UnknownLibrary, match="choose from pandas, polars"):
        to_dataframe([row()], library="dask")  # type: ignore[arg-type]
