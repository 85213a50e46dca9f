"""Replays every cheat together with two honest kernels and lists the cheats that fooled the tool.

python tests/replay/cheats/run.py [--in-process] [--only 'caches.*'] [--out FILE] [DIRECTORY]
python tests/replay/cheats/run.py --quick --draw 10 [--seed 7]      a few, also on a busy machine
"""

import argparse
import ast
import atexit
import contextlib
import fnmatch
import itertools
import json
import mmap
import os
import random
import resource
import runpy
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections import Counter
from dataclasses import dataclass, field
from pathlib import Path

HERE = Path(__file__).resolve().parent
HONEST = f"{HERE / 'honest.py'}:honest"
BASELINE = "torch-default"
CALLS = {
    "prefill": ["-b", "1", "-hq", "4", "-sq", "512", "-d", "64"],
    "decode": ["-b", "1", "-hq", "4", "-sq", "1", "-sk", "2048", "-d", "64"],
}
SMALL_CALLS = {
    "prefill": ["-b", "1", "-hq", "4", "-sq", "128", "-d", "64"],
    "decode": ["-b", "1", "-hq", "4", "-sq", "1", "-sk", "512", "-d", "64"],
}
FEW_ROUNDS = ["--rounds", "8", "--max-seconds", "0.1"]
ENOUGH_FASTER = 1 / 0.7
MUCH_FASTER = 5.0
"""Ratio of two kernels' best times that a busy machine cannot explain."""
DISTURBED = 1.5
LIMIT_S = 45
MEMORY = 6 * 2**30


class Forked:
    """Forked process in place of a worker's `subprocess.Popen`; PyTorch is already imported."""

    def __init__(self, command, *, pass_fds, env, **_) -> None:
        read, write = os.pipe()
        self.code: int | None = None
        self.pid = os.fork()
        if self.pid:
            os.close(write)
            self.stdout = os.fdopen(read, "rb")
            return
        try:
            os.setsid()
            for descriptor, source in enumerate((os.open(os.devnull, os.O_RDONLY), write, write)):
                os.dup2(source, descriptor)
            ends = sorted((2, *pass_fds, 1024))
            for after, before in itertools.pairwise(ends):
                os.closerange(after + 1, before)
            sys.stdout.reconfigure(write_through=True)
            os.environ.update(env)
            subprocess.Popen = Popen
            from replay.workers.worker import main

            main(int(command[-3]), int(command[-2]), command[-1])
            os._exit(0)
        finally:
            os._exit(1)

    def poll(self) -> int | None:
        if self.code is None:
            pid, status = os.waitpid(self.pid, os.WNOHANG)
            self.code = os.waitstatus_to_exitcode(status) if pid else None
        return self.code

    def wait(self, timeout: float = 3600) -> int:
        deadline = time.monotonic() + timeout
        while self.poll() is None:
            if time.monotonic() > deadline:
                raise subprocess.TimeoutExpired("a worker", timeout)
            time.sleep(0.001)
        return self.code


Popen = subprocess.Popen


