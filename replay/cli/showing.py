"""Full display of one replay: the common part of `replay --dir`, `random` and `suite`.

The module imports torch late.
"""

from __future__ import annotations

import argparse
import logging
import sys
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING

from capture.text.printable import printable
from replay.api.choices import ReplayRequest
from replay.cli.files import check_files, noted, stdout_is_taken
from replay.cli.replayed import exit_code, replayed
from replay.cli.report import check_report, write

if TYPE_CHECKING:
    from replay.cli.replayed import Replayed
    from replay.plan.plan import Plan

logger = logging.getLogger(__name__)


def show(
    arguments: argparse.Namespace,
    parser: argparse.ArgumentParser,
    request: Callable[[], ReplayRequest],
) -> int:
    """Replay, show and write everything that the arguments request; return the exit code.

    Args:
        parser: parser of the verb.
        request: function that makes the request, called after checking that the files can be
            written.

    Raises:
        Error: an argument cannot be used.
    """
    check_files(arguments)
    wanted = request()
    if arguments.report:
        check_report(Path(arguments.report))
    replay = replayed(wanted, arguments, one_type="--report" if arguments.report else "")
    if arguments.report:
        with noted(replay.unwritten):
            write(replay.rows, [], Path(arguments.report), None, None)
    code = exit_code(replay, [], check=arguments.check)
    print_next_step(arguments, parser, replay)
    return code


def print_next_step(
    arguments: argparse.Namespace,
    parser: argparse.ArgumentParser,
    replay: Replayed,
    plan: Plan | None = None,
) -> None:
    """Print the next step, unless the user wants no hints or a file is missing."""
    if not (arguments.quiet or replay.unwritten or stdout_is_taken(arguments)):
        from replay.cli.next_step import next_step

        if step := next_step(arguments, parser, replay.rows, plan, replay.dataset):
            # The line is not wrapped, because a command with line breaks cannot be pasted.
            print(f"next: {printable(step)}", file=sys.stderr)
    logger.info("all is printed")
