"""A faulty kernel loses only its own row, and leaves no process or file behind."""

import contextlib
import json
import os
import re
import signal
import subprocess
import sys
import time
import uuid
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

import pytest

import replay as replay_package
from capture.storage.dataset import Dataset
from replay.isolation.processes import family
from replay.workers.process import LOG_BYTES
from tests.in_this_process import RunCli

BAD = Path(__file__).with_name("bad_kernels.py")
COMMAND = f"""
import sys
sys.path.insert(0, {str(Path(replay_package.__file__).resolve().parents[1])!r})
from replay.bench import confirmation
from replay.cli.main import main
confirmation.TOO_FAST = 1e6  # a busy machine must contradict no row
main()
"""
SHAPE = ("random", "-b", "1", "-hq", "2", "-sq", "64", "-d", "32", "--dtype", "float32")
QUICK = ("--rounds", "3", "--device", "cpu")


pytestmark = pytest.mark.skipif(
    sys.platform != "linux", reason="counts processes in /proc, and limits memory as Linux does"
)


class Command:
    """Running command with a mark in its environment, which its processes inherit."""

    def __init__(self, directory: Path, *arguments: str) -> None:
        self._temporary, self._mark = directory / "temporary", uuid.uuid4().hex
        self._temporary.mkdir()
        self.process = subprocess.Popen(
            [sys.executable, "-c", COMMAND, *arguments],
            env={**os.environ, "TMPDIR": str(self._temporary), "MARK": self._mark},
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )

    def _processes(self) -> list[str]:
        found, mark = [], f"MARK={self._mark}".encode()
        for entry in Path("/proc").glob("[0-9]*"):
            with contextlib.suppress(OSError):
                is_ours = mark in (entry / "environ").read_bytes()
                if is_ours and ") Z " not in (entry / "stat").read_text():
                    found.append(entry.name)
        return found

    def left_behind(self, seconds: float = 100) -> list[str]:
        """Wait for the end of all processes; return those left, and files except torch's cache."""
        deadline = time.monotonic() + seconds
        while self._processes() and time.monotonic() < deadline:
            time.sleep(0.05)
        files = [path.name for path in self._temporary.iterdir()]
        return self._processes() + [name for name in files if "torchinductor_" not in name]


def rows_of(text: str) -> dict[str, dict[str, Any]]:
    rows = [json.loads(line) for line in text.splitlines()]
    return {row["kernel"].rpartition(":")[2]: row for row in rows}


FAULTS: dict[str, tuple[str, str, str]] = {
    "segfault": ("crash", "ended by SIGSEGV", r"the last words of segfault[\s\S]* in segfault"),
    "disturb": ("ok", "is within", ""),
    "exits_when_imported": ("crash", "exited with code 3", "the last words of an import"),
    "keep_memory": ("out-of-memory", "all of it is kept; it did not free its memory", ""),
    "keep_every_byte": ("out-of-memory|crash", "", ""),
    "never_the_same": ("ok", "is within", ""),
    "honest_choice": ("ok", "on the keys it chose", ""),
    "kept_weights": ("inaccurate", "wrong on other inputs", ""),
}
"""Status, reason and log of the row of each faulty kernel."""


EXITS = """
print("the last words of an import")
__import__("os")._exit(3)
def exits_when_imported(query, key, value): ...
"""


class Finished(NamedTuple):
    code: int
    rows: dict[str, dict[str, Any]]
    stderr: str
    left_behind: list[str]


@pytest.fixture(scope="module")
def everything(tmp_path_factory: pytest.TempPathFactory) -> Finished:
    """Replay of all faulty kernels between two good kernels."""
    directory = tmp_path_factory.mktemp("faults")
    exits = directory / "exits.py"
    exits.write_text(EXITS)
    kernels = [f"{exits if 'exits' in name else BAD}:{name}" for name in ("good", *FAULTS)]
    chosen = ("--kernels", ",".join([*kernels, "torch-math"]))
    command = Command(directory, *SHAPE, *QUICK, "-q", "--timeout", "60", *chosen, "--json", "-")
    out, err = command.process.communicate(timeout=250)
    return Finished(command.process.returncode, rows_of(out), err, command.left_behind())


