"""The GitHub Action's script runs, and the files of the Action agree."""

import os
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import yaml

from tests.factories import random_call, save_calls

REPOSITORY = Path(__file__).resolve().parents[1]
ACTION = REPOSITORY / ".github" / "actions" / "replay"
SCRIPT = ACTION / "replay_and_compare.py"

KERNEL = """
from torch.nn.functional import scaled_dot_product_attention


def attention(query, key, value, **options):
    return scaled_dot_product_attention(query, key, value, **options){changed}
"""


def read(name: str) -> dict[str, Any]:
    found: dict[str, Any] = yaml.safe_load((ACTION / name).read_text())
    return found


def defaults() -> dict[str, str]:
    """Default inputs, in the form that the script receives."""
    return {
        f"REPLAY_{name.upper().replace('-', '_')}": str(declared.get("default", ""))
        for name, declared in read("action.yml")["inputs"].items()
    }


@pytest.fixture
def workspace(tmp_path: Path) -> Path:
    """Directory with two recorded calls and a kernel."""
    calls = (random_call(seed=at, with_output=True, origin={"call_index": at}) for at in range(2))
    save_calls(tmp_path / "captured_inputs", calls)
    (tmp_path / "mine.py").write_text(KERNEL.format(changed=""))
    return tmp_path


def run(workspace: Path, **inputs: str) -> subprocess.CompletedProcess[str]:
    given = {
        **defaults(),
        "REPLAY_DATASET": "captured_inputs",
        "REPLAY_KERNELS": "mine.py:attention",
        "REPLAY_BASELINE": "kept/baseline.jsonl",
        "REPLAY_FAIL_ON": "inaccurate,error",
        "REPLAY_ARGUMENTS": "--rounds 3 --device cpu --in-process",
        "GITHUB_STEP_SUMMARY": str(workspace / "summary.md"),
        "GITHUB_OUTPUT": str(workspace / "outputs"),
        "PYTHONPATH": str(REPOSITORY),
    }
    return subprocess.run(
        [sys.executable, SCRIPT],
        cwd=workspace,
        env={**os.environ, **given, **inputs},
        capture_output=True,
        text=True,
        timeout=240,
        check=False,
    )


@pytest.mark.slow
def test_the_first_run_is_the_baseline_of_the_next(workspace: Path) -> None:
    done = run(workspace)
    assert done.returncode == 0, done.stderr
    assert "this run is the first" in (workspace / "summary.md").read_text()
    assert not (workspace / "outputs").exists()
    results = workspace / "replay-results"
    assert (workspace / "kept" / "baseline.jsonl").read_text() == (
        results / "rows.jsonl"
    ).read_text()

    (workspace / "mine.py").write_text(KERNEL.format(changed=" * 1.1"))
    done = run(workspace)
    assert done.returncode == 1
    assert "failed: inaccurate: mine.py:attention on 2 of 2 calls" in done.stderr
    summary = (workspace / "summary.md").read_text()
    assert summary.endswith((results / "comparison.md").read_text())
    assert "less accurate" in summary
    assert (workspace / "outputs").read_text() == "compared=true\n"


def test_wrong_inputs_are_told_as_by_the_command(workspace: Path) -> None:
    done = run(workspace, REPLAY_DATASET="nowhere")
    assert (done.returncode, done.stderr.count("\n")) == (2, 1)
    assert "nowhere: no such directory" in done.stderr
    assert not (workspace / "kept").exists()


def test_every_input_reaches_the_script() -> None:
    action = read("action.yml")
    (step,) = (each for each in action["runs"]["steps"] if each.get("id") == "replay")
    read_by_script = set(re.findall(r'given\["(REPLAY_\w+)"\]', SCRIPT.read_text()))
    assert set(step["env"]) == read_by_script
    assert read_by_script <= set(defaults())
    for name, value in step["env"].items():
        assert value == f"${{{{ inputs.{name[7:].lower().replace('_', '-')} }}}}"


def test_no_text_from_outside_is_part_of_a_script() -> None:
    for step in read("action.yml")["runs"]["steps"]:
        assert "${{" not in step["run"]


def test_the_example_names_inputs_and_outputs_that_there_are() -> None:
    action, example = read("action.yml"), (ACTION / "example.yml").read_text()
    (job,) = yaml.safe_load(example)["jobs"].values()
    (step,) = (each for each in job["steps"] if each.get("id") == "replay")
    assert set(step["with"]) <= set(action["inputs"])
    assert set(re.findall(r"steps\.replay\.outputs\.(\w+)", example)) <= set(action["outputs"])
