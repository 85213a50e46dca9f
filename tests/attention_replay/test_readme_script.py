"""The README's script works, from recording a model to running the model with a plan."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

import attention_replay as ar

REPOSITORY = Path(__file__).resolve().parents[2]
SCRIPT = re.compile(r"^<!-- script -->\n```python\n(.*?)^```$", re.MULTILINE | re.DOTALL)


def script() -> str:
    found = SCRIPT.search((REPOSITORY / "README.md").read_text("utf-8"))
    assert found is not None, "README.md has no block after a line <!-- script -->"
    return found[1]


def test_script_is_short_and_uses_public_names_alone() -> None:
    text = script()
    assert len(text.splitlines()) <= 15
    used = set(re.findall(r"\bar\.(\w+)", text))
    assert {"record", "replay", "plan", "verify", "use_plan"} <= used <= {*ar.__all__}
    assert ".best()" in text


FEWER_ROUNDS = """
from replay.timing import defaults
defaults.ROUNDS = 3
from replay.end_to_end import model_check
model_check.MOST_ROUNDS = 1
"""


@pytest.mark.slow
def test_script_runs(tmp_path: Path) -> None:
    done = subprocess.run(
        [sys.executable, "-c", FEWER_ROUNDS + script()],
        capture_output=True,
        text=True,
        timeout=280,
        cwd=tmp_path,
        env={**os.environ, "PYTHONPATH": str(REPOSITORY), "CUDA_VISIBLE_DEVICES": ""},
    )
    assert done.returncode == 0, done.stderr
    best, checks, *swap = done.stdout.splitlines()
    assert "torch-" in best
    assert "torch-math" in checks
    assert any("call" in line for line in swap)
    assert (tmp_path / "plan.json").is_file()
