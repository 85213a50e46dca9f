"""`replay --selftest`: is this machine fit to measure on?"""

from __future__ import annotations

import json
import logging
from typing import TextIO

import torch
from rich.console import Console
from rich.text import Text

from replay.selftest.run import Verdict, selftest

logger = logging.getLogger(__name__)


def run_selftest(device: torch.device, file: TextIO | None, *, quiet: bool) -> Verdict:
    """Make all checks, with progress on stderr unless `quiet`, and write them as JSON."""
    with Console(stderr=True, quiet=quiet).status("") as status:

        def report(name: str) -> None:
            logger.info("%s", name)
            status.update(Text(name))

        verdict = selftest(device, report)
    if file is not None:
        json.dump(verdict.to_json(), file, indent=1)
        file.write("\n")
    return verdict
