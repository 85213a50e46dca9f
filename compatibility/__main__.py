"""Tests every environment and writes the results to the end of docs/index.md."""

from __future__ import annotations

import datetime
import platform
import subprocess
import sys
import tempfile
from pathlib import Path

from compatibility import index
from compatibility.environments import (
    ENVIRONMENTS,
    REPOSITORY,
    CannotBuild,
    Environment,
    build,
    installed,
)
from compatibility.smoke import STEPS

PAGE = REPOSITORY / "docs" / "index.md"
MARK = "<!-- compatibility -->\n"
"""Line of the page after which the results follow."""
SHOWN = ("torch", "triton", "transformers", "diffusers")
WORKS = "works"
SECONDS = 600


def main() -> None:
    """Exit 1 if a step failed unexpectedly, or installing replaced a package."""
    with tempfile.TemporaryDirectory(prefix="compatibility ") as temporary:
        wheel = _wheel(Path(temporary))
        tables, notes, failed = [], [], False
        for number, environment in enumerate(ENVIRONMENTS):
            _say(f"{environment.name}, Python {environment.python}")
            directory = Path(temporary) / str(number)
            try:
                python, replaced = build(environment, directory, wheel)
            except CannotBuild as error:
                notes.append(f"- **{environment.name}** was not tested: {error}")
                _say(f"  not tested: {error}")
                continue
            found = {step: _try(step, python, Path(temporary) / f"{number} work") for step in STEPS}
            failed |= bool(replaced) or any(each.startswith("FAILED") for each in found.values())
            tables.append((environment, _python(python), installed(python), replaced, found))
    answers, index_failed = _ask_index()
    before = PAGE.read_text(encoding="utf-8").partition(MARK)[0]
    PAGE.write_text(before + MARK + _results(tables, notes, answers), encoding="utf-8")
    print(f"wrote {PAGE.relative_to(REPOSITORY)}")
    sys.exit(1 if failed or index_failed else 0)


def _wheel(directory: Path) -> Path:
    command = [
        sys.executable,
        "-m",
        "build",  # via an sdist: a build/ left in the tree would add stale modules
        "--outdir",
        str(directory),
        str(REPOSITORY),
    ]
    subprocess.run(command, check=True, capture_output=True)
    return next(directory.glob("*.whl"))


def _try(step: str, python: Path, directory: Path) -> str:
    """Run a step; return `works`, its one-sentence refusal, or FAILED with the last line."""
    directory.mkdir(exist_ok=True)
    here = Path(__file__).resolve().parent
    for name in ("smoke.py", "own_model.py"):
        (directory / name).write_text((here / name).read_text())
    try:
        done = subprocess.run(
            # Absolute but not resolved: resolving the symlink would leave the environment.
            [str(python.absolute()), "smoke.py", step],
            cwd=directory,
            capture_output=True,
            text=True,
            timeout=SECONDS,
            check=False,
        )
    except subprocess.TimeoutExpired:
        return f"FAILED: did not finish within {SECONDS} s"
    said = (done.stdout.strip() or done.stderr.strip()).splitlines()
    if done.returncode == 0:
        outcome = WORKS
    elif done.returncode == 2 and len(said) == 1:
        outcome = said[0]
    else:
        outcome = f"FAILED: {said[-1] if said else f'exit code {done.returncode}'}"
    _say(f"  {step.replace('_', ' ')}: {outcome}")
    return outcome


def _python(python: Path) -> str:
    command = [str(python), "-c", "import platform; print(platform.python_version())"]
    return subprocess.run(command, capture_output=True, text=True, check=True).stdout.strip()


def _ask_index() -> tuple[list[str], bool]:
    lines, failed = [], False
    try:
        for question in index.questions():
            if reason := index.ask(question):
                failed = True
                lines.append(f"- {question}: **cannot be installed.** {' '.join(reason.split())}")
    except index.NoIndex as error:
        return [f"Not checked: no package index could be reached ({error})."], False
    pythons = f"{index.PYTHONS[0]} to {index.PYTHONS[-1]}"
    if not lines:
        lines = [
            f"On Python {pythons}, Linux x86-64, the package index satisfies the requirements of "
            f"the core and of each extra ({', '.join(index.extras())}), and the exact versions in "
            "`constraints.txt`."
        ]
    return lines, failed


def _results(
    tables: list[tuple[Environment, str, dict[str, str], list[str], dict[str, str]]],
    notes: list[str],
    answers: list[str],
) -> str:
    heads = [environment.name for environment, *_ in tables]
    lines = [
        "",
        f"| | {' | '.join(heads)} |",
        f"|---|{'---|' * len(heads)}",
        _row("Python", [python for _, python, *_ in tables]),
    ]
    for package in SHOWN:
        lines.append(_row(package, [versions.get(package, "–") for _, _, versions, *_ in tables]))
    lines.append(
        _row(
            "packages replaced by installing",
            ["; ".join(gone) or "nothing" for *_, gone, _ in tables],
        )
    )
    sentences: list[str] = []
    for step in STEPS:
        cells = []
        for *_, found in tables:
            outcome = found[step]
            if outcome != WORKS:
                if outcome not in sentences:
                    sentences.append(outcome)
                outcome = f"no [{sentences.index(outcome) + 1}]"
            cells.append(outcome)
        lines.append(_row(step.replace("_", " "), cells))
    lines += ["", *(f"{number}. {text}" for number, text in enumerate(sentences, 1))]
    today = datetime.date.today().isoformat()
    system = f"{platform.system()} {platform.machine()}"
    lines += ["", *notes, "### The package index", "", *answers, "", f"{system}, {today}.", ""]
    return "\n".join(lines)


def _row(name: str, cells: list[str]) -> str:
    return f"| {name} | {' | '.join(cells)} |"


def _say(text: str) -> None:
    print(text, file=sys.stderr, flush=True)


if __name__ == "__main__":
    main()
