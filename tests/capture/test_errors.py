"""Errors are one sentence, even if they come from another process."""

from __future__ import annotations

import pickle
from pathlib import Path

import pytest

from capture.errors import DatasetError


@pytest.mark.parametrize(
    ("error", "sentence"),
    [
        (DatasetError("missing", Path("calls/a.safetensors")), "calls/a.safetensors: missing"),
        (DatasetError("no calls"), "no calls"),
    ],
)
def test_dataset_error_names_the_file(error: DatasetError, sentence: str) -> None:
    again = pickle.loads(pickle.dumps(error))
    for each in (error, again):
        assert str(each) == sentence
        assert (each.reason, each.path) == (error.reason, error.path)
