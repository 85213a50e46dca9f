"""Commands run with streams that accept only ASCII, or are closed or full."""

import io
import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

import capture
from capture import load
from capture.command_line.standard_streams import make_usable
from replay.cli.main import main

REPOSITORY = Path(capture.__file__).resolve().parents[1]
REPLAY = "replay random -hq 1 -sq 8 -d 8 --kernels torch-math --rounds 3 --device cpu"


def run(command: str, cwd: Path, **environment: str) -> subprocess.CompletedProcess[bytes]:
    """Run a shell command that can import our packages."""
    variables = {**os.environ, "PYTHONPATH": str(REPOSITORY), "COLUMNS": "200", **environment}
    return subprocess.run(
        command, shell=True, executable="bash", cwd=cwd, env=variables, capture_output=True
    )


@pytest.mark.parametrize("options", ["--metric all", "--json -"])
def test_reports_in_ascii(monkeypatch: pytest.MonkeyPatch, options: str) -> None:
    written = io.BytesIO()
    monkeypatch.setattr(sys, "stdout", io.TextIOWrapper(written, "ascii", write_through=True))
    with pytest.raises(SystemExit) as stopped:
        main([*REPLAY.split()[1:], "--in-process", *options.split()])
    assert stopped.value.code == 0
    if options == "--json -":
        assert len(list(map(json.loads, written.getvalue().splitlines()))) == 2
    else:
        assert b"random - synthetic - 1x1x8x8 - bfloat16" in written.getvalue()


@pytest.mark.parametrize("given", ["capture --version", "replay --version"])
def test_stdout_that_is_full(tmp_path: Path, given: str) -> None:
    done = run(f"exec {sys.executable} -m {given} >/dev/full", tmp_path, PYTHONUNBUFFERED="")
    told = f"{given.split()[0]}: cannot write to stdout: No space left on device\n"
    assert (done.returncode, done.stderr.decode()) == (1, told)


@pytest.mark.slow
@pytest.mark.parametrize(
    "commands",
    [
        [
            "capture --model llama >/dev/full",
            "capture show captured_inputs >/dev/full",
            "capture show captured_inputs | true",
        ],
        [f"{REPLAY} --json - | true", f"{REPLAY} --in-process --json - >/dev/full"],
    ],
)
def test_stdout_that_cannot_be_written_is_reported_in_a_sentence(
    tmp_path: Path, commands: list[str]
) -> None:
    for command in commands:
        done = run(f"set -o pipefail; {sys.executable} -m {command}", tmp_path)
        assert b"OSError" not in done.stderr
        assert b"BrokenPipeError" not in done.stderr
        assert b"SystemExit" not in done.stderr
        if ">/dev/full" in command:
            assert b"cannot write to stdout: No space left on device" in done.stderr
            assert done.returncode == 1
        if "capture" in command:
            assert len(load(tmp_path / "captured_inputs")) == 10


def test_no_terminal_is_0_columns_wide(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", "0")
    make_usable()
    assert "COLUMNS" not in os.environ


@pytest.mark.parametrize("given", ["--help", "show …"])
def test_sentences_in_ascii(tmp_path: Path, given: str) -> None:
    command = f"exec {sys.executable} -m capture {given}"
    done = run(command, tmp_path, PYTHONIOENCODING="ascii")
    assert b"Error" not in done.stderr
    assert done.returncode == (0 if given == "--help" else 2)
