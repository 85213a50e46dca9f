"""Writes a directory that reproduces a kernel's failure on a recorded call."""

from __future__ import annotations

import os
import re
import shlex
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch

from attention_replay.errors import Error
from capture.call.attention_call import AttentionCall
from capture.call.head_ranges import parse_ranges, ranges
from capture.storage.call_file import FileEntry, PackedCall
from capture.storage.capture_record import CaptureRecord
from capture.storage.dataset import Dataset
from capture.storage.plain_files import possible
from capture.text.printable import printable
from replay.accuracy.reference import attention
from replay.bench.settings import Settings
from replay.kernels.libraries import version
from replay.kernels.registry import catalogue
from replay.reproduce.crop import left_alone, storable
from replay.reproduce.kernel_call import KernelCall
from replay.reproduce.minimise import Smallest, minimise
from replay.reproduce.script import EXPECTED, KERNEL, SCRIPT, ScriptError, Shown, write_script
from replay.reproduce.trials import TrialOutcome, Trials
from replay.rows.row_files import rebuilt
from replay.timing.machine import describe
from replay.workers.messages import reading
from replay.workers.process import STARTING_SECONDS, CannotStart, Died, Process
from replay.workloads.recorded import recorded_call
from replay.workloads.workload import Workload


class ReproduceError(Error):
    """Reason why nothing was written."""


@dataclass(frozen=True)
class Reproduction:
    """Request to reproduce a failure."""

    workload: Workload
    kernel: str
    settings: Settings
    seconds: float
    """Time limit of the search for the smallest part."""
    timeout: float
    """Seconds after which a kernel counts as hanging."""
    python: str = sys.executable
    """Interpreter of the environment that the kernel runs in."""

    def trials(self, scratch: Path) -> Trials:
        """Return trials of the kernel in new processes."""
        return Trials(self.kernel, self.settings, self.timeout, scratch, self.python)


@dataclass(frozen=True)
class Reproduced:
    """Result of a reproduction."""

    whole: TrialOutcome
    """Outcome on the recorded call; if it is not a failure, nothing is written."""
    smallest: Smallest | None = None
    """Smallest failing part, if there is a failure."""
    no_script: str = ""
    """Reason why there is no script; empty if the script exists."""


def reproduce(
    request: Reproduction, out: Path, report: Callable[[str], None] = lambda line: None
) -> Reproduced:
    """Write the smallest part of a call on which a kernel fails, and a script that shows this.

    Args:
        out: a directory that does not exist yet, or is empty.
        report: called with the name of each step.

    Raises:
        ReproduceError: the directory cannot be written, or the failure is intermittent.
        TrialError: the kernel cannot be run at all.
        DatasetError: the call cannot be read.
    """
    _check_place(out)
    workload = request.workload
    with tempfile.TemporaryDirectory(prefix="attention-replay-") as temporary:
        scratch = Path(temporary)
        report("starting")
        call = workload.load(torch.device("cpu"))
        with request.trials(scratch) as tried:
            report("the whole call")
            whole = tried.of(workload)
            if not whole.fails:
                return Reproduced(whole)
            smallest = minimise(call, whole, tried.on, request.seconds, report)
        smallest.call = _finished(smallest, call, workload.name)
        out.mkdir(parents=True, exist_ok=True)
        try:
            return _write(request, whole, smallest, out, scratch, report)
        except BaseException:
            _remove(out)
            raise


def _write(
    request: Reproduction,
    whole: TrialOutcome,
    smallest: Smallest,
    out: Path,
    scratch: Path,
    report: Callable[[str], None],
) -> Reproduced:
    origin = smallest.call.origin
    entry = PackedCall.of(smallest.call).write(out / f"{request.workload.name}.safetensors")
    record = CaptureRecord(
        origin.model,
        origin.weights,
        device=origin.device,
        versions=origin.versions,
        heads=origin.heads,
        complete=True,
    )
    dataset = Dataset(out, [entry], [record])
    dataset.save_manifest()
    (entry,) = dataset.entries
    # A failure that depends on earlier trials would be useless to a kernel's author.
    report("once more, in a new worker")
    with request.trials(scratch) as tried:
        again = tried.of(recorded_call(entry))
    if not again.is_like(smallest.outcome):
        raise ReproduceError(
            f"{request.kernel} fails on {request.workload.name}, but in a new worker "
            f"it is {again.status}: nothing was written, because the failure comes and goes"
        )
    smallest.outcome = again
    no_script = ""
    try:
        report("writing the script")
        stored = scratch / "stored.safetensors"
        shown = Shown(
            request.kernel,
            _kernel_call(request, entry, stored),
            entry.load(),
            entry.path.name,
            again,
            request.settings.device,
            request.timeout,
        )
        write_script(shown, out, stored, request.settings.tolerances)
        report("running the script")
        # A script that does not show the failure would be worse than no script.
        _check_script(request, out)
    except ScriptError as error:
        no_script = str(error)
        for name in (SCRIPT, EXPECTED, KERNEL):
            _remove(out / name)
    found = Reproduced(whole, smallest, no_script)
    (out / "README.md").write_text(_readme(request, found), encoding="utf-8")
    return found


_ONE = {"sequences": "sequence", "key heads": "key head", "queries": "query"}