@dataclass
class Run:
    """Command with one cheat, and its result."""

    cheat: str
    call: str
    folder: Path
    arguments: list[str]
    pid: int = 0
    began: float = 0.0
    attempt: int = 1
    notes: list[str] = field(default_factory=list)

    def kind(self) -> tuple[str, bool]:
        """Return a key that is equal for runs with the same honest times."""
        return self.call, "fp32" in self.arguments

    def start(self) -> None:
        """Fork, so that imports are done once, and run `python -m replay` in the child."""
        for name in ("rows", "output", "counter"):
            (self.folder / name).write_bytes(bytes(8) if name == "counter" else b"")
        self.began = time.monotonic()
        self.pid = os.fork()
        if self.pid:
            return
        atexit._clear()  # keeps the parent's scratch directory
        os.setsid()
        output = os.open(self.folder / "output", os.O_WRONLY | os.O_APPEND)
        for descriptor in (1, 2):
            os.dup2(output, descriptor)
        os.closerange(3, 1024)  # a cheat may write to any open descriptor
        resource.setrlimit(resource.RLIMIT_AS, (MEMORY, MEMORY))
        resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
        os.environ["CHEATS_COUNTER"] = str(self.folder / "counter")
        subprocess.Popen = Forked
        sys.argv = ["replay", *self.arguments, "--json", str(self.folder / "rows")]
        code = 1
        try:
            runpy.run_module("replay", run_name="__main__", alter_sys=True)
            code = 0
        except SystemExit as error:
            code = error.code if isinstance(error.code, int) else int(error.code is not None)
        except BaseException as error:
            with contextlib.suppress(BaseException):
                print(f"run.py: {error!r}", file=sys.stderr)
        finally:
            with contextlib.suppress(BaseException):
                threading._shutdown()
                atexit._run_exitfuncs()
                sys.stdout.flush()
            os._exit(code)

    def ended(self) -> bool:
        """Return whether the run is over; at the time limit, end its processes."""
        pid, status = os.waitpid(self.pid, os.WNOHANG)
        if not pid:
            if time.monotonic() - self.began < LIMIT_S:
                return False
            self.notes.append(f"ended after {LIMIT_S} s")
        elif code := os.waitstatus_to_exitcode(status):
            self.notes.append(f"exit {code}")
        left = self._left()
        if pid and left:
            time.sleep(1)
            left = self._left()
            if left:
                self.notes.append("left a process")
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self.pid, signal.SIGKILL)
        for process in left:
            with contextlib.suppress(ProcessLookupError):
                os.kill(process, signal.SIGKILL)
        if not pid:
            os.waitpid(self.pid, 0)
        return True

    def _left(self) -> list[int]:
        ours = f"CHEATS_COUNTER={self.folder}/counter".encode()
        left = []
        for place in Path("/proc").glob("[0-9]*/environ"):
            with contextlib.suppress(OSError):
                if ours in place.read_bytes().split(b"\0"):
                    left.append(int(place.parent.name))
        return left

    def rows(self) -> dict[str, dict]:
        """Return the rows that the command wrote, by kernel."""
        rows: dict[str, dict] = {}
        if not (file := self.folder / "rows").exists():
            return rows
        for line in file.read_text().splitlines():
            try:
                row = json.loads(line)
                rows[row["kernel"]] = row
            except (ValueError, KeyError, TypeError):
                self.notes.append("junk among the rows")
        return rows

    def mischief(self) -> int:
        with open(self.folder / "counter", "r+b") as file, mmap.mmap(file.fileno(), 8) as counter:
            return int.from_bytes(counter[:], "little")


@dataclass
class Line:
    """Line of the printed table."""

    cheat: str
    call: str
    status: str = "no row"
    speedup: float | None = None
    mischief: int = 0
    flags: str = ""
    others: str = ""
    verdict: str = ""
    disturbed: list[str] = field(default_factory=list)
    doubtful: bool = False

    def text(self) -> str:
        speedup = "" if self.speedup is None else f"{self.speedup:.2f}×"
        cells = (self.cheat, self.call, self.status, speedup, str(self.mischief))
        return "| " + " | ".join((*cells, self.flags, self.others, self.verdict)) + " |"


def kernels(directory: Path, only: str, left_out: str) -> list[str]:
    """Return `file.py:function` of every public function whose first argument is `query`."""

    def is_wanted(name: str) -> bool:
        def is_among(patterns: str) -> bool:
            return any(fnmatch.fnmatch(name, each) for each in patterns.split(","))

        return is_among(only) and not is_among(left_out)

    found = []
    for file in sorted(directory.glob("*.py")):
        if file.name in ("run.py", "honest.py"):
            continue
        for node in ast.parse(file.read_text()).body:
            if isinstance(node, ast.FunctionDef) and not node.name.startswith("_"):
                named = f"{file.stem}.{node.name}"
                kernel = [each.arg for each in node.args.args[:1]] == ["query"]
                if kernel and is_wanted(named):
                    found.append(f"{file}:{node.name}")
    return found


