"""A replay starts its processes before it imports PyTorch, so that the imports overlap."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

REPOSITORY = Path(__file__).resolve().parents[3]

PROGRAM = """
import json, sys
from replay.cli.main import main
from replay.workers.process import Process

events = []

def note(what):
    def noted(process, **request):
        assert "torch" not in sys.modules
        events.append([what, request])
    return noted

Process.start, Process.prepare = note("start"), note("prepare")
Process.close = lambda process: None

class Reached(BaseException):
    pass

class Torch:  # so that the test does not wait for the real one
    @staticmethod
    def find_spec(name, path=None, target=None):
        if name == "torch":
            raise Reached

sys.meta_path.insert(0, Torch)
try:
    main(sys.argv[1:])
except Reached:
    events.append("torch")
finally:
    print(json.dumps(events))
"""


def before_torch(*arguments: str) -> tuple[list[Any], str]:
    """Return the events of processes until PyTorch is imported or the command ends, and stderr."""
    done = subprocess.run(
        [sys.executable, "-c", PROGRAM, *arguments],
        cwd=REPOSITORY,
        capture_output=True,
        text=True,
    )
    return json.loads(done.stdout.splitlines()[-1]), done.stderr


@pytest.mark.parametrize(
    ("arguments", "imported"),
    [
        (("random",), [None]),
        (("random", "--kernels", "flex,torch-*"), ["flex,torch-*"]),
        (("suite", "llama"), [None]),
    ],
)
def test_worker_and_judge_start_before_torch_is_imported(
    arguments: tuple[str, ...], imported: list[str | None]
) -> None:
    events, _ = before_torch(*arguments, "--device", "cpu")
    assert events == [
        ["start", {}],
        ["start", {}],
        ["prepare", {"do": "touch", "device": "cpu"}],
        ["prepare", {"do": "touch", "device": "cpu"}],
        *(["prepare", {"do": "warm up", "kernels": each}] for each in imported),
        "torch",
    ]


@pytest.mark.parametrize(
    ("options", "reason"),
    [
        (("--call", "nosuch"), "no call 'nosuch' was recorded: the first is model-000000"),
        (("--call", "model-000001,x*"), "no call 'x*' was recorded"),
        (("--env", "other=/no/python"), "there is no Python at /no/python"),
        (("--report", "/no/report.html"), "create its directory first"),
        (("--dir", "/no/recording"), "/no/recording: no such directory; record into it"),
        (("--dir", "/no/recording.zip"), "no such archive"),
    ],
)
def test_what_cannot_be_starts_nothing(
    recorded: Path, options: tuple[str, ...], reason: str
) -> None:
    source = () if "--dir" in options else ("--dir", str(recorded))
    events, err = before_torch(*source, *options)
    assert events == []
    assert reason in err


@pytest.mark.parametrize(
    "options",
    [
        ("--kernels", "torch-math,torch-flahs"),
        ("--kernels", "nowhere.py:mine"),
        ("--baseline-kernel", "sage4"),
        ("--device", "gpu"),
    ],
)
def test_names_that_look_wrong_are_looked_up_before_anything_starts(
    options: tuple[str, ...],
) -> None:
    events, _ = before_torch("random", *options)
    assert events == ["torch"]


@pytest.mark.parametrize(
    "options",
    [
        ("--call", "model-00000[12]"),
        ("--call", "model-000000.safetensors"),  # a damaged file has this name
        ("--call", "model.ranks0-1-000000", "--join-ranks"),
        ("--errors-against", "captured"),
        ("--device", "cuda:1"),
    ],
)
def test_what_may_be_starts(recorded: Path, options: tuple[str, ...]) -> None:
    events, _ = before_torch("--dir", str(recorded), *options)
    assert [event[0] for event in events] == ["start"] * 2 + ["prepare"] * 3 + ["t"]


def test_a_recording_that_goes_on_may_have_more_calls(recorded: Path, tmp_path: Path) -> None:
    (recorded / "other.journal").write_text("")
    events, _ = before_torch("--dir", str(recorded), "--call", "other-000007")
    assert len(events) == 6
