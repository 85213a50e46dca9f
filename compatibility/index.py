"""Checks that the package index satisfies our requirements, on every supported Python.

A local build of torch may require less than the one on the index (a CPU build does not require
triton), so what installs here need not install elsewhere. The check resolves for Linux on x86-64,
which most of our users have, whatever this machine is. uv reads only package metadata and downloads
no wheels.
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
"""Messages of uv when it cannot reach the index."""


class NoIndex(Exception):
    """No package index can be reached."""


@dataclass(frozen=True)
class Question:
    """Return whether our package can be installed on a version of Python."""

    python: str
    extra: str
    """Name of the extra; empty for a plain `pip install attention-replay`."""
    pinned: bool
    """True for the exact versions in constraints.txt, as installed by `make`; False for the
    newest."""

    def __str__(self) -> str:
        what = f"attention-replay[{self.extra}]" if self.extra else "attention-replay"
        return f"{what} on Python {self.python}{' with constraints.txt' if self.pinned else ''}"


def extras(project: Path = REPOSITORY) -> list[str]:
    declared = tomllib.loads((project / "pyproject.toml").read_text())["project"]
    return list(declared["optional-dependencies"])


def questions(project: Path = REPOSITORY) -> Iterator[Question]:
    """Yield the core and each extra, and with exact versions what `make` installs."""
    for python in PYTHONS:
        for extra in ("", *extras(project)):
            yield Question(python, extra, pinned=False)
        for extra in ("", "all", "dev"):
            yield Question(python, extra, pinned=True)


def ask(question: Question, project: Path = REPOSITORY) -> str:
    """Return the resolver's reason why it cannot be installed, or an empty string.

    Raises:
        NoIndex: no package index can be reached.
    """
    command = [
        *(uv.find_uv_bin(), "pip", "compile", str(project / "pyproject.toml"), "--quiet"),
        *("--python-version", question.python, "--python-platform", PLATFORM),
        # Only used if a source package must be built to read its metadata: any interpreter works.
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
    """Environment for uv: no interpreter downloads, and no need for a writable home."""
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
        print(f"not checked: no package index can be reached: {error}")
        return
    sys.exit(1 if failed else 0)


if __name__ == "__main__":
    main()
