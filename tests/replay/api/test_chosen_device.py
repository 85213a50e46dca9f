"""Importing PyTorch without garbage collection does not affect later code."""

from __future__ import annotations

import subprocess
import sys

import pytest

from replay.api.chosen_device import ChoiceError, device_of


def test_garbage_is_collected_again_in_the_command() -> None:
    code = (
        "import gc, sys; from replay.api.chosen_device import device_of;"
        "assert 'torch' not in sys.modules;"
        "device_of('cpu'); assert gc.isenabled();"
        "gc.disable(); device_of('cpu'); assert not gc.isenabled()"
    )
    subprocess.run([sys.executable, "-c", code], check=True)


def test_there_is_one_processor() -> None:
    with pytest.raises(ChoiceError, match="there is one"):
        device_of("cpu:1")
