"""Requirements of an installation, checked with the package index (skipped without one)."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest
import uv

from compatibility.index import PYTHONS, REPOSITORY, NoIndex, ask, environment, extras, questions

CUDA_BUILDS = {"2.9.1": "3.5.1", "2.11.0": "3.6.0", "2.13.0": "3.7.1"}
"""Triton version that the index's torch requires, by torch's version."""


@pytest.mark.slow
@pytest.mark.parametrize("python", [PYTHONS[0], PYTHONS[-1]])
def test_the_index_can_satisfy_what_we_name(python: str) -> None:
    wrong = {}
    for question in questions():
        if question.python == python:
            try:
                if reason := ask(question):
                    wrong[str(question)] = reason
            except NoIndex as error:
                pytest.skip(f"no package index answers here: {error}")
    assert not wrong


def test_the_page_of_what_was_tried_names_every_extra() -> None:
    page = (REPOSITORY / "docs" / "index.md").read_text()
    assert f"the core and of each extra ({', '.join(extras())})" in page


def test_a_pin_that_the_index_cannot_satisfy_is_found(tmp_path: Path) -> None:
    """A CPU build of torch allows any Triton; the index's build requires one version."""
    (tmp_path / "pyproject.toml").write_text((REPOSITORY / "pyproject.toml").read_text())
    constraints = (REPOSITORY / "constraints.txt").read_text()
    assert "triton==3.7.1" in constraints
    (tmp_path / "constraints.txt").write_text(constraints.replace("triton==3.7.1", "triton==3.9.0"))
    question = next(each for each in questions() if each.pinned and each.extra == "all")
    try:
        reason = ask(question, tmp_path)
    except NoIndex as error:
        pytest.skip(f"no package index answers here: {error}")
    assert "torch==2.13.0 depends on triton" in " ".join(reason.split())


@pytest.mark.parametrize(
    "torch",
    [pytest.param(each, marks=[pytest.mark.slow] * (each != "2.13.0")) for each in CUDA_BUILDS],
)
def test_installing_beside_a_cuda_build_replaces_nothing(torch: str, tmp_path: Path) -> None:
    """The environment contains only package metadata, since a resolver reads nothing else."""
    triton = CUDA_BUILDS[torch]
    there = {"torch": torch, "triton": triton, "transformers": "5.3.0", "diffusers": "0.37.0"}
    uv_program = uv.find_uv_bin()
    venv = tmp_path / "venv"
    made = [uv_program, "venv", "--quiet", "--python", sys.executable, str(venv)]
    subprocess.run(made, check=True, env=environment())
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
    done = subprocess.run(
        [uv_program, "pip", "install", "--dry-run", "--python", str(venv), str(REPOSITORY)],
        capture_output=True,
        text=True,
        env=environment(),
        check=False,
    )
    if done.returncode:
        if any(sign in done.stderr for sign in ("error sending request", "dns error")):
            pytest.skip("no package index answers here")
        pytest.fail(done.stderr)
    planned = [line.split()[1] for line in done.stderr.splitlines() if line[:3] in (" + ", " - ")]
    assert any(each.startswith("attention-replay") for each in planned), done.stderr
    assert not [each for each in planned if each.partition("==")[0] in there], done.stderr
