"""The script of the action: replay a dataset, compare with the baseline, write the summary.

Reads the action's inputs from `REPLAY_…`, and runs only the command `replay`. Exits as the worse of
its runs.
"""

from __future__ import annotations

import os
import shlex
import shutil
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path

REPLAY = (sys.executable, "-m", "replay")
FROM_BEST = {0: 0, 3: 1, 1: 2, 2: 3}
"""Places of exit codes: fine, undecided, failed, wrong usage; all others are worse."""


def main(given: Mapping[str, str]) -> int:
    """Replay and compare as the inputs say."""
    output = Path(given["REPLAY_OUTPUT"])
    output.mkdir(parents=True, exist_ok=True)
    rows, markdown = output / "rows.jsonl", output / "comparison.md"
    checked = replay(
        *("--dir", given["REPLAY_DATASET"], "--check"),
        *option("--kernels", given["REPLAY_KERNELS"]),
        *("--json", str(rows)),
        *shlex.split(given["REPLAY_ARGUMENTS"]),
    )
    baseline = given["REPLAY_BASELINE"]
    if checked == 2 or not baseline:
        return checked
    if not Path(baseline).exists():
        Path(baseline).parent.mkdir(parents=True, exist_ok=True)
        shutil.copyfile(rows, baseline)
        report("There was no baseline to compare with: this run is the first.\n", given)
        return checked
    compared = replay(
        *("compare", baseline, str(rows)),
        *option("--spread", given["REPLAY_SPREAD"]),
        *option("--fail-on", given["REPLAY_FAIL_ON"]),
        *("--markdown", str(markdown)),
    )
    if compared != 2:
        report(markdown.read_text("utf-8"), given)
        append(given.get("GITHUB_OUTPUT"), "compared=true\n")
    return max(checked, compared, key=lambda code: FROM_BEST.get(code, len(FROM_BEST)))


def replay(*arguments: str) -> int:
    """Run the command and return its exit code."""
    print(f"replay {shlex.join(arguments)}", flush=True)
    return subprocess.run([*REPLAY, *arguments], check=False).returncode


def option(name: str, value: str) -> tuple[str, ...]:
    """Return an option with its value; nothing if the value is empty."""
    return (f"{name}={value}",) if value else ()


def report(text: str, given: Mapping[str, str]) -> None:
    """Add to the summary that GitHub shows below the job."""
    append(given.get("GITHUB_STEP_SUMMARY"), text)


def append(path: str | None, text: str) -> None:
    """Add to a file that GitHub reads; there is none outside of GitHub."""
    if path:
        with open(path, "a", encoding="utf-8") as file:
            file.write(text)


if __name__ == "__main__":
    sys.exit(main(os.environ))
