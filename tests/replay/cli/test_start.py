"""What a replay does before it imports PyTorch: start the processes that import it too."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

REPOSITORY = Path(__file__).resolve().parents[3]

PROGRAM = """
import json, sys
from pathlib import Path
from replay.cli.main import main
from replay.distribution import devices
from replay.workers.process import Process

devices.DEVICE_FILES = Path(sys.argv[1])
devices.core_siblings = lambda cpus: [[0], [1]]
events = []

def note(what):
    def noted(process, **request):
        assert "torch" not in sys.modules
        events.append([what, process.place.variables.get("CUDA_VISIBLE_DEVICES"), request])
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
    main(sys.argv[2:])
except Reached:
    events.append("torch")
finally:
    print(json.dumps(events))
"""


def before_torch(driver: Path, *arguments: str) -> tuple[list[Any], str]:
    """What happens to processes until PyTorch is imported or the command ends; and its stderr.

    Args:
        driver: where its files are.
    """
    variables = {name: each for name, each in os.environ.items() if name != "CUDA_VISIBLE_DEVICES"}
    done = subprocess.run(
        [sys.executable, "-c", PROGRAM, str(driver), *arguments],
        cwd=REPOSITORY,
        env=variables,
        capture_output=True,
        text=True,
    )
    return json.loads(done.stdout.splitlines()[-1]), done.stderr


@pytest.mark.parametrize(
    ("options", "kernels"),
    [
        ((), None),
        (("--kernels", "flex,torch-*"), "flex,torch-*"),
        (("--list-kernels",), ""),
    ],
)
def test_worker_and_judge_start_before_torch_is_imported(
    tmp_path: Path, options: tuple[str, ...], kernels: str | None
) -> None:
    source = () if "--list-kernels" in options else ("--random",)
    events, _ = before_torch(tmp_path, *source, "--device", "cpu", *options)
    assert events == [
        ["start", None, {}],
        ["start", None, {}],
        ["prepare", None, {"do": "prepare", "device": "cpu", "kernels": kernels}],
        ["prepare", None, {"do": "touch", "device": "cpu"}],
        "torch",
    ]


def test_those_of_several_gpus_start_too_and_use_none_yet(tmp_path: Path) -> None:
    """Another replay may be measuring there."""
    for name in ("nvidia0", "nvidia1", "nvidiactl"):
        (tmp_path / name).touch()
    events, _ = before_torch(tmp_path, "--random", "--gpus", "all")
    assert events == [["start", gpu, {}] for gpu in "0011"] + ["torch"]