def is_fp32(cheat: str) -> bool:
    return "bfloat16" in cheat


def arguments(cheat: str | None, shape: list[str], fp32: bool, more: list[str]) -> list[str]:
    dtype = ["--dtype", "fp32"] if fp32 else []
    names = ",".join(name for name in (BASELINE, cheat, HONEST) if name)
    timeout = [] if "--in-process" in more else ["--timeout", "20"]
    return ["random", *shape, *dtype, *timeout, "--kernels", names, *more]


def run_all(runs: list[Run], jobs: int, done) -> None:
    waiting, running = list(runs), []
    while waiting or running:
        while waiting and len(running) < jobs:
            running.append(waiting.pop(0))
            running[-1].start()
        time.sleep(0.02)
        for run in list(running):
            if run.ended():
                running.remove(run)
                waiting.extend(done(run))


@dataclass
class Judge:
    """Compares best times of up to three runs to tell a disturbed neighbour from a busy machine.

    A quick judge ignores the times of neighbours and lets a kernel be somewhat faster.
    """

    quick: bool = False
    usual: dict[tuple, float] = field(default_factory=dict)
    best: dict[tuple, float] = field(default_factory=dict)

    def calibrate(self, run: Run) -> None:
        """Note the times of a run without a cheat."""
        rows = run.rows()
        if not rows:
            sys.exit((run.folder / "output").read_text())
        for kernel, row in rows.items():
            _note(self.usual, (*run.kind(), kernel), row)

    def line(self, run: Run) -> Line:
        """Return the table line of a run with a cheat."""
        rows = run.rows()
        name = run.cheat.rsplit("/", 1)[-1].replace(".py:", ".")
        line = Line(name, run.call, mischief=run.mischief())
        row = rows.get(run.cheat)
        if row is not None:
            line.status = row["status"]
            changed = (f"changes {name}" for name in row["changed_inputs"])
            line.flags = "; ".join((*row["flags"], *changed))
            if row["speedup"]:
                line.speedup = row["speedup"]["ratio"]
            elif row["time_ms"] and not self.quick:
                line.speedup = self.usual[(*run.kind(), BASELINE)] / min(row["time_ms"]["samples"])
        line.disturbed = self._disturbed(run, rows)
        line.others = "; ".join([*line.disturbed, *run.notes])
        faults = []
        if {BASELINE, run.cheat, HONEST} - set(rows):
            faults.append("rows missing")
        elif line.disturbed:
            faults.append("others")
        if line.status == "ok" and self._is_too_fast(run, rows, line.speedup):
            faults.append("time")
        if line.status == "ok" and line.mischief and not (self.quick and line.flags):
            faults.append("flagged only" if line.flags else "not noticed")
        if any("junk" in note for note in run.notes):
            faults.append("junk")
        if (run.folder / "output").stat().st_size > 100_000:
            faults.append("flooded")
        fair = "fair" if line.status == "ok" and not line.flags else "caught"
        line.verdict = f"fooled: {', '.join(faults)}" if faults else fair
        close = "time" in faults and (line.speedup or 0) < 2 * ENOUGH_FASTER
        line.doubtful = not self.quick and (close or "others" in faults)
        return line

    def _is_too_fast(self, run: Run, rows: dict[str, dict], speedup: float | None) -> bool:
        """Compare the best times in a quick run, where stalls can slow most of the few samples."""
        if not self.quick or speedup is None:
            return speedup is not None and speedup > ENOUGH_FASTER
        times = [rows[each]["time_ms"] for each in (run.cheat, BASELINE)]
        if None in times:  # the baseline failed later, which counts as disturbed
            return False
        best, usual = (min(each["samples"]) for each in times)
        return usual / best > MUCH_FASTER

    def _disturbed(self, run: Run, rows: dict[str, dict]) -> list[str]:
        found = []
        for kernel, name in ((BASELINE, "baseline"), (HONEST, "honest")):
            if kernel not in rows:
                found.append(f"no {name} row")
            elif rows[kernel]["status"] != "ok":
                found.append(f"{name} {rows[kernel]['status']}")
            elif not self.quick:
                best = _note(self.best, (run.cheat, run.call, kernel), rows[kernel])
                ratio = best / self.usual[(*run.kind(), kernel)]
                if not 1 / DISTURBED < ratio < DISTURBED:
                    found.append(f"{name}'s time {ratio:.2g}×")
        return found