def accusations(row: dict[str, Any]) -> list[str]:
    """Return the flags that do not come from a busy machine."""
    return [flag for flag in row["flags"] if re.match("not deterministic: |changes ", flag)]


@pytest.mark.parametrize("name", FAULTS)
def test_fault_is_classified(everything: Finished, name: str) -> None:
    (status, reason, log), row = FAULTS[name], everything.rows[name]
    assert re.fullmatch(status, row["status"]), row["reason"]
    assert re.search(reason, row["reason"]), row["reason"]
    assert re.search(log, row["log"]), row["log"]
    assert len(row["log"].encode()) <= 2 * LOG_BYTES
    assert len(accusations(row)) == (name == "never_the_same")
    assert (row["time_ms"] is not None) == (status in ("ok", "inaccurate"))
    assert (row["speedup"] is not None) == (status == "ok"), row["flags"]
    assert row["kept"] == (0.25 if row["accuracy_class"] == "sparse" else None)


def test_other_rows_are_unaffected(everything: Finished) -> None:
    assert list(everything.rows) == ["good", *FAULTS, "torch-math", "torch-default"]
    for name, process in {"good": str(BAD), "torch-math": "", "torch-default": ""}.items():
        row = everything.rows[name]
        assert (row["status"], accusations(row), row["log"]) == ("ok", [], "")
        assert (row["time_ms"]["n"], row["process"]) == (3, process)
        assert len(row["time_ms"]["control"]) == (3 if process else 0)
        assert (row["speedup"] is None) == (name == "torch-default")
    assert (everything.code, everything.stderr.strip(), everything.left_behind) == (0, "", [])


@pytest.mark.slow
def test_compiled_kernels_disturb_no_other(run_cli: RunCli) -> None:
    code, out, _ = run_cli(*SHAPE, *QUICK, "--kernels", "flex,torch-math-compiled", "--json", "-")
    rows = rows_of(out)
    assert code == 0
    assert [(row["status"], row["process"]) for row in rows.values()] == [("ok", "")] * 3
    assert not [flag for row in rows.values() for flag in accusations(row)]


STALLS = """
import pathlib, time
from torch.nn.functional import scaled_dot_product_attention

def stall(query, key, value, *others, **options):
    if float(query.abs().max()) != FIRST:
        pathlib.Path(__file__).with_name("stalled").touch()
        time.sleep(3600)
    return scaled_dot_product_attention(query, key, value, *others, **options)
"""


@pytest.fixture
def stalled(recorded: Path, tmp_path: Path) -> Iterator[Command]:
    """Command whose kernel hangs in the second of three calls."""
    first = float(Dataset.open(recorded)[0].query.abs().max())
    file = tmp_path / "stalls.py"
    file.write_text(STALLS.replace("FIRST", str(first)))
    command = Command(tmp_path, "--dir", str(recorded), *QUICK, "--kernels", f"{file}:stall")
    try:
        while not (tmp_path / "stalled").exists():
            assert command.process.poll() is None
            time.sleep(0.05)
        yield command
    finally:
        command.process.kill()
        command.process.communicate()


def test_ctrl_c_ends_the_run_and_its_children(stalled: Command) -> None:
    # The command, and its judge and two workers with their supervisors.
    assert len(family(stalled.process.pid)) == 7
    stalled.process.send_signal(signal.SIGINT)
    out, err = stalled.process.communicate(timeout=100)
    assert stalled.process.returncode == 130
    assert "· 1 call" in out  # the call that was measured
    assert "replay: interrupted: 2 of 3 calls left out" in err.splitlines()[-1]
    assert "Traceback" not in err
    assert stalled.left_behind() == []


@pytest.mark.slow
def test_killed_run_leaves_no_child(stalled: Command) -> None:
    stalled.process.kill()
    stalled.process.communicate()
    assert stalled.left_behind() == []
