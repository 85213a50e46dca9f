"""Tests a wheel as a user would: in a clean environment, from another directory."""

from __future__ import annotations

import subprocess
import sys
import tempfile
import venv
from pathlib import Path

from compatibility.environments import REPOSITORY

COMMANDS = (
    ("capture", "--version"),
    ("capture", "--model", "llama", "--size", "tiny", "--max", "2", "--steps", "2"),
    ("replay", "--dir", "captured_inputs", "--kernels", "torch-*", "--rounds", "3"),
)


def main() -> None:
    """Exit with the code of the first command that fails."""
    wheel = Path(sys.argv[1]).resolve()
    with tempfile.TemporaryDirectory(prefix="clean environment ") as temporary:
        environment, elsewhere = Path(temporary) / "venv", Path(temporary) / "elsewhere"
        elsewhere.mkdir()
        venv.create(environment, with_pip=True)
        programs = environment / "bin"
        pip = [str(programs / "python"), "-m", "pip", "install", "--quiet"]
        pip += ["--disable-pip-version-check", "--constraint", str(REPOSITORY / "constraints.txt")]
        # torch first and on its own: only its exact version determines which wheel is installed.
        for what in ("torch", str(wheel)):
            subprocess.run([*pip, what], check=True)
        for program, *arguments in COMMANDS:
            print("$", program, *arguments, flush=True)
            done = subprocess.run([programs / program, *arguments], cwd=elsewhere, check=False)
            if done.returncode:
                sys.exit(done.returncode)
    print(f"{wheel.name} works in a clean environment")


if __name__ == "__main__":
    main()
