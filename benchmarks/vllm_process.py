"""Process in which a benchmark runs vLLM, and what the process returns to the benchmark."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

RESULT = "RESULT "
"""Beginning of the lines of a log that hold a result."""
ENVIRONMENT = {
    "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
    "VLLM_NO_USAGE_STATS": "1",
    "VLLM_USE_FLASHINFER_SAMPLER": "0",
    "VLLM_LOGGING_LEVEL": "WARNING",
    "HF_HUB_OFFLINE": "1",
}


def give(result: Any) -> None:
    """Write a result to the log, from inside the process."""
    print(f"\n{RESULT}{json.dumps(result)}", flush=True)


def model_of(engine: Any) -> Any:
    """Return the model of an engine in this process."""
    worker = engine.llm_engine.model_executor.driver_worker
    return getattr(worker, "worker", worker).model_runner.get_model()


class Child:
    """Process that runs a module of `benchmarks`, whose output goes to a log.

    Args:
        environment: variables besides `ENVIRONMENT`.
    """

    def __init__(self, log: Path, module: str, *arguments: str, **environment: str) -> None:
        self.log = log
        with log.open("w") as file:
            self.process = subprocess.Popen(
                [sys.executable, "-m", f"benchmarks.{module}", *arguments],
                env=os.environ | ENVIRONMENT | environment,
                stdout=file,
                stderr=subprocess.STDOUT,
                start_new_session=True,
            )

    def wait(self, seconds: float) -> None:
        """Wait for the end, and kill the process and its children after the time limit."""
        try:
            self.process.wait(seconds)
        except subprocess.TimeoutExpired:
            self.kill()

    def kill(self) -> None:
        with contextlib.suppress(ProcessLookupError):  # it has ended
            os.killpg(self.process.pid, signal.SIGKILL)
        self.process.wait()

    def lines(self) -> list[str]:
        return self.log.read_text(errors="replace").splitlines()

    def results(self) -> list[Any]:
        """Return the results that the process has given, in order."""
        given = [line for line in self.lines() if line.startswith(RESULT)]
        return [json.loads(line.removeprefix(RESULT)) for line in given]

    def failure(self) -> str:
        """Return the reason why the process has ended without a result."""
        if self.process.returncode == -signal.SIGKILL:
            return "killed, perhaps at its time limit"
        errors = [line for line in self.lines() if "Error" in line or "error:" in line]
        return (errors or self.lines() or ["no output"])[-1].strip()[:300]
