"""`replay --selftest`: is this machine fit to measure on?"""

from __future__ import annotations

import json
from typing import TextIO

import torch
from rich.console import Console
from rich.text import Text

from replay.selftest.run import Verdict, selftest


def run_selftest(device: torch.device, file: TextIO | None) -> Verdict:
    """Make all checks, with progress on stderr, and write them as JSON."""
    with Console(stderr=True).status("") as status:
        verdict = selftest(device, lambda name: status.update(Text(name)))
    if file is not None:
        json.dump(verdict.to_json(), file, indent=1)
        file.write("\n")
    return verdict
