"""On a GPU, the scripts of `replay reproduce` show failures of libraries and of a lost GPU."""

import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

import replay.cli.main as cli
from replay.kernels.registry import find
from tests.factories import random_call, save_calls

OUT_OF_BOUNDS = f"{Path(__file__).parent / 'out_of_bounds.py'}:attention"
REPOSITORY = Path(__file__).parents[2]
STRICT = """
[exact]
rounding_factor = 1e-9
same_dtype_factor = 1e-9
[quantised]
maximum_relative_l1 = 1e-9
"""
"""Tolerances that every kernel fails, so that each kernel has a failure to reproduce."""


@pytest.fixture(autouse=True)
def _recorded(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    Path("strict.toml").write_text(STRICT)
    call = random_call(
        q_heads=4, q_len=512, kv_len=512, head_dim=64, dtype=torch.float16, with_output=True
    )
    save_calls(Path("recorded"), [call])


def reproduce(kernel: str, *others: str) -> str:
    """Return the script of a failing kernel."""
    call = ["--dir", "recorded", "--call", "model-000000", "--kernel", kernel, "--out", "bug"]
    with pytest.raises(SystemExit) as ended:
        cli.main(["reproduce", *call, "--max-seconds", "20", *others])
    assert ended.value.code == 0
    assert Path("bug/reproduce.py").is_file(), Path("bug/README.md").read_text()
    done = subprocess.run(
        [sys.executable, "-s", "bug/reproduce.py"],
        env=dict(os.environ, PYTHONPATH=_libraries()),
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 1, done.stdout + done.stderr
    assert "FAILS" in done.stdout
    return Path("bug/reproduce.py").read_text()


def _libraries() -> str:
    """Return PYTHONPATH without this project, for libraries that are not installed as packages."""
    paths = map(Path, os.environ.get("PYTHONPATH", "").split(os.pathsep))
    return os.pathsep.join(str(path) for path in paths if path.is_absolute() and path != REPOSITORY)


LIBRARIES = ["fa2", "fa3", "sage1", "sage2", "flashinfer-fa2", "xformers"]


@pytest.mark.parametrize("kernel", LIBRARIES)
def test_library_kernels_are_reproduced(kernel: str) -> None:
    found = find(kernel)
    if reason := found.unavailable(torch.device("cuda")):
        pytest.skip(reason)
    source = reproduce(kernel, "--tolerances", "strict.toml")
    assert f"safetensors, {found.library}" in source


@pytest.mark.parametrize("kernel", ["torch-flash", "triton-fa2", "triton-fa3", "triton-fp8", "fa4"])
def test_other_kernels_are_reproduced(kernel: str) -> None:
    if reason := find(kernel).unavailable(torch.device("cuda")):
        pytest.skip(reason)
    reproduce(kernel, "--tolerances", "strict.toml")


def test_illegal_memory_access_is_reproduced() -> None:
    reproduce(OUT_OF_BOUNDS)
