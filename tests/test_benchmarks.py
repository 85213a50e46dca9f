"""Every benchmark can still be imported: they use names of ours that nothing else checks."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
FOLDER = ROOT / "benchmarks"
MODULES = sorted(
    ".".join(path.relative_to(FOLDER).with_suffix("").parts)
    for path in FOLDER.rglob("*.py")
    if not path.stem.startswith("_")
)


@pytest.mark.parametrize("modules", [MODULES], ids=["all"])
def test_importable(modules: list[str]) -> None:
    # Elsewhere: one of them replaces functions of the replay.
    imports = "\n".join(f"import benchmarks.{name}" for name in modules)
    ran = subprocess.run([sys.executable, "-c", imports], cwd=ROOT, capture_output=True, text=True)
    assert ran.returncode == 0, ran.stderr
