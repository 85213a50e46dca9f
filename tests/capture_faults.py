"""Makes each operation that a recording needs fail, and checks that the model is unaffected.

    python -m tests.capture_faults                  writes benchmarks/results/capture_faults.csv
    python -m tests.capture_faults --kills 20       with fewer processes killed

Every system call of the writing path fails in turn, at each occurrence, either once or from then
on. Processes are also killed at random moments. After each fault, the model's output has the same
bits, at most one warning was raised, `problems` states what was lost, `load` verifies exactly the
calls that `kept` counts, and the repaired directory contains only listed files.
"""

from __future__ import annotations

import _thread
import argparse
import contextlib
import csv
import errno
import os
import random
import shutil
import signal
import sys
import tempfile
import threading
import time
import warnings
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any
from unittest import mock

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from capture import load, record
from capture.errors import CaptureError, DatasetError, RecordingWarning
from capture.hooks import interceptor
from capture.recording import writer
from capture.recording.memory import BufferPool
from capture.recording.recording import Recording
from capture.storage.dataset import MANIFEST
from capture.storage.journal import call_files, read
from capture.storage.repair import repair
from capture.storage.unfinished import UnfinishedCapture

RESULTS = Path(__file__).parent.parent / "benchmarks" / "results" / "capture_faults.csv"


@dataclass(frozen=True)
class Fault:
    """Failure of a function that the recorder calls."""

    name: str
    owner: Any
    errors: tuple[Exception, ...]

    @classmethod
    def of_system(cls, name: str, *numbers: int, owner: Any = os) -> Fault:
        return cls(name, owner, tuple(OSError(each, os.strerror(each)) for each in numbers))


try:
    import fcntl

    LOCKING = [Fault.of_system("flock", errno.EIO, errno.ENOLCK, owner=fcntl)]
except ImportError:
    LOCKING = []

FAULTS = [
    Fault.of_system("open", errno.ENOSPC, errno.EIO, errno.EROFS, errno.EDQUOT, errno.EMFILE),
    Fault.of_system("write", errno.ENOSPC, errno.EIO, errno.EDQUOT),
    Fault.of_system("pwritev", errno.ENOSPC, errno.EIO, errno.EFBIG),
    Fault.of_system("fsync", errno.EIO, errno.ENOSPC),
    Fault.of_system("replace", errno.EIO, errno.EROFS, errno.ENOSPC),
    Fault.of_system("unlink", errno.EIO, errno.EROFS),
    Fault.of_system("mkdir", errno.ENOSPC, errno.EROFS),
    Fault.of_system("close", errno.EIO, errno.ENOSPC),
    Fault.of_system("fstat", errno.EIO),
    *LOCKING,
    Fault.of_system("_sync_file_system", errno.EIO, owner=writer),
    Fault("allocate", BufferPool, (MemoryError("no memory"), RuntimeError("not enough memory"))),
    Fault("start_new_thread", _thread, (RuntimeError("can't start new thread"),)),
]


@dataclass
class Injected:
    """Counts the recorder's calls of a function, and makes one call or all later calls fail."""

    fault: Fault
    occurrence: int = -1
    error: Exception | None = None
    lasting: bool = False
    calls: int = 0
    _lock: threading.Lock = field(default_factory=threading.Lock, repr=False)

    @contextlib.contextmanager
    def active(self) -> Iterator[None]:
        original = getattr(self.fault.owner, self.fault.name)

        def function(*arguments: Any, **options: Any) -> Any:
            if not _called_by_recorder():
                return original(*arguments, **options)
            with self._lock:
                index = self.calls
                self.calls += 1
            if self.error is not None and (
                index == self.occurrence or (self.lasting and index > self.occurrence >= 0)
            ):
                if self.fault.name == "close":  # a failed close still releases the descriptor
                    original(*arguments, **options)
                raise self.error
            return original(*arguments, **options)

        with mock.patch.object(self.fault.owner, self.fault.name, function):
            yield


def _called_by_recorder() -> bool:
    frame = sys._getframe(2)
    for _ in range(8):
        if frame.f_globals.get("__name__", "").startswith("capture."):
            return True
        if frame.f_back is None:
            return False
        frame = frame.f_back
    return False


class Model(nn.Module):
    """Model of several attention calls, each on the output of the previous call."""

    def forward(self, states: Tensor, calls: int = 4) -> Tensor:
        for _ in range(calls):
            states = states + F.scaled_dot_product_attention(states, states, states)
        return states


STEPS = 3
WAYS: dict[str, dict[str, Any]] = {
    "first": {"max": 3, "sample": "first"},
    "spread": {"max": 3, "buffer_bytes": 1},
    "durable": {"max": 3, "durable": True},
}


def run(model: Model, states: Tensor) -> Tensor:
    for _ in range(STEPS):
        states = model(states)
    return states