def _finished(smallest: Smallest, whole: AttentionCall, name: str) -> AttentionCall:
    """Return the part with an output and its place in the recorded call."""
    call, origin, parts = storable(smallest.call), whole.origin, []
    for axis, (first, end) in smallest.kept.items():
        if axis == "key heads":
            group = whole.shape.q_heads // whole.shape.kv_heads
            heads = parse_ranges(origin.heads or f"0-{whole.shape.q_heads - 1}")
            origin = replace(origin, heads=ranges(heads[first * group : end * group]))
        if axis != "keys":
            parts.append(
                f"{axis} {first}-{end - 1}" if end - first > 1 else f"{_ONE[axis]} {first}"
            )
    if call.shape.kv_len != whole.shape.kv_len:
        parts.append(f"{call.shape.kv_len} of {whole.shape.kv_len} keys")
    if smallest.is_derived:
        call = replace(call, output=attention(call, torch.float64).to(call.dtype))
        parts.append("output recomputed in float64")
    if parts:
        origin = replace(origin, derived=f"{', '.join(parts)}; of {name}")
    return replace(call, origin=origin)


def _kernel_call(request: Reproduction, entry: FileEntry, stored: Path) -> KernelCall:
    """Request source code that calls the kernel, from a process in the kernel's environment."""
    found: dict[str, Any] = {}
    process = Process(request.python, request.timeout, "replay.reproduce.kernel_call")
    try:
        for message in process.ask(
            kernel=request.kernel,
            workload=recorded_call(entry).source.to_json(),
            device=str(request.settings.device),
            stored=str(stored),
        ):
            if "failed" in message:
                raise ScriptError(message["failed"])
            found = message.get("call", found)
        with reading(process):
            return rebuilt(KernelCall, found)
    except (CannotStart, Died) as error:
        raise ScriptError(str(error)) from error
    finally:
        process.close()


def _check_script(request: Reproduction, out: Path) -> None:
    """Run the script, and check that it fails."""
    command = [request.python, "-B", str(out.resolve() / SCRIPT)]
    try:
        done = subprocess.run(
            command,
            capture_output=True,
            text=True,
            errors="replace",
            check=False,
            timeout=request.timeout + STARTING_SECONDS,
        )
    except subprocess.TimeoutExpired as error:
        raise ScriptError(f"it runs for more than {error.timeout:g} s") from error
    if done.returncode != 1 or not _SHOWN.search(done.stdout + done.stderr):
        last = (done.stderr or done.stdout).strip().splitlines()[-1:]
        raise ScriptError(f"it exits with {done.returncode}: {' '.join(last)}")


_SHOWN = re.compile(r"^FAILS|^Timeout \(", re.MULTILINE)
"""Output of a script that shows the failure. The exit code 1 does not suffice, because scripts that
break for another reason return it too."""


def _readme(request: Reproduction, found: Reproduced) -> str:
    smallest = found.smallest
    assert smallest is not None
    call, machine = smallest.call, describe(request.settings.device)
    packages = {"torch": machine.torch, "cuda": machine.cuda, "triton": machine.triton}
    versions = [f"{name} {value}" for name, value in packages.items() if value]
    kernel = catalogue().get(request.kernel)
    if kernel is not None and kernel.library not in ("", "torch", "triton"):
        versions.append(f"{kernel.library} {version(kernel.library)}".strip())
    path, _, function = request.kernel.rpartition(":")
    name = f"{KERNEL}/{Path(path).name}:{function}" if path.endswith(".py") else request.kernel
    how = f"`python {SCRIPT}` shows it, and exits with 1 as long as it does."
    if found.no_script:
        how = f"There is no script, for {found.no_script}."
    parts = [
        f"# {request.kernel}: {smallest.outcome.status}",
        f"{_quoted(call.origin.derived or request.workload.name)}, recorded from "
        f"{_quoted(call.origin.model)} ({_quoted(call.origin.module)}): {call.shape} (batch, heads,"
        f" length, head dimension; query/key), {str(call.dtype).removeprefix('torch.')}.",
        f"Seen on {machine.device} with {', '.join(versions)}:\n\n"
        f"    {printable(smallest.outcome.reason)}",
        how,
        f"With attention-replay, here: `replay --dir . --kernels {shlex.quote(name)}`.",
    ]
    if reason := left_alone(call):
        parts.insert(2, f"In it, {reason}.")
    return "\n\n".join(parts) + "\n"


def _quoted(text: str) -> str:
    """Quote a name from a recording, so that it cannot become Markdown."""
    return f"`{printable(text).replace('`', ' ').strip()}`"


def _check_place(out: Path) -> None:
    """Raise ReproduceError if the directory cannot be written or is not empty."""
    try:
        if possible(out).exists() and any(out.iterdir()):
            raise ReproduceError(f"--out {out} is not empty: name another directory")
        os.rmdir(tempfile.mkdtemp(dir=out if out.exists() else out.absolute().parent))
    except OSError as error:
        raise ReproduceError(
            f"cannot write --out {out} ({error.strerror}): name another directory"
        ) from error


def _remove(path: Path) -> None:
    if path.is_dir():
        shutil.rmtree(path)
    else:
        path.unlink(missing_ok=True)
