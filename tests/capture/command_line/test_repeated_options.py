"""Options given twice: lists grow, and two values of any other option are refused.

The list of options is made from the parsers of both commands and the sub-commands.
"""

from __future__ import annotations

import argparse
import importlib
from collections.abc import Iterator

import pytest

from capture.cli.record_command import parser as capture_parser
from replay.cli import random
from replay.cli.compare_kernels import parser
from replay.cli.main import VERBS
from tests.noted_options import options, values_of

LISTS = {
    *("--heads", "--modules", "--kernels", "--call", "--metric", "--gpus", "--env", "--fail-on")
}
"""Options whose values form a list."""


def needed(command: argparse.ArgumentParser) -> list[str]:
    """Return the arguments that a command requires."""
    groups = [group for group in command._mutually_exclusive_groups if group.required]
    required = [group._group_actions[0] for group in groups]
    required += [action for action in command._actions if action.required]
    return [
        part
        for action in required
        for part in (*action.option_strings[-1:], *(action.choices or ["x"])[:1])
    ]


def cases() -> Iterator[tuple[argparse.ArgumentParser, str, list[str]]]:
    others = (importlib.import_module(name).parser() for name in VERBS.values())
    for command in (capture_parser(), parser(), *others):
        for action in options(command):
            if len(values := values_of(action)) == 2:
                yield command, action.option_strings[-1], values


CASES = list(cases())


def test_every_list_is_among_them() -> None:
    assert {option for _, option, _ in CASES} > LISTS


@pytest.mark.parametrize(
    ("command", "option", "values"),
    CASES,
    ids=[f"{command.prog} {option}" for command, option, _ in CASES],
)
def test_no_value_is_dropped(
    command: argparse.ArgumentParser,
    option: str,
    values: list[str],
    capsys: pytest.CaptureFixture[str],
) -> None:
    first, second = values
    given = [option, first, option, second, *needed(command)]
    if option in LISTS:
        found = getattr(command.parse_args(given), option.strip("-").replace("-", "_"))
        parts = found.split(",") if isinstance(found, str) else map(str, found)
        assert [*parts] == values
        return
    with pytest.raises(SystemExit) as stopped:
        command.parse_args(given)
    assert stopped.value.code == 2
    printed = capsys.readouterr().err
    assert f"{option}: is given twice, with two values: leave out one (see " in printed
    assert printed.count("\n") == 1


def test_same_value_twice_is_accepted() -> None:
    """The value may be written in two ways, and a flag may also be given twice."""
    found = capture_parser().parse_args(["--max", "2", "--max=02", "--audit", "--audit"])
    assert (found.max, found.audit) == (2, True)
    assert random.parser().parse_args(["-d", "64", "-d64"]).d == 64


def test_names_of_a_default_are_not_among_those_given() -> None:
    assert random.parser().parse_args(["--metric", "energy"]).metric == "energy"
    assert capture_parser().parse_args(["--heads", "0-2", "--heads", "2,9"]).heads == (0, 1, 2, 9)


def test_what_was_given_is_known_even_where_it_is_the_default() -> None:
    assert random.parser().parse_args([]).given == {}
    found = random.parser().parse_args(["-d", "64", "--causal", "--env", "a=b"]).given
    assert found == {"d": 64, "causal": True, "env": ["a=b"]}
