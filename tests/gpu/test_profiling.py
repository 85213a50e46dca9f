"""The command that `replay profile` prints profiles only the kernels of the given call.

Run this file alone, with permission to read counters: `pytest tests/gpu/test_profiling.py`.
"""

import shlex
import shutil
import subprocess
import sys

import pytest

pytestmark = pytest.mark.skipif(shutil.which("ncu") is None, reason="needs Nsight Compute")

SHAPE = ["random", "-b", "1", "-hq", "32", "-sq", "2048", "-d", "64"]
"""Call with so many rows that no kernel splits the keys, which takes a second kernel."""


@pytest.mark.parametrize(("kernel", "name"), [("torch-flash", "flash"), ("triton-fa2", "forward")])
def test_only_the_kernels_of_the_call_are_profiled(kernel: str, name: str) -> None:
    command = [sys.executable, "-m", "replay", "profile", *SHAPE, "--kernels", kernel]
    printed = subprocess.run(command, capture_output=True, text=True, check=True).stdout
    profiler, *others = shlex.split(printed)
    # Clocks are left unchanged, because other work on the machine may be timed meanwhile.
    run = [profiler, "--clock-control", "none", *others]
    done = subprocess.run(run, capture_output=True, text=True, check=False)
    if "ERR_NVGPUCTRPERM" in done.stdout + done.stderr:
        pytest.skip("the driver lets no user read counters here")
    assert done.returncode == 0, done.stdout + done.stderr
    profiled = [line.strip() for line in done.stdout.splitlines() if ", Context " in line]
    assert len(profiled) == 1, profiled
    assert name in profiled[0]
