"""The `replay` command: finds the verb, and turns errors into exit codes.

The module imports torch only after parsing the arguments.
"""

from __future__ import annotations

import difflib
import errno
import importlib
import itertools
import os
import shlex
import sys
from collections.abc import Sequence

from attention_replay.errors import Error
from capture.command_line.standard_streams import (
    exit_with,
    give_up_stdout,
    is_full_stdout,
    is_of_stdout,
    make_usable,
)
from capture.text.printable import printable
from replay.cli.moved_flags import where_it_moved

VERBS = {
    "compare": "replay.cli.compare",
    "devices": "replay.cli.devices",
    "doctor": "replay.cli.doctor",
    "explain": "replay.cli.explain",
    "kernels": "replay.cli.kernels",
    "plan": "replay.cli.plan",
    "profile": "replay.cli.profile",
    "random": "replay.cli.random",
    "report": "replay.cli.report",
    "reproduce": "replay.cli.reproduce",
    "selftest": "replay.cli.selftest",
    "suite": "replay.cli.suite",
    "verify": "replay.cli.verify",
    "watch": "replay.cli.watch",
}
"""Module of each verb; its `run(argv)` returns the exit code."""

DEFAULT = "replay.cli.compare_kernels"
"""Module of the default verb, which has no name."""

WITH_MOVED_FLAGS = (DEFAULT, VERBS["random"], VERBS["suite"])
"""Verbs that once had flags which now belong to other verbs."""


def main(argv: Sequence[str] | None = None) -> None:
    """Run the command; exit with 0 on success, 1 if a check failed, 2 on wrong usage."""
    make_usable()
    given = list(sys.argv[1:] if argv is None else argv)
    try:
        code = _run(given)
    except SystemExit as stopped:
        exit_with("replay", stopped.code)
    except KeyboardInterrupt as stopped:
        detail = f": {printable(str(stopped))}" if str(stopped) else ""
        print(f"replay: interrupted{detail}", file=sys.stderr)
        code = 130
    except Exception as error:
        if "--debug" in given:
            raise
        code = _explain(error, given)
    exit_with("replay", code)


def _run(given: list[str]) -> int:
    name, others = DEFAULT, given
    if given and not given[0].startswith("-"):
        if given[0] not in VERBS:
            return _refuse(_unknown(given[0]))
        name, others = VERBS[given[0]], given[1:]
    if name in WITH_MOVED_FLAGS and (sentence := where_it_moved(others)):
        return _refuse(sentence)
    if not given:
        return _refuse("nothing to replay: give --dir DIR, or a verb (see replay --help)")
    code: int = importlib.import_module(name).run(others)
    return code


def _unknown(verb: str) -> str:
    near = difflib.get_close_matches(verb, VERBS, n=1)
    hint = f"did you mean {near[0]}?" if near else f"choose from {', '.join(VERBS)}"
    if os.path.exists(verb):
        hint = f"did you mean {shlex.join(['replay', '--dir', verb])}?"
    return f"no verb {verb!r}: {hint}"


def _refuse(sentence: str) -> int:
    print(f"replay: {printable(sentence)}", file=sys.stderr)
    return 2


def _explain(error: BaseException, given: list[str]) -> int:
    """Print an error in one sentence and return the exit code."""
    from capture.errors import MissingPackage

    error = MissingPackage.behind(error)
    if isinstance(error, Error):
        return _refuse(str(error))
    if isinstance(error, OSError) and error.errno == errno.ENAMETOOLONG:
        return _refuse(f"{error.filename}: {error.strerror}, name another")
    if isinstance(error, OSError) and is_of_stdout(error) and _is_stdouts_own(error):
        return give_up_stdout("replay", error)
    if isinstance(error, OSError) and error.errno in (errno.ENOSPC, errno.EDQUOT):
        named = f" {error.filename}" if error.filename else ""
        remedy = "make room" + ("; --resume continues the --json file" if _keeps(given) else "")
        return _refuse(f"cannot write{named}: {error.strerror}: {remedy}")
    text = printable(str(error))
    print(
        f"replay: unexpected {type(error).__name__}: {text} (traceback with --debug)",
        file=sys.stderr,
    )
    return 1


def _is_stdouts_own(error: OSError) -> bool:
    # A full disk is reported without the name of the file being written.
    return isinstance(error, BrokenPipeError) or is_full_stdout()


def _keeps(given: list[str]) -> bool:
    """Return True if rows were written to a file, which `--resume` can continue."""
    if given[0] in VERBS and given[0] not in ("plan", "suite"):
        return False
    files = [after for option, after in itertools.pairwise(given) if option == "--json"]
    files += [option.partition("=")[2] for option in given if option.startswith("--json=")]
    return bool(files) and "-" not in files
