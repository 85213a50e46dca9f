"""Wrong values of any option of both commands give one sentence and exit code 2.

The cases are generated from the parsers, so they include options that are added later.
"""

import argparse
import re
from collections.abc import Iterator

import pytest

from capture.cli.record_command import parser as capture_parser
from replay.cli.files import output_file
from replay.cli.random import parser

EMPTY = ("", " ", "\t\n")
NO_NUMBERS = (*EMPTY, "x", "1x", "nan", "inf", "-inf", "1e400", "9" * 30, "9" * 5000, "0", "-1")
MAY_BE_ZERO = {"--seed", "--calls-before", "--heads", "--rank"}
MAY_BE_LARGE = {"--max-seconds", "--timeout", "--max-bytes", "--buffer-bytes"}


def cases() -> Iterator[tuple[argparse.ArgumentParser, str, str]]:
    for command in (capture_parser(), parser()):
        for action in command._actions:
            option = action.option_strings[-1]
            if action.nargs == 0 or option == "--prompt":  # a prompt may be empty
                continue
            is_text = action.type in (None, output_file) or action.choices is not None
            for value in EMPTY if is_text else NO_NUMBERS:
                if value == "0" and option in MAY_BE_ZERO:
                    continue
                if value == "9" * 30 and option in MAY_BE_LARGE:
                    continue
                yield command, option, value


CASES = list(cases())


def test_every_option_is_in_the_table() -> None:
    for command, options in (("capture", ["--out", "--max"]), ("replay random", ["--json", "-sq"])):
        there = {option for each, option, _ in CASES if each.prog == command}
        assert there.issuperset(options)
        assert len(there) > 10


@pytest.mark.parametrize(
    ("command", "option", "value"),
    CASES,
    ids=[f"{command.prog} {option} {value[:8]!r}" for command, option, value in CASES],
)
def test_wrong_value_is_one_sentence(
    command: argparse.ArgumentParser, option: str, value: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit) as stopped:
        command.parse_args([option, value])
    assert stopped.value.code == 2
    printed = capsys.readouterr().err
    assert re.match(rf"{command.prog}: argument (-\w+/)?{option}: ", printed)
    assert printed.count("\n") == 1
    if not value.strip() and option != "--dtype":  # the message lists the choices
        assert "is empty: leave it out, or give a value" in printed or "choose from" in printed
    # The message must not be argparse's own, which names one of our functions.
    assert not re.search(r"invalid \w+ value", printed)


def test_empty_prompt_is_a_prompt() -> None:
    assert capture_parser().parse_args(["--prompt", ""]).prompt == ""


@pytest.mark.parametrize(
    ("given", "sentence"),
    [
        (["-hkv", "2"], "unknown option -hkv: did you mean -hk?"),
        (["-hv", "2"], "unknown option -hv: did you mean -hq or -hk?"),
        (["-hd", "64"], "unknown option -hd: did you mean -d or -hq?"),
        (["-kv=4"], "unknown option -kv: did you mean -sk or -hk?"),
        (["-bs", "4"], "unknown option -bs: did you mean -b or -sq?"),
        (["-dq", "3"], "unknown option -dq: did you mean -d or -sq?"),
        (["-sk5"], "unknown option -sk5: did you mean -sk or --mask?"),
        (["-mask"], "unknown option -mask: did you mean --mask or -sk?"),
        (["--kernals", "eager"], "unknown option --kernals: did you mean --kernels?"),
        (["-n", "2"], "unknown option -n"),
        (["--rsndou", "2"], "unknown option --rsndou"),
        (["--dir", "a"], "unknown option --dir: other verbs have it"),
        (["-sq", "8", "--seed=1", "--seed", "2"], "--seed is given twice: give it once"),
        (["-b2", "-b", "3"], "-b is given twice: give it once"),
    ],
)
def test_misspelt_or_repeated_option_is_one_sentence(
    given: list[str], sentence: str, capsys: pytest.CaptureFixture[str]
) -> None:
    """The command prints neither its help nor argparse's message about another option's value."""
    with pytest.raises(SystemExit) as stopped:
        parser().parse_args(given)
    assert stopped.value.code == 2
    printed = capsys.readouterr()
    assert (printed.out, printed.err) == (
        "",
        f"replay random: {sentence} (see replay random --help)\n",
    )


def test_list_that_is_given_twice_has_the_values_of_both() -> None:
    assert parser().parse_args(["--metric", "energy"]).metric == "energy"  # without the default
    assert parser().parse_args(["--metric", "energy", "--metric", "time"]).metric == "energy,time"
    assert capture_parser().parse_args(["--heads", "0-2", "--heads", "2,9"]).heads == (0, 1, 2, 9)


def test_values_may_begin_with_a_dash() -> None:
    """Values of one-letter options, numbers, and words of a prompt may begin with a dash."""
    found = parser().parse_args(["-b2", "-d=32", "-hq=8", "--kernels", "a", "-q"])
    assert (found.batch, found.head_dim, found.q_heads) == ((2,), (32,), (8,))
    assert (found.kernels, found.quiet) == ("a", True)
    assert capture_parser().parse_args(["--prompt", "-p is what?"]).prompt == "-p is what?"
    assert capture_parser().parse_args(["--prompt=-p"]).prompt == "-p"
