"""Valid contents of the file for `replay --tolerances`, and messages about invalid ones."""

from pathlib import Path

import pytest

from replay.accuracy.thresholds import (
    ExactThresholds,
    QuantisedThresholds,
    Thresholds,
    ThresholdsError,
)


def read(text: str, directory: Path) -> Thresholds:
    path = directory / "mine.toml"
    path.write_text(text)
    return Thresholds.read(path)


def test_file_replaces_the_defaults(tmp_path: Path) -> None:
    found = read("[quantised]\nminimum_cosine = 0.98\n[sparse]\nrounding_factor = 6\n", tmp_path)
    assert found == Thresholds(
        quantised=QuantisedThresholds(minimum_cosine=0.98),
        sparse=ExactThresholds(rounding_factor=6.0),
    )
    assert found.changes() == "quantised.minimum_cosine=0.98 sparse.rounding_factor=6"
    assert read("", tmp_path) == Thresholds()
    assert Thresholds().changes() == ""


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("[quantized]\n", "no table is called 'quantized': did you mean quantised?"),
        ("[other]\n", "no table is called 'other': choose from exact, quantised, sparse"),
        ("[exact]\nrounding = 1\n", "called 'rounding': did you mean rounding_factor?"),
        ("exact = 1\n", "exact must be a table: write [exact] on its line"),
        (
            '[exact]\nrounding_factor = "6"\n',
            "exact.rounding_factor must be a number of at least 0, such as 4, not '6'",
        ),
        (
            "[exact]\nrounding_factor = true\n",
            "exact.rounding_factor must be a number of at least 0, such as 4, not True",
        ),
        ("[quantised]\nminimum_cosine = nan\n", "a number of at least 0, such as 0.99, not nan"),
        ("[quantised]\nnoise_factor = -1\n", "a number of at least 0, such as 1.35, not -1"),
        ("[exact\n", "is not TOML: "),
        (f"a = {'[' * 3000}{']' * 3000}", "is not TOML: nested too deeply"),
        (f"a = [{'9' * 400}]", "is not TOML: an integer has more than 64 bits"),
    ],
)
def test_invalid_file_is_refused(text: str, message: str, tmp_path: Path) -> None:
    with pytest.raises(ThresholdsError) as caught:
        read(text, tmp_path)
    assert message in str(caught.value)
    assert str(tmp_path / "mine.toml") in str(caught.value)
    assert "\n" not in str(caught.value)


def test_missing_file_is_refused(tmp_path: Path) -> None:
    with pytest.raises(
        ThresholdsError,
        match=r"cannot read .*none\.toml \(No such file or directory\): name a TOML",
    ):
        Thresholds.read(tmp_path / "none.toml")
