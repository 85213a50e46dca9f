"""Runs the `capture` command. Imports torch only after parsing the arguments."""

from __future__ import annotations

import difflib
import importlib
import signal
import sys
import traceback
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from attention_replay.errors import Error
from capture.cli.verbs import RECORD, VERBS, with_flags
from capture.command_line.standard_streams import (
    exit_with,
    give_up_stdout,
    is_of_stdout,
    make_usable,
)
from capture.command_line.termination import interrupted_by_sigterm
from capture.command_line.verbosity import narrated
from capture.models_package import USER_MODULE
from capture.text.printable import printable


def main(argv: Sequence[str] | None = None) -> None:
    """Run the command; exit with 0 on success, 1 if a check failed, 2 on invalid usage.

    After Ctrl-C the exit code is 130, and after SIGTERM 143.
    """
    make_usable()
    given = list(sys.argv[1:] if argv is None else argv)
    try:
        command, arguments = _parsed(given)
    except SystemExit as stopped:
        exit_with("capture", stopped.code)
    with interrupted_by_sigterm() as signals:
        try:
            with narrated(arguments.verbose):
                code = command.run(arguments)
        except KeyboardInterrupt:
            print(f"capture: interrupted{arguments.left_behind}", file=sys.stderr)
            code = 128 + (signals or [signal.SIGINT])[0]
        except BaseException as error:  # some models raise errors that are not Exceptions
            if arguments.debug:
                raise
            code = _explain(error, arguments.left_behind)
    exit_with("capture", code)


def _parsed(given: list[str]) -> tuple[Any, Any]:
    """Return the module of the verb, and the parsed arguments."""
    verb, rest = "record", given
    if given and not given[0].startswith("-"):
        verb, rest = given[0], given[1:]
    command = importlib.import_module(VERBS.get(verb, RECORD))
    parser = command.parser()
    if verb not in ("record", *VERBS):
        near = difflib.get_close_matches(verb, VERBS, n=1) or VERBS
        parser.error(f"unknown verb {verb!r}: did you mean {' or '.join(near)}?")
    return command, parser.parse_args(rest)


def _explain(error: BaseException, left_behind: str) -> int:
    """Print one sentence, which ends with `left_behind`, and return the exit code."""
    from capture.errors import MissingPackage, described

    error = MissingPackage.behind(error)
    if isinstance(error, Error):
        sentence = f"capture: {printable(with_flags(str(error)))}{left_behind}"
        print(sentence, file=sys.stderr)
        return 2
    if isinstance(error, OSError) and is_of_stdout(error):
        return give_up_stdout("capture", error)
    if isinstance(error, SystemExit) and isinstance(error.__context__, BrokenPipeError):
        return 1  # rich found that the reader of stdout has gone
    print(
        f"capture: failed with {printable(described(error))} "
        f"({_line_of_user(error)}traceback with --debug){left_behind}",
        file=sys.stderr,
    )
    return 1


def _line_of_user(error: BaseException) -> str:
    """Return the last line of the user's `FILE.py:FUNCTION` that an error passed, if any."""
    place = ""
    for frame, line in traceback.walk_tb(error.__traceback__):
        if str(frame.f_globals.get("__name__")).startswith(USER_MODULE):
            place = f"{printable(Path(frame.f_code.co_filename).name)}, line {line}; "
    return place
