"""The tested environments, and how to build one: the libraries first, then our package.

Our wheel is installed into an existing environment, as a user would, and must replace nothing.
"""

from __future__ import annotations

import json
import subprocess
from dataclasses import dataclass
from pathlib import Path

import uv

REPOSITORY = Path(__file__).resolve().parent.parent


@dataclass(frozen=True)
class Environment:
    """Libraries that are installed before our package.

    Attributes:
        libraries: Requirements, as `pip install` takes them.
        resolution: `lowest-direct` installs the oldest versions that pyproject.toml allows.
        with_dependencies: True to install our dependencies as well as our package.
    """

    name: str
    python: str
    libraries: tuple[str, ...] = ()
    resolution: str = "highest"
    with_dependencies: bool = True


ENVIRONMENTS = (
    Environment("oldest supported", "3.10", resolution="lowest-direct"),
    Environment("newest for Python 3.10", "3.10"),
    Environment(
        "torch and safetensors only", "3.11", ("torch==2.8.0", "safetensors"),
        with_dependencies=False,
    ),
    Environment(
        "an inference server",
        "3.12",
        (
            *("torch==2.11.0", "transformers==5.3.0", "diffusers==0.37.0", "accelerate==1.10.0"),
            "numpy==2.2.6",  # Triton 3.6's interpreter fails with newer versions
        ),
    ),
    Environment("what `make` installs", "3.13", ("-c", "constraints.txt", ".[dev]")),
    Environment("newest of everything", "3.12", (".",)),
)  # fmt: skip


class CannotBuild(Exception):
    """The environment cannot be built here; the message states the reason."""


def build(environment: Environment, directory: Path, wheel: Path) -> tuple[Path, str]:
    """Build an environment in `directory`; return its interpreter and the packages we replaced.

    Raises:
        CannotBuild: the interpreter is not available, or a package cannot be installed.
    """
    # Like `python -m venv`, this installs pip and, before Python 3.12, setuptools.
    _uv("venv", "--seed", "--python", environment.python, str(directory))
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
    replaced = [
        f"{name} {version} → {after.get(name, 'gone')}"
        for name, version in before.items()
        if after.get(name) != version
    ]
    return python, "; ".join(replaced) or "nothing"


def installed(python: Path) -> dict[str, str]:
    """Return the installed version of each package."""
    listed = json.loads(_uv("pip", "list", "--format", "json", "--python", str(python)))
    return {each["name"]: each["version"] for each in listed}


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
