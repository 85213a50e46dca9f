"""Records inside a vLLM engine of its own process, through the plugin, and measures what it costs.

    python -m benchmarks.engines_vllm_server              # all scenarios, one after another
    python -m benchmarks.engines_vllm_server --scenarios killed,cost --seconds 200

Needs a GPU and vLLM, no network. The plugin is found as an installed one is: by an entry point, in
a folder on PYTHONPATH. The scenarios:

- served: tokens with the plugin on and off, calls that it stored, and their errors;
- killed: the engine is killed while it records, and the recording is repaired;
- removed: the recording's directory is removed meanwhile, and the engine serves on;
- cost: throughput in ten ABAB blocks, with and without a recording that has ended, and while one
  runs, with 95 % intervals of the ratio.
"""

from __future__ import annotations

import argparse
import math
import os
import shutil
import statistics
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from benchmarks.engines_vllm import PROMPTS, Case, generation, judged, save_checkpoint, started
from benchmarks.gpu import gpu
from benchmarks.vllm_process import Child, give

CASE = Case("llama", "FLASH_ATTN", "piecewise")
BLOCKS = 10
RECORD_MANY = "--max 1000000 --sample every:13"


def started_engine(directory: Path) -> Callable[[], list[list[int]]]:
    """Start an engine; return a function that returns its tokens for prompts of many lengths."""
    return generation(started(CASE, directory), [48] * len(PROMPTS))


def generate_often(directory: Path, times: int) -> None:
    """Print the tokens of several runs, each on a line."""
    generate = started_engine(directory)
    for _ in range(times):
        give(generate())


def measure_cost(directory: Path) -> None:
    """Print throughput ratios of an engine in this process."""
    import torch
    from vllm.v1.worker.worker_base import WorkerWrapperBase

    from capture.engines.vllm_plugin import WorkerRecording, follow_steps, read_options

    generate = started_engine(directory)
    original = WorkerWrapperBase.execute_model

    def seconds() -> float:
        torch.cuda.synchronize()
        began = time.perf_counter()
        generate()
        torch.cuda.synchronize()
        return time.perf_counter() - began

    def follow(options: str) -> WorkerRecording:
        out = Path(tempfile.mkdtemp(dir=directory)) / "calls"
        recording = follow_steps(WorkerWrapperBase, read_options(str(out), options))
        generate()
        return recording

    def after_a_recording() -> float:
        follow("--max 4 --sample first")
        while WorkerWrapperBase.execute_model is not original:
            generate()
        return seconds()

    def during_a_recording() -> float:
        recording = follow("--max 1000000 --sample every:97")
        found = seconds()
        recording.end()
        WorkerWrapperBase.execute_model = original
        return found

    generate()
    found = {}
    for name, other in (("ended", after_a_recording), ("running", during_a_recording)):
        pairs = [(seconds(), other()) for _ in range(BLOCKS)]
        found[name] = interval([math.log(without / recorded) for without, recorded in pairs])
    give(found)


def interval(logs: list[float]) -> list[float]:
    """Return the mean ratio of throughputs and its 95 % interval, from paired logarithms."""
    mean = statistics.mean(logs)
    half = 2.262 * statistics.stdev(logs) / math.sqrt(len(logs))  # Student's t of ten pairs
    return [round(math.exp(value), 4) for value in (mean, mean - half, mean + half)]


def start(directory: Path, name: str, work: str, record: str = "") -> Child:
    """Start a process with an engine, and the plugin on its path.

    Args:
        record: options of a recording; empty to record nothing.
    """
    plugin = directory / "plugin"
    information = plugin / "attention_replay_plugin-0.dist-info"
    information.mkdir(parents=True, exist_ok=True)
    (information / "METADATA").write_text(
        "Metadata-Version: 2.1\nName: attention-replay-plugin\nVersion: 0\n"
    )
    (information / "entry_points.txt").write_text(
        "[vllm.general_plugins]\nattention_replay = capture.engines.vllm_plugin:register\n"
    )
    environment = {
        "VLLM_ENABLE_V1_MULTIPROCESSING": "0" if work == "cost" else "1",
        "PYTHONPATH": f"{plugin}{os.pathsep}{os.environ.get('PYTHONPATH', '.')}",
    }
    if record:
        environment["ATTENTION_REPLAY_RECORD"] = str(directory / name)
        environment["ATTENTION_REPLAY_OPTIONS"] = record
    arguments = ("--work", work, "--directory", str(directory))
    return Child(directory / f"{name}.log", "engines_vllm_server", *arguments, **environment)


