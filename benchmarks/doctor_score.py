"""Scores `replay doctor` on planted faults and on kernels without one.

    python -m benchmarks.doctor_score                   writes benchmarks/results/doctor_score.csv
    python -m benchmarks.doctor_score --only late-sink,plain  only print; causes or functions

The faults, recordings and expected answers come from `tests/replay/doctor_faults/`, whose author
had not read the doctor. Each fault is one command on one kernel. A finding on a healthy layer, or
of another cause, counts as wrong. Everything runs on the CPU.
"""

from __future__ import annotations

import argparse
import fnmatch
import itertools
import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from benchmarks import results
from benchmarks.gpu import measured_on
from tests.replay.doctor_faults.answers import FAULTS, HEALTHY, HERE, SAID_OF_RACING, Fault
from tests.replay.doctor_faults.recordings import HEALTHY as HEALTHY_CALLS
from tests.replay.doctor_faults.recordings import RECORDINGS

MACHINE = ("machine.device", "machine.python", "machine.torch")
COLUMNS = (
    "cause",
    "planted",
    "right",
    "cause.right",
    "layer.right",
    "steps",
    "step.right",
    "heads",
    "head.right",
    "calls",
    "findings",
    *MACHINE,
)
NO_FAULT = "healthy"

Finding = dict[str, Any]
"""One entry of `replay doctor --json`."""


@dataclass(frozen=True)
class Grade:
    """Correctness of the findings on one fault; None for a step or head that the fault lacks."""

    cause: bool
    layer: bool
    step: bool | None = None
    head: bool | None = None

    @property
    def right(self) -> bool:
        return self.cause and self.layer

    @classmethod
    def of(cls, fault: Fault, findings: Sequence[Finding]) -> Grade:
        """Grade each part as right if there is a finding and all findings are right."""

        def all_in(key: str, allowed: Iterable[Any]) -> bool:
            return bool(findings) and {each[key] for each in findings} <= set(allowed)

        said = fault.cause != "racing" or all(
            SAID_OF_RACING.search(each["sentence"]) for each in findings
        )
        return cls(
            all_in("cause", fault.causes) and said,
            all_in("layer", fault.modules),
            None if fault.steps is None else all_in("step", fault.steps),
            None if fault.head is None else all_in("head", (fault.head,)),
        )


def diagnose(directory: Path, kernels: Sequence[str], out: Path) -> list[Finding]:
    """Run the command and return its findings.

    Raises:
        RuntimeError: the command failed, or its exit code contradicts its findings.
    """
    command = [sys.executable, "-m", "replay", "doctor", "--dir", str(directory)]
    command += ["--kernels", ",".join(kernels), "--json", str(out)]
    environment = {**os.environ, "CUDA_VISIBLE_DEVICES": "", "OMP_NUM_THREADS": "1"}
    ran = subprocess.run(command, capture_output=True, text=True, env=environment)
    if ran.returncode not in (0, 1) or not out.exists():
        raise RuntimeError(f"exit code {ran.returncode}: {ran.stderr.strip()[-500:]}")
    findings: list[Finding] = json.loads(out.read_text())
    if ran.returncode != bool(findings):
        raise RuntimeError(f"exit code {ran.returncode} with {len(findings)} findings")
    return findings


def graded(fault: Fault, scratch: Path) -> Grade:
    """Give one fault to the doctor; print the findings if they are wrong."""
    out = scratch / f"{fault.cause}-{fault.function}.json"
    try:
        findings, said = diagnose(scratch / fault.recording, [fault.kernel], out), ""
    except RuntimeError as error:
        findings, said = [], str(error)
    grade = Grade.of(fault, findings)
    if False in (grade.cause, grade.layer, grade.step, grade.head):
        lines = [said or "no finding"] if not findings else [each["sentence"] for each in findings]
        kind = "imprecise" if grade.right else "wrong"
        print(f"{kind}: {fault.cause}, {fault.function}", *lines, sep="\n  ", flush=True)
    return grade


def line(cause: str, grades: Sequence[Grade]) -> dict[str, Any]:
    """Return the score of one cause."""
    steps = [each.step for each in grades if each.step is not None]
    heads = [each.head for each in grades if each.head is not None]
    return {
        "cause": cause,
        "planted": len(grades),
        "right": sum(each.right for each in grades),
        "cause.right": sum(each.cause for each in grades),
        "layer.right": sum(each.layer for each in grades),
        "steps": len(steps),
        "step.right": sum(steps),
        "heads": len(heads),
        "head.right": sum(heads),
    }


def healthy(scratch: Path) -> dict[str, Any]:
    """Return the findings on kernels without a fault; there should be none."""
    HEALTHY_CALLS.write(scratch / NO_FAULT)
    kernels = [f"{HERE / 'healthy.py'}:{function}" for function in HEALTHY]
    findings = diagnose(scratch / NO_FAULT, kernels, scratch / f"{NO_FAULT}.json")
    for each in findings:
        print(f"false alarm: {each['kernel']}, {each['cause']}: {each['sentence']}", flush=True)
    calls = HEALTHY_CALLS.steps * len(HEALTHY_CALLS.layers) * len(kernels)
    return {"cause": NO_FAULT, "calls": calls, "findings": len(findings)}


def score(faults: Sequence[Fault], with_healthy: bool, jobs: int) -> list[dict[str, Any]]:
    """Return a line per cause, and one for the healthy kernels."""
    with tempfile.TemporaryDirectory() as folder, ThreadPoolExecutor(jobs) as pool:
        scratch = Path(folder)
        for name in {fault.recording for fault in faults}:
            RECORDINGS[name].write(scratch / name)
        alarms = pool.submit(healthy, scratch) if with_healthy else None
        found = pool.map(graded, faults, itertools.repeat(scratch))
        grades = dict(zip(faults, found, strict=True))
        causes = dict.fromkeys(fault.cause for fault in faults)
        lines = [
            line(cause, [grade for fault, grade in grades.items() if fault.cause == cause])
            for cause in causes
        ]
        return [*lines, alarms.result()] if alarms else lines


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0] if __doc__ else None)
    parser.add_argument("--only", metavar="A,'GLOB*'", help=f"causes or functions, or {NO_FAULT}")
    parser.add_argument("--jobs", type=int, default=2, help="parallel commands (default 2)")
    parser.add_argument("--out", type=Path, default=results.DIRECTORY / "doctor_score.csv")
    arguments = parser.parse_args()
    wanted = (arguments.only or "*").split(",")
    faults = [
        each
        for each in FAULTS
        if any(fnmatch.filter((each.cause, each.function), glob) for glob in wanted)
    ]
    with_healthy = any(fnmatch.fnmatch(NO_FAULT, glob) for glob in wanted)
    if not faults and not with_healthy:
        parser.error(
            f"no fault is called {arguments.only!r}; see tests/replay/doctor_faults/answers.py"
        )
    lines = score(faults, with_healthy, arguments.jobs)
    for each in lines:
        print(", ".join(f"{name} {value}" for name, value in each.items()))
    if arguments.only is None:
        machine = measured_on(torch.device("cpu"), MACHINE)
        results.write_lines([each | machine for each in lines], COLUMNS, arguments.out)


if __name__ == "__main__":
    main()
