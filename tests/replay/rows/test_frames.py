"""Data frames of rows have a column for each field and a line for each row."""

import math
import sys

import pytest

import attention_replay as ar
from capture.errors import MissingPackage
from replay.rows.fields import FIELDS, leaf
from replay.rows.row_files import row_to_json
from tests.factories import full_row, row

PATHS = [field.path for field in FIELDS]


def test_every_field_is_a_column() -> None:
    rows = ar.Rows([row("crashed", status="crash"), full_row(), row("timed", ms=2.0)])
    frame = rows.to_dataframe()
    assert list(frame.columns) == PATHS
    assert len(frame) == 3
    for place, each in enumerate(rows):
        tree = row_to_json(each)
        for path in PATHS:
            found, wanted = frame[path][place], leaf(tree, path)
            if wanted is None:
                assert found is None or math.isnan(found), path
            else:
                assert found == wanted, path
    assert list(ar.Rows().to_dataframe().columns) == PATHS


def test_missing_pandas_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "pandas", None)
    with pytest.raises(MissingPackage, match="requires pandas: pip install pandas"):
        ar.Rows([row()]).to_dataframe()
