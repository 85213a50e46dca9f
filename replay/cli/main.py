"""The `replay` command: finds the verb, runs it, and turns errors into exit codes.

The module imports torch only after parsing the arguments.
"""

from __future__ import annotations

import argparse
import difflib
import errno
import importlib
import os
import shlex
import signal
import sys
from collections.abc import Sequence
from typing import Any

from attention_replay.errors import Error
from capture.command_line.standard_streams import (
    exit_with,
    give_up_stdout,
    is_full_stdout,
    is_of_stdout,
    make_usable,
)
from capture.command_line.termination import interrupted_by_sigterm
from capture.command_line.verbosity import narrated
from replay.api.messages import say, speaking_as

NAMES = (
    *("agree", "cache-formats", "compare", "devices", "doctor", "explain", "export", "foretell"),
    *("history", "kernels", "plan", "profile", "random", "report", "reproduce", "selftest"),
    *("suite", "tune", "verify", "watch"),
)
VERBS = {name: f"replay.cli.{name.replace('-', '_')}" for name in NAMES}
"""Module of each verb: `parser()` returns the verb's parser, `run(arguments)` the exit code."""

DEFAULT = "replay.cli.compare_kernels"
"""Module of the default verb, which runs if the arguments name no verb."""

WITH_SHAPE = ("profile", "watch")
"""Verbs with a second form for one random call, such as `replay watch random`."""


def main(argv: Sequence[str] | None = None) -> None:
    """Run the command; exit with 0 on success, 1 if a check failed, 2 for wrong usage.

    After Ctrl-C the exit code is 130, and after SIGTERM 143.
    """
    make_usable()
    given = list(sys.argv[1:] if argv is None else argv)
    command = " ".join(["replay", *(name for name in given[:1] if name in VERBS)])
    with speaking_as(command), interrupted_by_sigterm() as signals:
        try:
            code: Any = _run(given)
        except SystemExit as stopped:
            code = stopped.code
        except KeyboardInterrupt as stopped:
            say(f"interrupted: {stopped}" if str(stopped) else "interrupted")
            code = 128 + (signals or [signal.SIGINT])[0]
        except Exception as error:
            if "--debug" in given:
                raise
            code = _explain(error, command)
    exit_with(command, code)


def _run(given: list[str]) -> int:
    if not given:
        raise Error("nothing to replay: give --dir DIR, or a verb (see replay --help)")
    verb = "" if given[0].startswith("-") else given[0]
    if verb and verb not in VERBS:
        raise Error(_unknown(verb))
    module = importlib.import_module(VERBS[verb] if verb else DEFAULT)
    if not verb and (sentence := _of_a_verb(given, module.parser())):
        raise Error(sentence)
    options = given[1:] if verb else given
    parser = module.parser
    if verb in WITH_SHAPE and options[:1] == ["random"]:
        options, parser = options[1:], module.parser_with_shape
    arguments = parser().parse_args(options, argparse.Namespace(command=given))
    with narrated(arguments.verbose):
        code: int = module.run(arguments)
    return code


def _of_a_verb(given: Sequence[str], parser: argparse.ArgumentParser) -> str:
    """Return a sentence about the first option that is cut short or that only verbs have."""
    options = parser._option_string_actions
    flags = (each.partition("=")[0] for each in given)
    for flag in flags:
        if flag.startswith("--") and flag not in options:
            if longer := [each for each in options if each.startswith((f"{flag}-", f"{flag}s"))]:
                return f"unknown option {flag}: did you mean {' or '.join(longer)}?"
            parsers = {each: importlib.import_module(VERBS[each]).parser() for each in VERBS}
            verbs = [name for name, each in parsers.items() if flag in each._option_string_actions]
            if flag[2:] in VERBS or verbs:
                names = " or ".join(f"`replay {each}`" for each in verbs or [flag[2:]])
                return f"unknown option {flag}: use {names}"
    return ""


def _unknown(verb: str) -> str:
    near = difflib.get_close_matches(verb, VERBS, n=1)
    hint = f"did you mean {near[0]}?" if near else f"choose from {', '.join(VERBS)}"
    if os.path.exists(verb):
        hint = f"did you mean {shlex.join(['replay', '--dir', verb])}?"
    return f"no verb {verb!r}: {hint}"


def _explain(error: BaseException, command: str) -> int:
    """Print an error in one sentence and return the exit code."""
    from capture.errors import MissingPackage

    error = MissingPackage.behind(error)
    if isinstance(error, Error):
        say(str(error))
    elif isinstance(error, OSError) and error.errno == errno.ENAMETOOLONG:
        say(f"{error.filename}: {error.strerror}, name another")
    elif isinstance(error, OSError) and is_of_stdout(error) and _is_stdouts_own(error):
        return give_up_stdout(command, error)
    elif isinstance(error, OSError) and error.errno in (errno.ENOSPC, errno.EDQUOT):
        named = f" {error.filename}" if error.filename else ""
        say(f"cannot write{named}: {error.strerror}: make room")
    else:
        say(f"unexpected {type(error).__name__}: {error} (traceback with --debug)")
        return 1
    return 2


def _is_stdouts_own(error: OSError) -> bool:
    # The error of a full disk does not name its file, so check stdout itself.
    return isinstance(error, BrokenPipeError) or is_full_stdout()