def replace_in_torch(functions: dict[int, Any]) -> None:
    """Replace functions only in this model's modules, because searching all modules is slow."""
    held = F.scaled_dot_product_attention
    F.scaled_dot_product_attention = functions.get(id(held), held)


def attempt(directory: Path, injected: Injected, way: str, *, earlier: Path | None = None) -> str:
    """Record with a fault, check the results, and return the kind of outcome.

    Args:
        earlier: a directory whose capture is overwritten.

    Raises:
        AssertionError: a check failed.
    """
    model, states = Model(), torch.randn(1, 2, 5, 8, generator=torch.Generator().manual_seed(0))
    expected = run(model, states)
    if earlier is not None:
        shutil.copytree(earlier, directory)
    before = contents(directory)
    recording: Recording | None = None
    with warnings.catch_warnings(record=True) as warned, injected.active():
        warnings.simplefilter("always")
        try:
            with record(model, directory, name="model", overwrite=True, **WAYS[way]) as recording:
                output = run(model, states)
        except CaptureError as error:
            refusal = str(error)
    if recording is None:
        assert "\n" not in refusal
        if not injected.lasting:  # with a lasting fault, the recorder cannot undo its changes
            assert contents(directory) == before
        outcome = "refused"
    else:
        assert torch.equal(output, expected), "the model's output differs"
        told = [each for each in warned if issubclass(each.category, RecordingWarning)]
        assert len(told) == bool(recording.problems)
        outcome = after(directory, recording, overwrite=earlier is not None)
    with contextlib.suppress(DatasetError):
        repair(directory)
    assert not orphans(directory), orphans(directory)
    with record(model, directory, name="model", overwrite=True, **WAYS[way]) as again:
        run(model, states)
    assert again.problems == []
    assert kept_in(directory) == again.kept == 3
    assert not orphans(directory), orphans(directory)
    return outcome


def after(directory: Path, recording: Recording, *, overwrite: bool) -> str:
    """Compare the recording's report with the files on disk, and return the kind of outcome."""
    newer = [path for path in directory.glob("unfinished-*") if (path / MANIFEST).exists()]
    found = [kept_in(each) for each in (directory, *newer)]
    earlier = [3] if overwrite else []
    if recording.kept == 3 and not recording.lost:
        assert 3 in found
        return "kept all, said" if recording.problems else "kept all"
    assert recording.problems, "calls are missing and nothing says so"
    assert overwrite is False or 3 in found, "the earlier capture is gone"
    if not overwrite:
        assert found == [recording.kept], (found, recording.kept)
    elif newer:
        assert found == [*earlier, recording.kept]
    return "lost some, said"


def kept_in(directory: Path) -> int:
    """Verify the calls that `load` reads, and return their number."""
    try:
        data = load(directory)
    except DatasetError:
        return 0
    assert not data.damaged
    return sum(1 for _ in data)


def contents(directory: Path) -> dict[str, bytes]:
    if not directory.exists():
        return {}
    files = (path for path in directory.rglob("*") if path.is_file())
    return {str(path.relative_to(directory)): path.read_bytes() for path in files}


def orphans(directory: Path) -> set[str]:
    """Return the files that no manifest or journal lists."""
    if not directory.exists():
        return set()
    found: set[str] = set()
    for each in (directory, *directory.glob("unfinished-*")):
        listed = {MANIFEST, *(entry.path.name for entry in load_or_none(each))}
        found |= {path.name for path in each.iterdir() if path.is_file()} - listed
    return found


def load_or_none(directory: Path) -> list[Any]:
    try:
        return load(directory).entries
    except DatasetError:
        return []


def try_fault(
    fault: Fault, way: str, scratch: Path, *, overwrite: bool, every: bool, both: bool
) -> Counter[str]:
    """Make a function fail at each occurrence in turn, and count the outcomes.

    Args:
        every: try all of the fault's errors; otherwise try only one at each occurrence.
        both: try each error both once and lasting; otherwise only in one of these ways.
    """
    outcomes: Counter[str] = Counter()
    earlier = None
    if overwrite:
        earlier = Path(tempfile.mkdtemp(dir=scratch))
        model = Model()
        with record(model, earlier, name="model", **WAYS[way]):
            run(model, torch.ones(1, 2, 5, 8))

    def once(injected: Injected) -> str:
        directory = Path(tempfile.mkdtemp(dir=scratch)) / "recorded"
        try:
            with mock.patch.object(interceptor, "swap_references", replace_in_torch):
                return attempt(directory, injected, way, earlier=earlier)
        except AssertionError as error:
            raise AssertionError(
                f"{way}{' overwriting' * overwrite}: {fault.name} number {injected.occurrence}, "
                f"{injected.error!r}{', and from then on' * injected.lasting}: {error}"
            ) from error
        finally:
            shutil.rmtree(directory.parent)

    counting = Injected(fault)
    assert once(counting) == "kept all"
    for occurrence in range(counting.calls):
        errors = fault.errors if every else [fault.errors[occurrence % len(fault.errors)]]
        for error in errors:
            for lasting in (False, True) if both else (occurrence % 2 == 1,):
                outcomes[once(Injected(fault, occurrence, error, lasting))] += 1
    return outcomes


