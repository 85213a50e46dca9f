"""`replay --selftest`: is this machine fit to measure on?"""

from __future__ import annotations

import json
import logging

import torch
from rich.console import Console
from rich.text import Text

from replay.rows.row_files import Writable, plain
from replay.selftest.all_checks import SelftestReport, selftest

logger = logging.getLogger(__name__)


def run_selftest(device: torch.device, *, quiet: bool) -> SelftestReport:
    """Make all checks, with progress on stderr unless `quiet`."""
    with Console(stderr=True, quiet=quiet).status("") as status:

        def report(name: str) -> None:
            logger.info("%s", name)
            status.update(Text(name))

        return selftest(device, report)


def write_json(verdict: SelftestReport, file: Writable) -> None:
    """Write all checks and what they found."""
    json.dump(plain(verdict.to_json()), file, indent=1)
    file.write("\n")
