"""Tests every environment and writes the results to the end of docs/index.md."""

from __future__ import annotations

import datetime
import platform
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

from compatibility.environments import ENVIRONMENTS, REPOSITORY, CannotBuild, build, installed
from compatibility.smoke import STEPS

PAGE = REPOSITORY / "docs" / "index.md"
MARK = "<!-- compatibility -->\n"
"""Line of the page after which the results follow."""
WORKS = "works"
SECONDS = 600
REPLACED = "packages replaced by installing"
ROWS = ("Python", "torch", "triton", "transformers", "diffusers", REPLACED, *STEPS)


def main() -> None:
    """Exit 1 if a step failed unexpectedly, or installing replaced a package."""
    results: dict[str, dict[str, str]] = {}
    notes = []
    with tempfile.TemporaryDirectory(prefix="compatibility ") as temporary:
        # Build via an sdist, because a build/ left in the tree would add stale modules.
        command = [sys.executable, "-m", "build", "--outdir", temporary, str(REPOSITORY)]
        subprocess.run(command, check=True, capture_output=True)
        wheel = next(Path(temporary).glob("*.whl"))
        for number, environment in enumerate(ENVIRONMENTS):
            print(f"{environment.name}, Python {environment.python}", file=sys.stderr, flush=True)
            try:
                python, replaced = build(environment, Path(temporary) / str(number), wheel)
            except CannotBuild as error:
                notes.append(f"- **{environment.name}** was not tested: {error}")
                continue
            results[environment.name] = {
                "Python": environment.python,
                **installed(python),
                REPLACED: replaced,
                **{step: _try(step, python, Path(temporary) / f"{number} work") for step in STEPS},
            }
    before = PAGE.read_text(encoding="utf-8").partition(MARK)[0]
    PAGE.write_text(before + MARK + _table(results, notes), encoding="utf-8")
    print(f"wrote {PAGE.relative_to(REPOSITORY)}")
    failed = any(cell.startswith("FAILED") for found in results.values() for cell in found.values())
    replaced_any = any(found[REPLACED] != "nothing" for found in results.values())
    sys.exit(1 if failed or replaced_any else 0)


def _try(step: str, python: Path, directory: Path) -> str:
    """Run a step; return `works`, the sentence of a refusal, or FAILED with the last line."""
    directory.mkdir(exist_ok=True)
    shutil.copy(Path(__file__).with_name("smoke.py"), directory)
    try:
        done = subprocess.run(
            # Absolute but not resolved, because resolving the symlink would leave the environment.
            [str(python.absolute()), "smoke.py", step],
            cwd=directory,
            capture_output=True,
            text=True,
            timeout=SECONDS,
            check=False,
        )
    except subprocess.TimeoutExpired:
        return f"FAILED: did not finish within {SECONDS} s"
    printed = (done.stdout.strip() or done.stderr.strip()).splitlines()
    outcome = f"FAILED: {printed[-1] if printed else f'exit code {done.returncode}'}"
    if done.returncode == 0:
        outcome = WORKS
    elif done.returncode == 2 and len(printed) == 1:
        outcome = printed[0]
    print(f"  {step}: {outcome}", file=sys.stderr, flush=True)
    return outcome


def _table(results: dict[str, dict[str, str]], notes: list[str]) -> str:
    """Format results, a column for each environment, with sentences as numbered notes below."""
    sentences: list[str] = []
    lines = ["", f"| | {' | '.join(results)} |", f"|---|{'---|' * len(results)}"]
    for row in ROWS:
        cells = [found.get(row, "–") for found in results.values()]
        if row in STEPS:
            sentences += dict.fromkeys(
                cell for cell in cells if cell != WORKS and cell not in sentences
            )
            cells = [
                cell if cell == WORKS else f"no [{sentences.index(cell) + 1}]" for cell in cells
            ]
        lines.append(f"| {row.replace('_', ' ')} | {' | '.join(cells)} |")
    lines += ["", *(f"{number}. {text}" for number, text in enumerate(sentences, 1)), "", *notes]
    system = f"{platform.system()} {platform.machine()}"
    return "\n".join([*lines, f"{system}, {datetime.date.today().isoformat()}.", ""])


if __name__ == "__main__":
    main()