def warnings(child: Child) -> list[str]:
    return [line.strip()[:200] for line in child.lines() if "RecordingWarning" in line]


def compared(plain: list[Any], recorded: list[Any]) -> str:
    """Compare the tokens of prompts whose tokens are the same in all runs without the plugin.

    Requests reach the engine one after another, so that runs differ in their batches and rounding.
    """
    stable = [
        number
        for number, runs in enumerate(zip(*plain, strict=True))
        if len({*map(str, runs)}) == 1
    ]
    same = all(run[number] == plain[0][number] for run in recorded for number in stable)
    of_all = f"({len(stable)} of {len(plain[0])} prompts have the same tokens without the plugin)"
    return f"tokens {'same' if same and stable and recorded else 'DIFFER'} {of_all}"


def stored(directory: Path) -> int:
    return len([*directory.glob("*.safetensors")]) if directory.is_dir() else 0


def wait_for_calls(child: Child, out: Path, end: float) -> None:
    """Wait until a recording has 40 calls, its process has ended, or the time is over."""
    while stored(out) < 40 and child.process.poll() is None and time.monotonic() < end:
        time.sleep(0.05)


def served(directory: Path, seconds: float) -> str:
    plain = start(directory, "plain", "20")
    plain.wait(seconds)
    recorded = start(directory, "served", "5", "--max 48 --sample every:13")
    recorded.wait(seconds)
    found = judged(directory / "served")
    return (
        f"{len(recorded.results())} runs, {compared(plain.results(), recorded.results())}, "
        f"recorded {stored(directory / 'served')} {found['kept']}, error {found['error']}, "
        f"warnings {warnings(recorded)}; {found['worst']}"
    )


def killed(directory: Path, seconds: float) -> str:
    from capture import load
    from capture.storage.repair import repair

    out = directory / "killed"
    child = start(directory, "killed", "1000", RECORD_MANY)
    wait_for_calls(child, out, time.monotonic() + seconds)
    child.kill()
    files = stored(out)
    repair(out)
    return f"killed with {files} files; {len(load(out))} calls after repair"


def removed(directory: Path, seconds: float) -> str:
    out = directory / "removed"
    child = start(directory, "removed", "30", RECORD_MANY)
    end = time.monotonic() + seconds
    wait_for_calls(child, out, end)
    before = len(child.results())
    shutil.rmtree(out, ignore_errors=True)
    child.wait(max(1.0, end - time.monotonic()))
    runs = child.results()
    return (
        f"removed after {before} runs; {len(runs)} of 30 runs, exit code "
        f"{child.process.returncode}, "
        f"warnings {warnings(child)}"
    )


def cost(directory: Path, seconds: float) -> str:
    child = start(directory, "cost", "cost")
    child.wait(seconds)
    (found,) = child.results() or [None]
    return f"throughput with / without (mean, 95 % interval): {found}"


SCENARIOS = {"served": served, "killed": killed, "removed": removed, "cost": cost}


def main() -> int:
    arguments = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    arguments.add_argument("--scenarios", default=",".join(SCENARIOS), help="names, by commas")
    arguments.add_argument("--seconds", type=float, default=200, help="limit of an engine")
    arguments.add_argument("--directory", type=Path, help="keeps checkpoints, logs, recordings")
    arguments.add_argument("--work", help="run an engine in this process")
    given = arguments.parse_args()
    if given.work:
        if given.work == "cost":
            measure_cost(given.directory)
        else:
            generate_often(given.directory, int(given.work))
        return 0
    gpu()
    directory = given.directory or Path(tempfile.mkdtemp(prefix="engines_vllm-"))
    if not (directory / CASE.checkpoint / "config.json").exists():
        save_checkpoint(CASE.checkpoint, directory / CASE.checkpoint)
    for name in given.scenarios.split(","):
        try:
            line = SCENARIOS[name](directory, given.seconds)
        except Exception as error:
            line = f"FAILED: {type(error).__name__}: {error}"
        print(f"{name}: {line}", flush=True)
    print(f"logs in {directory}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
