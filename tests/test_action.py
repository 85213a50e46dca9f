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
        "REPLAY_HISTORY": "kept/runs",
        "REPLAY_ARGUMENTS": "--rounds 3 --device cpu --in-process",
        "GITHUB_STEP_SUMMARY": str(workspace / "summary.md"),
        "GITHUB_ACTIONS": "true",
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
    assert (workspace / "outputs").read_text() == "compared=false\n"
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
    assert "🩺 mine.py:attention: " in summary
    assert '<failure message="inaccurate">' in (results / "comparison.xml").read_text()
    doctor = summary.partition("🩺 mine.py:attention: ")[2].partition(" on ")[0]
    annotation = "::error title=inaccurate%3A mine.py%3Aattention,file=mine.py::"
    assert f"{annotation}mine.py:attention on 2 of 2 calls: {doctor}" in done.stderr
    assert len([*(workspace / "kept" / "runs").iterdir()]) == 1
    assert "2 runs" in (results / "history.html").read_text()
    assert (workspace / "outputs").read_text().endswith("compared=true\n")


@pytest.mark.slow
def test_kernels_that_stay_wrong_or_undecided_pass_unless_asked(workspace: Path) -> None:
    right = KERNEL.format(changed="").replace("def attention", "def right")
    (workspace / "mine.py").write_text(KERNEL.format(changed=" * 1.1") + right)
    for undecided, code in (("fail", 0), ("fail", 3), ("pass", 0)):  # the first has no baseline
        done = run(
            workspace,
            REPLAY_KERNELS="mine.py:attention,mine.py:right",
            REPLAY_FAIL_ON="slow,inaccurate",
            REPLAY_HISTORY="",
            REPLAY_UNDECIDED=undecided,
        )
        assert done.returncode == code, done.stderr
        assert "::warning" in done.stdout + done.stderr
    assert "::warning title=slow is undecided%3A mine.py%3Aright,file=mine.py::" in done.stderr
    assert "🟡 undecided: " in (workspace / "summary.md").read_text()


@pytest.mark.parametrize(
    ("name", "value", "sentence"),
    [
        ("DATASET", "nowhere", "nowhere: no such directory"),
        ("FAIL_ON", "slwo", "--fail-on slwo: no such condition"),
        ("SPREAD", "2x", "--spread 2x: not a share"),
        ("UNDECIDED", "maybe", "undecided: expected pass or fail, got maybe"),
    ],
)
def test_wrong_inputs_are_told_before_the_replay(
    workspace: Path, name: str, value: str, sentence: str
) -> None:
    done = run(workspace, **{f"REPLAY_{name}": value})
    assert (done.returncode, done.stderr.count("\n")) == (2, 1)
    assert sentence in done.stderr
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
