"""A replay starts its processes before it imports PyTorch, so that the imports overlap."""

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
        [sys.executable, "-c", PROGRAM, *arguments], cwd=REPOSITORY, capture_output=True, text=True
    )
    return json.loads(done.stdout.splitlines()[-1]), done.stderr


def test_worker_and_judge_start_before_torch_is_imported() -> None:
    kernels = "flex,torch-*"
    events, _ = before_torch("random", "--kernels", kernels, "--device", "cpu")
    assert events == [
        ["start", {}],
        ["start", {}],
        ["prepare", {"do": "touch", "device": "cpu"}],
        ["prepare", {"do": "touch", "device": "cpu"}],
        ["prepare", {"do": "warm up", "kernels": kernels}],
        "torch",
    ]


@pytest.mark.parametrize(
    ("options", "reason"),
    [
        (("--call", "model-000001,x*"), "no call 'x*' was recorded"),
        (("--env", "other=/no/python"), "there is no Python at /no/python"),
        (("--dir", "/no/recording"), "/no/recording: no such directory; record into it"),
    ],
)
def test_misuse_starts_no_process(recorded: Path, options: tuple[str, ...], reason: str) -> None:
    source = () if "--dir" in options else ("--dir", str(recorded))
    events, err = before_torch(*source, *options)
    assert events == []
    assert reason in err


@pytest.mark.parametrize(
    "options", [("--kernels", "torch-math,torch-flahs"), ("--baseline-kernel", "sage4")]
)
def test_suspicious_name_is_looked_up_before_a_process_starts(options: tuple[str, ...]) -> None:
    events, _ = before_torch("random", *options)
    assert events == ["torch"]


@pytest.mark.parametrize(
    "options",
    [
        ("--call", "model-000000.safetensors"),  # a damaged file has this name
        ("--call", "model.ranks0-1-000000", "--join-ranks"),
        ("--errors-against", "captured", "--device", "cuda:1"),
    ],
)
def test_plausible_arguments_start_processes(recorded: Path, options: tuple[str, ...]) -> None:
    events, _ = before_torch("--dir", str(recorded), *options)
    assert [event[0] for event in events] == ["start"] * 2 + ["prepare"] * 3 + ["t"]