def _note(times: dict[tuple, float], key: tuple, row: dict) -> float:
    times[key] = min([*row["time_ms"]["samples"], times.get(key, float("inf"))])
    return times[key]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("directory", nargs="?", type=Path, default=HERE)
    parser.add_argument("--in-process", action="store_true", help="without workers")
    parser.add_argument("--only", default="*", help="patterns of names: caches.by_*,lazy.*")
    parser.add_argument("--leave-out", default="", help="patterns of names, as in --only")
    parser.add_argument("--quick", action="store_true", help="small calls, one run, no fine times")
    parser.add_argument("--call", choices=CALLS, help="this one alone")
    parser.add_argument("--draw", type=int, help="this many of them, at random")
    parser.add_argument("--seed", type=int, help="of the draw (default: another each time)")
    parser.add_argument("--jobs", type=int, default=2, help="commands at a time (default 2)")
    parser.add_argument("--out", type=Path, help="where the table goes (default: stdout)")
    options = parser.parse_args()
    os.environ["OMP_NUM_THREADS"] = "1"
    os.environ["PYTHONPATH"] = os.pathsep.join([str(HERE), os.environ.get("PYTHONPATH", "")])
    sys.path[:0] = [str(HERE.parents[2]), str(HERE)]
    import replay.bench.runner
    import replay.cli.main
    import replay.workers.judge_worker
    import replay.workers.kernel_server
    import replay.workers.worker  # noqa: F401

    more = ["--in-process"] if options.in_process else []
    more += FEW_ROUNDS if options.quick else []
    calls = SMALL_CALLS if options.quick else CALLS
    if options.call:
        calls = {options.call: calls[options.call]}
    lines: dict[tuple, Line] = {}
    with tempfile.TemporaryDirectory() as scratch:

        def a_run(cheat: str | None, call: str, fp32: bool) -> Run:
            folder = Path(tempfile.mkdtemp(dir=scratch))
            command = arguments(cheat, calls[call], fp32, more)
            return Run(cheat or "", call, folder, command)

        judge = Judge(options.quick)

        def done(run: Run) -> list[Run]:
            if not run.cheat:
                judge.calibrate(run)
                return []
            lines[run.cheat, run.call] = line = judge.line(run)
            if line.doubtful and run.attempt < 3:
                again = a_run(run.cheat, *run.kind())
                again.attempt = run.attempt + 1
                return [a_run(None, *run.kind()), again]
            print(line.text(), file=sys.stderr, flush=True)
            return []

        cheats = kernels(options.directory.resolve(), options.only, options.leave_out)
        if options.draw:
            seed = random.randrange(10**6) if options.seed is None else options.seed
            cheats = random.Random(seed).sample(cheats, options.draw)
            print(f"--draw {options.draw} --seed {seed}", file=sys.stderr)
        runs = [a_run(cheat, call, is_fp32(cheat)) for cheat in cheats for call in calls]
        if not options.quick:
            kinds = sorted({run.kind() for run in runs})
            run_all([a_run(None, *kind) for kind in kinds * 3], options.jobs, done)
        run_all(runs, options.jobs, done)
    counts = Counter(line.verdict.split(":")[0] for line in lines.values())
    text = "\n".join(
        [
            ", ".join(f"{count} {verdict}" for verdict, count in counts.most_common()),
            "",
            "| cheat | call | status | speed-up | mischief | flags | other rows | verdict |",
            "|---|---|---|---:|---:|---|---|---|",
            *(lines[cheat, call].text() for cheat in cheats for call in calls),
            "",
        ]
    )
    options.out.write_text(text) if options.out else print(text)


if __name__ == "__main__":
    main()
