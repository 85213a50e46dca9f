"""The environments that are tried, and how one is built: old libraries first, then our package.

Ours is installed as a wheel into what is there already, as a user would, and must replace nothing.
"""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
from dataclasses import dataclass
from pathlib import Path

import uv

REPOSITORY = Path(__file__).resolve().parent.parent


@dataclass(frozen=True)
class Environment:
    """What is there before our package comes.

    Attributes:
        libraries: Requirements, as `pip install` takes them.
        resolution: `lowest-direct` installs the oldest versions that pyproject.toml admits.
        with_dependencies: Whether our package brings what it requires; else it comes alone.
    """

    name: str
    python: str
    libraries: tuple[str, ...] = ()
    resolution: str = "highest"
    with_dependencies: bool = True


ENVIRONMENTS = (
    Environment("the oldest that we admit", "3.10", resolution="lowest-direct"),
    Environment("the newest for Python 3.10", "3.10"),
    Environment(
        "torch and safetensors alone", "3.11", ("torch==2.8.0", "safetensors"),
        with_dependencies=False,
    ),
    Environment(
        "an inference server's",
        "3.12",
        (
            *("torch==2.11.0", "transformers==5.3.0", "diffusers==0.37.0", "accelerate==1.10.0"),
            "numpy==2.2.6",  # the interpreter of Triton 3.6 fails with the newest
        ),
    ),
    Environment("the one that `make` installs", "3.13", ("-c", "constraints.txt", ".[dev]")),
    Environment("the newest of everything", "3.12", (".",)),
)  # fmt: skip


class CannotBuild(Exception):
    """The environment cannot be had here; the message says why."""


def build(environment: Environment, directory: Path, wheel: Path) -> tuple[Path, list[str]]:
    """Make it in `directory`; its interpreter, and the packages that installing ours replaced.

    Raises:
        CannotBuild: there is no such interpreter here, or something cannot be installed.
    """
    # As `python -m venv` makes it: pip, and before Python 3.12 setuptools, are there.
    _uv("venv", "--seed", "--python", _interpreter(environment.python), str(directory))
    python = directory / "bin" / "python"
    libraries = list(environment.libraries)
    if environment.resolution != "highest":
        libraries = ["-r", "pyproject.toml", "--resolution", environment.resolution]
    if libraries:
        _uv("pip", "install", "--python", str(python), *libraries)
        _uv("pip", "uninstall", "--python", str(python), "attention-replay")
    before = installed(python)
    alone = [] if environment.with_dependencies else ["--no-deps"]
    _uv("pip", "install", "--python", str(python), *alone, str(wheel))
    after = installed(python)
    return python, [
        f"{name} {version} → {after.get(name, 'gone')}"
        for name, version in before.items()
        if after.get(name) != version
    ]


def installed(python: Path) -> dict[str, str]:
    """Version by package."""
    listed = json.loads(_uv("pip", "list", "--format", "json", "--python", str(python)))
    return {each["name"]: each["version"] for each in listed}


def _interpreter(version: str) -> str:
    """Of a version such as 3.12: on the path, pyenv's, or one that uv knows or fetches."""
    if found := shutil.which(f"python{version}"):
        probe = subprocess.run([found, "-c", ""], capture_output=True, check=False)
        if (
            probe.returncode == 0
        ):  # pyenv puts a program there also for versions that are not chosen
            return found
    root = Path(os.environ.get("PYENV_ROOT", Path.home() / ".pyenv"))
    pattern = re.compile(re.escape(version) + r"\.\d+")
    own = [each for each in root.glob("versions/*") if pattern.fullmatch(each.name)]
    return str(max(own) / "bin" / "python") if own else version


def _uv(*arguments: str) -> str:
    done = subprocess.run(
        [uv.find_uv_bin(), *arguments, "--quiet"],
        capture_output=True,
        text=True,
        cwd=REPOSITORY,
        check=False,
    )
    if done.returncode:
        raise CannotBuild(" ".join(done.stderr.split())[:400])
    return done.stdout
