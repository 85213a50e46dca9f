"""Requirements of an installation, checked with the package index (skipped without one).

The checks resolve for Linux on x86-64 on every machine. uv reads only metadata of packages and
downloads no wheels.
"""

import os
import re
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path

import pytest
import uv

if sys.version_info >= (3, 11):
    import tomllib
else:
    import tomli as tomllib

REPOSITORY = Path(__file__).resolve().parents[2]
PYTHONS = ("3.10", "3.13")
NO_ANSWER = ("error sending request", "Failed to fetch", "dns error", "timed out")
"""Messages of uv when it cannot reach the index."""
CUDA_BUILDS = {"2.9.1": "3.5.1", "2.11.0": "3.6.0", "2.13.0": "3.7.1"}
"""Triton version that the index's torch requires, by torch's version."""


def ask(*arguments: str) -> subprocess.CompletedProcess[str]:
    """Run uv without interpreter downloads or a writable home; skip if no index answers."""
    cache = str(Path(tempfile.gettempdir()) / f"uv-cache-{os.getuid()}")
    done = subprocess.run(
        [uv.find_uv_bin(), *arguments],
        capture_output=True,
        text=True,
        env={"UV_CACHE_DIR": cache, **os.environ, "UV_PYTHON_DOWNLOADS": "never"},
        check=False,
    )
    if done.returncode and any(sign in done.stderr for sign in NO_ANSWER):
        pytest.skip(f"no package index answers here: {done.stderr}")
    return done


def compiled(
    python: str, extra: str, constraints: Sequence[str | Path] = ()
) -> subprocess.CompletedProcess[str]:
    """Resolve our requirements; a local build of torch may satisfy some that the index cannot."""
    options = ["--extra", extra] if extra else []
    for file in constraints:
        options += ["--constraint", str(file)]
    return ask(
        *("pip", "compile", str(REPOSITORY / "pyproject.toml"), "--quiet", *options),
        *("--python-version", python, "--python-platform", "x86_64-manylinux_2_28"),
        # Only used to build a source package for its metadata, so any interpreter works.
        *("--no-header", "--python", sys.executable),
    )


@pytest.mark.slow
@pytest.mark.parametrize("python", PYTHONS)
def test_index_satisfies_the_core_each_extra_and_the_constraints(python: str) -> None:
    """Packages that satisfy `all` or `dev` also satisfy the core and the extras that these name."""
    project = tomllib.loads((REPOSITORY / "pyproject.toml").read_text())["project"]
    extras, found = project["optional-dependencies"], ["all", "dev"]
    for extra in found:
        named = re.findall(r"^attention-replay\[(.*)\]$", "\n".join(extras[extra]), re.MULTILINE)
        found += ",".join(named).split(",") if named else []
    questions = [(extra, []) for extra in extras if extra not in found]
    questions += [(extra, [REPOSITORY / "constraints.txt"]) for extra in ("all", "dev")]
    for extra, constraints in questions:
        done = compiled(python, extra, constraints)
        assert done.returncode == 0, (extra, constraints, done.stderr)


def test_a_pin_that_the_index_cannot_satisfy_is_found(tmp_path: Path) -> None:
    """A CPU build of torch allows any Triton; the index's build requires one version."""
    constraints = (REPOSITORY / "constraints.txt").read_text()
    assert "triton==3.7.1" in constraints
    (tmp_path / "wrong.txt").write_text(constraints.replace("triton==3.7.1", "triton==3.9.0"))
    done = compiled(PYTHONS[0], "all", [tmp_path / "wrong.txt"])
    assert "torch==2.13.0 depends on triton" in " ".join(done.stderr.split())


@pytest.mark.parametrize(
    "torch",
    [pytest.param(each, marks=[pytest.mark.slow] * (each != "2.13.0")) for each in CUDA_BUILDS],
)
def test_installing_beside_a_cuda_build_replaces_nothing(torch: str, tmp_path: Path) -> None:
    """The environment contains only package metadata, because a resolver reads nothing else."""
    triton = CUDA_BUILDS[torch]
    there = {"torch": torch, "triton": triton, "transformers": "5.3.0", "diffusers": "0.37.0"}
    venv = tmp_path / "venv"
    assert ask("venv", "--quiet", "--python", sys.executable, str(venv)).returncode == 0
    site = next((venv / "lib").glob("python*/site-packages"))
    for name, version in there.items():
        record = site / f"{name}-{version}.dist-info"
        record.mkdir()
        needs = f"Requires-Dist: triton=={triton}\n" if name == "torch" else ""
        (record / "METADATA").write_text(
            f"Metadata-Version: 2.1\nName: {name}\nVersion: {version}\n{needs}"
        )
        (record / "RECORD").write_text("")
        (record / "INSTALLER").write_text("pip")
    done = ask("pip", "install", "--dry-run", "--python", str(venv), str(REPOSITORY))
    planned = [line.split()[1] for line in done.stderr.splitlines() if line[:3] in (" + ", " - ")]
    assert any(each.startswith("attention-replay") for each in planned), done.stderr
    assert not [each for each in planned if each.partition("==")[0] in there], done.stderr
