"""Tests wheels as a user would: each alone, in a clean environment, from another directory."""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
import venv
from pathlib import Path

from compatibility.environments import REPOSITORY

REPLAY = (
    ("capture", "--version"),
    ("capture", "--model", "llama", "--size", "tiny", "--max", "2", "--steps", "2"),
    ("replay", "--dir", "captured_inputs", "--kernels", "torch-*", "--rounds", "3"),
)
INTERPRETED = """
import torch, attention_kernels
tensors = [torch.randn(1, 2, 40, 32).half() for _ in range(3)]
expected = torch.nn.functional.scaled_dot_product_attention(*(each.float() for each in tensors))
output = attention_kernels.attention(*tensors)
torch.testing.assert_close(output.float(), expected, rtol=0, atol=3e-3)
"""
COMMANDS = {"attention_replay": REPLAY, "attention_kernels": (("python", "-c", INTERPRETED),)}
"""Commands to test each wheel with."""


def main() -> None:
    """Exit with the code of the first command that fails."""
    for path in map(Path, sys.argv[1:]):
        try_wheel(path.resolve(), COMMANDS[path.name.partition("-")[0]])


def try_wheel(wheel: Path, commands: tuple[tuple[str, ...], ...]) -> None:
    """Install a wheel in a clean environment and run commands there.

    Raises:
        SystemExit: a command failed.
    """
    with tempfile.TemporaryDirectory(prefix="clean environment ") as temporary:
        environment, elsewhere = Path(temporary) / "venv", Path(temporary) / "elsewhere"
        elsewhere.mkdir()
        venv.create(environment, with_pip=True)
        programs = environment / "bin"
        pip = [str(programs / "python"), "-m", "pip", "install", "--quiet"]
        pip += ["--disable-pip-version-check", "--constraint", str(REPOSITORY / "constraints.txt")]
        # Install torch first and on its own: only its exact version determines which wheel is
        # installed. Triton's interpreter needs NumPy.
        for what in ("torch", "numpy", str(wheel)):
            subprocess.run([*pip, what], check=True)
        for program, *arguments in commands:
            print("$", program, *arguments, flush=True)
            done = subprocess.run(
                [programs / program, *arguments],
                cwd=elsewhere,
                env={**os.environ, "TRITON_INTERPRET": "1"},
                check=False,
            )
            if done.returncode:
                sys.exit(done.returncode)
    print(f"{wheel.name} works in a clean environment")


if __name__ == "__main__":
    main()
