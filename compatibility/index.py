"""Asks the package index whether the versions we name go together, for every Python we support.

A local build of torch may require less than the one on the index (a CPU build requires no triton),
so what installs here need not install elsewhere. The question is put for Linux on x86-64, where
most of our users are, whatever this machine is. uv reads the packages' metadata; no wheel is
downloaded.
"""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import uv

if sys.version_info >= (3, 11):
    import tomllib
else:
    import tomli as tomllib

REPOSITORY = Path(__file__).resolve().parent.parent
PYTHONS = ("3.10", "3.11", "3.12", "3.13")
PLATFORM = "x86_64-manylinux_2_28"
NO_ANSWER = ("error sending request", "Failed to fetch", "dns error", "timed out")
"""What uv says of an index that it cannot reach."""


class NoIndex(Exception):
    """No index answers here."""


@dataclass(frozen=True)
class Question:
    """Can this be installed on that Python?"""

    python: str
    extra: str
    """Empty for what `pip install attention-replay` brings."""
    pinned: bool
    """With the exact versions of constraints.txt, as `make` installs; else the newest there are."""

    def __str__(self) -> str:
        what = f"attention-replay[{self.extra}]" if self.extra else "attention-replay"
        return f"{what} on Python {self.python}{' with constraints.txt' if self.pinned else ''}"


def extras(project: Path = REPOSITORY) -> list[str]:
    declared = tomllib.loads((project / "pyproject.toml").read_text())["project"]
    return list(declared["optional-dependencies"])


def questions(project: Path = REPOSITORY) -> Iterator[Question]:
    """The core and each extra; with our exact versions where `make` installs it."""
    for python in PYTHONS:
        for extra in ("", *extras(project)):
            yield Question(python, extra, pinned=False)
        for extra in ("", "all", "dev"):
            yield Question(python, extra, pinned=True)


def ask(question: Question, project: Path = REPOSITORY) -> str:
    """Why it cannot be installed, in the resolver's words; empty where it can.

    Raises:
        NoIndex: nobody answered.
    """
    command = [
        *(uv.find_uv_bin(), "pip", "compile", str(project / "pyproject.toml"), "--quiet"),
        *("--python-version", question.python, "--python-platform", PLATFORM),
        # Whatever interpreter there is will do, should a source package have to say what it needs.
        *("--no-header", "--python", sys.executable),
    ]
    if question.extra:
        command += ["--extra", question.extra]
    if question.pinned:
        command += ["--constraint", str(project / "constraints.txt")]
    done = subprocess.run(
        command,
        capture_output=True,
        text=True,
        env=environment(),
        cwd=project,
        check=False,
    )
    if done.returncode == 0:
        return ""
    if any(sign in done.stderr for sign in NO_ANSWER):
        raise NoIndex(done.stderr.strip().splitlines()[-1].strip())
    return done.stderr.strip()


def environment() -> dict[str, str]:
    """Variables for uv: it fetches no interpreter, and needs no home that can be written."""
    cache = str(Path(tempfile.gettempdir()) / f"uv-cache-{os.getuid()}")
    return {"UV_CACHE_DIR": cache, **os.environ, "UV_PYTHON_DOWNLOADS": "never"}


def main() -> None:
    failed = 0
    try:
        for question in questions():
            reason = ask(question)
            failed += bool(reason)
            print(f"{question}: {reason or 'can be installed'}", flush=True)
    except NoIndex as error:
        print(f"no package index answers here, so nothing was asked: {error}")
        return
    sys.exit(1 if failed else 0)


if __name__ == "__main__":
    main()
