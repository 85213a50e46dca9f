"""Wrong values of every option of both commands: one sentence, exit code 2.

The table is made from the parsers themselves, so that an option added later is in it.
"""

from __future__ import annotations

import argparse
import re
from collections.abc import Iterator

import pytest

from capture.cli.main import _parser
from replay.cli.arguments import parser

EMPTY = ("", " ", "\t\n")
NO_NUMBERS = (*EMPTY, "x", "1x", "nan", "inf", "-inf", "1e400", "9" * 30, "9" * 5000, "0", "-1")
MAY_BE_ZERO = {"--seed", "--calls-before", "--heads", "--rank"}
MAY_BE_LARGE = {"--scale", "--max-seconds", "--timeout", "--max-bytes", "--buffer-bytes"}


def cases() -> Iterator[tuple[argparse.ArgumentParser, str, str]]:
    for command in (_parser(), parser()):
        for action in command._actions:
            option = action.option_strings[-1]
            if action.nargs == 0 or option == "--prompt":  # which may be empty
                continue
            is_text = action.type is None or action.choices is not None
            for value in EMPTY if is_text else NO_NUMBERS:
                if value == "0" and option in MAY_BE_ZERO:
                    continue
                if value == "9" * 30 and option in MAY_BE_LARGE:
                    continue
                yield command, option, value


CASES = list(cases())


def test_every_option_is_in_the_table() -> None:
    for command, options in (("capture", ["--out", "--max"]), ("replay", ["--plan", "-sq"])):
        there = {option for each, option, _ in CASES if each.prog == command}
        assert there.issuperset(options)
        assert len(there) > 10


@pytest.mark.parametrize(
    ("command", "option", "value"),
    CASES,
    ids=[f"{command.prog} {option} {value[:8]!r}" for command, option, value in CASES],
)
def test_a_wrong_value_is_one_sentence(
    command: argparse.ArgumentParser, option: str, value: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit) as stopped:
        command.parse_args([option, value])
    assert stopped.value.code == 2
    printed = capsys.readouterr().err
    assert re.match(rf"{command.prog}: argument (-\w+/)?{option}: ", printed)
    assert printed.count("\n") == 1
    if not value.strip() and option != "--dtype":  # which lists what there is
        assert "is empty: leave it out, or give a value" in printed or "choose from" in printed
    # Not argparse's own words, which name a function of ours.
    assert "invalid" not in printed or "choose from" in printed


def test_an_empty_prompt_is_a_prompt() -> None:
    assert _parser().parse_args(["--prompt", ""]).prompt == ""
