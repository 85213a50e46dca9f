"""PyTorch's import, which looks for no garbage, changes nothing for what comes after."""

from __future__ import annotations

import gc
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from replay.cli.device import device_of
from replay.cli.files import UsageError

RunCli = Callable[..., tuple[int, str, str]]

KERNEL = """
import gc
from torch.nn.functional import scaled_dot_product_attention

def collected(*arguments, **named):
    assert gc.isenabled()
    assert gc.get_freeze_count() > 100_000  # PyTorch's objects
    return scaled_dot_product_attention(*arguments, **named)
"""


def test_garbage_is_collected_again_in_the_command() -> None:
    code = (
        "import gc, sys; from replay.cli.device import device_of;"
        "assert 'torch' not in sys.modules;"
        "device_of('cpu'); assert gc.isenabled(); assert gc.get_freeze_count() > 100_000;"
        "gc.disable(); device_of('cpu'); assert not gc.isenabled()"
    )
    subprocess.run([sys.executable, "-c", code], check=True)


def test_what_another_program_holds_is_collected_still() -> None:
    """It runs the command in its own process, and had imported PyTorch before."""
    code = (
        "import gc, torch; from replay.cli.device import device_of;"
        "device_of('cpu'); assert gc.get_freeze_count() == 0"
    )
    subprocess.run([sys.executable, "-c", code], check=True)


def test_garbage_is_collected_again_in_a_worker(
    run_cli: RunCli, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    Path("mine.py").write_text(KERNEL)
    shape = ("--random", "-sq", "16", "-hq", "1", "-d", "16", "--dtype", "float32")
    quick = ("--rounds", "1", "--max-seconds", "0.01", "--device", "cpu", "--check")
    assert run_cli(*shape, *quick, "--kernels", "mine.py:collected")[0] == 0
    assert gc.isenabled()


def test_there_is_one_processor() -> None:
    with pytest.raises(UsageError, match="there is one"):
        device_of("cpu:1")
