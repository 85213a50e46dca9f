"""The script of the action: replay a dataset, compare with the earlier run, write the summary.

Reads the action's inputs from `REPLAY_…`, and runs the command `replay`. Exits as the worse of its
runs, but with 0 if the first run is wrong, or if an undecided run is to pass.
"""

from __future__ import annotations

import os
import shlex
import shutil
import subprocess
import sys
from collections.abc import Mapping
from datetime import datetime, timezone
from pathlib import Path

from replay.comparison.conditions import read_conditions, read_share
from replay.comparison.row_matching import ComparisonError

REPLAY = (sys.executable, "-m", "replay")
FROM_BEST = {0: 0, 3: 1, 1: 2, 2: 3}
"""Places of exit codes: fine, undecided, failed, wrong usage; all others are worse."""


def main(given: Mapping[str, str]) -> int:
    """Replay, compare and draw the history as the inputs say."""
    if wrong := wrong_input(given):
        print(f"replay: {wrong}", file=sys.stderr)
        return 2
    output = Path(given["REPLAY_OUTPUT"])
    output.mkdir(parents=True, exist_ok=True)
    rows, markdown = output / "rows.jsonl", output / "comparison.md"
    dataset, baseline = given["REPLAY_DATASET"], given["REPLAY_BASELINE"]
    is_compared = bool(baseline) and Path(baseline).exists()
    replayed = replay(
        *("--dir", dataset),
        *(() if is_compared else ("--check",)),  # a comparison fails only on what changed
        *option("--kernels", given["REPLAY_KERNELS"]),
        *("--json", str(rows)),
        *shlex.split(given["REPLAY_ARGUMENTS"]),
    )
    if replayed == 2 or not rows.exists():
        return replayed
    is_first = bool(baseline) and not is_compared
    drawn = 0
    if given["REPLAY_HISTORY"]:
        drawn = draw(rows, Path(given["REPLAY_HISTORY"]), output / "history.html", keep=is_first)
    append(given.get("GITHUB_OUTPUT"), f"compared={str(is_compared).lower()}\n")
    if is_first:
        copy(rows, Path(baseline))
        report("There was no earlier run to compare with: this run is the first.\n", given)
    if not is_compared:
        code = 0 if is_first else passed(replayed, given)
        if replayed and not code:
            print("::warning::A kernel is wrong, or noise hides its speed; the log names it.")
        return worse(drawn, code)
    compared = replay(
        *("compare", baseline, str(rows)),
        *option("--spread", given["REPLAY_SPREAD"]),
        *option("--fail-on", given["REPLAY_FAIL_ON"]),
        *(("--junit", str(output / "comparison.xml")) if given["REPLAY_FAIL_ON"] else ()),
        *(("--doctor", dataset) if given["REPLAY_DOCTOR"] == "true" else ()),
        *("--markdown", str(markdown)),
    )
    if compared != 2:
        report(markdown.read_text("utf-8"), given)
    return worse(worse(replayed, drawn), passed(compared, given))


def wrong_input(given: Mapping[str, str]) -> str:
    """Return why an input could not be used after the replay; empty if all can."""
    undecided, spread = given["REPLAY_UNDECIDED"], given["REPLAY_SPREAD"]
    if undecided not in ("pass", "fail"):
        return f"undecided: expected pass or fail, got {undecided}"
    try:
        read_conditions(given["REPLAY_FAIL_ON"] or None)
        if spread and not Path(spread).exists():
            read_share(spread, "--spread ")
    except ComparisonError as error:
        return str(error)
    return ""


def passed(code: int, given: Mapping[str, str]) -> int:
    """Return the exit code, 0 if it means undecided and such a run passes."""
    return 0 if code == 3 and given["REPLAY_UNDECIDED"] == "pass" else code


def draw(rows: Path, kept: Path, page: Path, *, keep: bool) -> int:
    """Draw the history of the kept runs and this one, and keep this one if asked."""
    earlier = sorted(map(str, kept.glob("*.jsonl")))
    if keep:
        copy(rows, kept / f"{datetime.now(timezone.utc):%Y-%m-%dT%H%M%SZ}.jsonl")
    return replay("history", *earlier, str(rows), "--out", str(page))


def worse(one: int, other: int) -> int:
    """Return the worse of two exit codes."""
    return max(one, other, key=lambda code: FROM_BEST.get(code, len(FROM_BEST)))


def copy(file: Path, place: Path) -> None:
    """Copy a file, and make its directory."""
    place.parent.mkdir(parents=True, exist_ok=True)
    shutil.copyfile(file, place)


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
