"""`benchmarks.versions` runs two checkouts in turn on a CPU, and keeps their results apart."""

import shutil
from pathlib import Path

import pytest

from benchmarks import versions

REPOSITORY = Path(__file__).parents[1]
ARGUMENTS = ["--device", "cpu", "--only", "small", "--rounds", "2", "--seconds", "0.001"]


@pytest.fixture(scope="module")
def other(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Checkout of the project in which `torch-math` gives wrong outputs."""
    checkout = tmp_path_factory.mktemp("other")
    for name in ("attention_kernels", "attention_replay", "capture", "replay"):
        shutil.copytree(
            REPOSITORY / name, checkout / name, ignore=shutil.ignore_patterns("__pycache__")
        )
    registry = checkout / "replay" / "kernels" / "registry.py"
    registry.write_text(
        registry.read_text(encoding="utf-8")
        + """

_found = find


def find(name: str) -> Kernel:
    kernel = _found(name)
    if name != "torch-math":
        return kernel
    return replace(kernel, attention=lambda **call: 2 * kernel.attention(**call))
""",
        encoding="utf-8",
    )
    return checkout


def test_each_checkout_runs_own_kernels(other: Path, capsys: pytest.CaptureFixture[str]) -> None:
    versions.main([str(other), "--kernels", "torch-math,no-such-kernel", *ARGUMENTS])
    right, unknown = capsys.readouterr().out.splitlines()
    assert right.startswith("torch-math, small: ")
    assert "times as fast" in right
    here, there = right.partition(", error ")[2].split(" ")
    assert float(here.rstrip("%")) < 1
    assert 99 < float(there.strip("(%)")) < 101
    assert unknown.startswith("no-such-kernel, small: here: ")