def kill(scratch: Path, way: str, seconds: float, *, overwrite: bool, begun: bool = True) -> str:
    """Kill a recording process, and check the files that it left.

    Args:
        seconds: delay after the process's first call, or after its start if `begun` is False.
    """
    directory = Path(tempfile.mkdtemp(dir=scratch)) / "recorded"
    model, states = Model(), torch.randn(1, 8, 64, 32)
    if overwrite:
        with record(model, directory, name="model", max=3):
            run(model, states)
    reads, writes = os.pipe()
    parent = os.getpid()
    process = os.fork()
    if not process:
        with contextlib.suppress(BaseException):
            options = {**WAYS[way], "max": 40}
            with record(model, directory, name="model", overwrite=True, **options):
                model(states)
                os.write(writes, b"begun")
                while os.getppid() == parent:
                    model(states)
        os._exit(1)
    os.close(writes)
    if begun:
        assert os.read(reads, 5) == b"begun"
    os.close(reads)
    time.sleep(seconds)
    os.kill(process, signal.SIGKILL)
    assert os.WIFSIGNALED(os.waitpid(process, 0)[1])
    try:
        journals = (
            [read(path) for path in directory.glob("*.journal")] if directory.exists() else []
        )
        files = call_files(directory) if directory.exists() else {}
        written = [each for each in journals if not each.is_empty]
        left = [UnfinishedCapture.of(each, files, over=True) for each in written]
        completed = sum(len(found.entries) for found in left)
        in_memory = sum(each.lost for each in journals)
        if overwrite:
            assert kept_in(directory) == 3, "the earlier capture is gone"
        elif completed:
            data = load(directory)
            assert len(data) == completed == kept_in(directory)
            assert not in_memory or f"{in_memory} more only in memory" in data.note
        if directory.exists():
            with contextlib.suppress(DatasetError):
                repair(directory)
            assert not orphans(directory), orphans(directory)
            beside = sum(kept_in(each) for each in directory.glob("unfinished-*"))
            assert kept_in(directory) + beside == completed + 3 * overwrite
        return "all completed calls verified" if completed else "no call was complete"
    finally:
        shutil.rmtree(directory.parent)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--kills", type=int, default=200)
    parser.add_argument("--every", action="store_true", help="each error, once and from then on")
    parser.add_argument("--out", type=Path, default=RESULTS)
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    lines: list[dict[str, object]] = []
    with tempfile.TemporaryDirectory() as scratch:
        for fault in FAULTS:
            outcomes: Counter[str] = Counter()
            for way in WAYS:
                for overwrite in (False, True):
                    how = {"every": arguments.every, "both": arguments.every}
                    outcomes += try_fault(fault, way, Path(scratch), overwrite=overwrite, **how)
            lines.append(line(title(fault), outcomes))
        for overwrite in (False, True):
            outcomes = Counter()
            for number in range(arguments.kills // 2):
                way = list(WAYS)[number % len(WAYS)]
                seconds = random.uniform(0.005, 0.4)
                begun = number % 4 > 0
                outcomes[kill(Path(scratch), way, seconds, overwrite=overwrite, begun=begun)] += 1
            what = "kill -9, replacing an earlier capture" if overwrite else "kill -9"
            lines.append(line(what, outcomes))
    with arguments.out.open("w", newline="") as file:
        table = csv.DictWriter(file, ["fault", "tried", "outcome"], lineterminator="\n")
        table.writeheader()
        table.writerows(lines)


NAMES = {
    "_sync_file_system": "syncfs",
    "allocate": "allocation",
    "start_new_thread": "thread start",
}


def title(fault: Fault) -> str:
    codes = [
        errno.errorcode[each.errno] if isinstance(each, OSError) and each.errno else ""
        for each in fault.errors
    ]
    said = f" ({', '.join(codes)})" if all(codes) else ""
    return f"{NAMES.get(fault.name, fault.name)} fails{said}"


def line(fault: str, outcomes: Counter[str]) -> dict[str, object]:
    print(f"{fault}: {dict(outcomes)}", flush=True)
    outcome = "; ".join(f"{count} {name}" for name, count in sorted(outcomes.items()))
    return {"fault": fault, "tried": outcomes.total(), "outcome": outcome}


if __name__ == "__main__":
    main()
