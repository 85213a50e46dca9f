"""Grading of the doctor's findings, and commands that fail."""

import subprocess
from pathlib import Path
from typing import Any

import pytest

from benchmarks import doctor_score
from benchmarks.doctor_score import Grade, diagnose, line
from tests.replay.doctor_faults.answers import Fault

FAULT = Fault("late-sink", "f", "r", layers=(1, 2), steps=(1,), head=3)


def finding(**fields: Any) -> dict[str, Any]:
    right = {"cause": "late-sink", "layer": "blocks.1.attn", "step": 1, "head": 3}
    return {**right, "kernel": "k", "sentence": "", **fields}


@pytest.mark.parametrize(
    ("findings", "grade"),
    [
        ([finding()], Grade(True, True, True, True)),
        ([finding(), finding(layer="blocks.2.attn")], Grade(True, True, True, True)),
        ([], Grade(False, False, False, False)),
        ([finding(), finding(cause="overflow")], Grade(False, True, True, True)),
        ([finding(), finding(layer="blocks.0.attn")], Grade(True, False, True, True)),
        ([finding(step=0)], Grade(True, True, False, True)),
        ([finding(head=None)], Grade(True, True, True, False)),
    ],
)
def test_every_finding_must_be_right(findings: list[dict[str, Any]], grade: Grade) -> None:
    assert Grade.of(FAULT, findings) == grade


def test_a_step_and_a_head_count_where_the_answer_has_one() -> None:
    plain = Fault("late-sink", "f", "r", layers=(1,))
    grades = [
        Grade.of(plain, [finding(step=0, head=7)]),
        Grade.of(FAULT, [finding(head=0)]),
        Grade.of(FAULT, [finding(cause="overflow")]),
    ]
    scored = line("late-sink", grades)
    assert [scored[name] for name in ("planted", "right", "cause.right")] == [3, 2, 2]
    assert [scored[name] for name in ("layer.right", "steps", "step.right")] == [3, 2, 2]
    assert [scored[name] for name in ("heads", "head.right")] == [2, 1]


@pytest.mark.parametrize(
    ("code", "written", "why"),
    [(2, None, "exit code 2: no --dir"), (0, None, "exit code 0"), (0, "[{}]", "with 1 findings")],
)
def test_failed_command_gives_no_answer(
    code: int, written: str | None, why: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def run(command: list[str], **_: object) -> subprocess.CompletedProcess[str]:
        if written is not None:
            Path(command[-1]).write_text(written)
        return subprocess.CompletedProcess(command, code, "", "no --dir")

    monkeypatch.setattr(doctor_score.subprocess, "run", run)
    with pytest.raises(RuntimeError, match=why):
        diagnose(tmp_path, ["k"], tmp_path / "out.json")
