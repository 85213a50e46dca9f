"""Tables of the options of both commands, from their own parsers."""

from __future__ import annotations

import argparse
import contextlib
import io
from collections.abc import Callable, Iterator, Sequence

import capture.cli.main
import capture.cli.verbs
import replay.cli.main

EVERYWHERE = {"help", "version", "quiet", "verbose", "debug"}
"""Options of every verb, which the page describes once."""


MAINS: dict[str, Callable[[Sequence[str]], None]] = {
    "capture": capture.cli.main.main,
    "replay": replay.cli.main.main,
}
VERBS: dict[str, Sequence[str]] = {
    "capture": list(capture.cli.verbs.VERBS),
    "replay": list(replay.cli.main.VERBS),
}


def options(command: str) -> str:
    """List the options of a command and of its verbs, a table for each."""
    return "\n".join(
        [_table(command, parser_of(command))]
        + [_table(f"{command} {verb}", parser_of(command, verb)) for verb in VERBS[command]]
    )


def parser_of(command: str, verb: str = "") -> argparse.ArgumentParser:
    """Return the parser that prints the help of a command or of its verb."""
    found: list[argparse.ArgumentParser] = []
    print_help = argparse.ArgumentParser.print_help

    def noted(self: argparse.ArgumentParser, file: object = None) -> None:
        found.append(self)

    # The commands build parsers on demand, so the parser is found by printing the help.
    argparse.ArgumentParser.print_help = noted  # type: ignore[method-assign]
    try:
        with contextlib.suppress(SystemExit), contextlib.redirect_stdout(io.StringIO()):
            MAINS[command]([verb, "--help"] if verb else ["--help"])
    finally:
        argparse.ArgumentParser.print_help = print_help  # type: ignore[method-assign]
    return found[-1]


def _table(command: str, parser: argparse.ArgumentParser) -> str:
    description = " ".join((parser.description or "").split())
    heading = (
        [f"### {command}", ""] if " " in command else []
    )  # the page lists the command's own options
    lines = [*heading, description, "", "| option | meaning |", "|---|---|"]
    for action in _actions(parser):
        meaning = parser._get_formatter()._expand_help(action) if action.help else ""
        lines.append(f"| `{_form(action)}` | {_escaped(' '.join(meaning.split()))} |")
    return "\n".join(lines) + "\n"


def _actions(parser: argparse.ArgumentParser) -> Iterator[argparse.Action]:
    for action in parser._actions:
        hidden = action.help == argparse.SUPPRESS or isinstance(action, argparse._SubParsersAction)
        if not hidden and action.dest not in EVERYWHERE:
            yield action


def _form(action: argparse.Action) -> str:
    """Return an option as it is typed, such as `--max N`."""
    value = action.metavar or (action.choices and f"{{{','.join(map(str, action.choices))}}}")
    value = value or action.dest.upper()
    if not isinstance(value, str):
        value = " ".join(value)
    if not action.option_strings:
        return _escaped(value + "…" * (action.nargs in ("+", "*")))
    takes_a_value = action.nargs != 0
    return _escaped(", ".join(action.option_strings) + f" {value}" * takes_a_value)


def _escaped(text: str) -> str:
    return text.replace("|", "\\|")
