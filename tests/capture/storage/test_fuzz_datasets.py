"""A part of `python -m tests.fuzz_datasets`, with fixed datasets and some new ones."""

import secrets
import subprocess
from collections.abc import Callable

import pytest

from tests.capture.conftest import REPOSITORY


@pytest.mark.timeout(200)
def test_harmed_datasets_cost_nothing_but_a_sentence(
    start_python: Callable[..., subprocess.Popen[str]],
) -> None:
    seeds = ("0", str(secrets.randbits(32)))
    command = ("-m", "tests.fuzz_datasets", "--count", "75", "--seed", *seeds)
    process = start_python(*command, cwd=REPOSITORY)
    out, err = process.communicate()
    assert process.returncode == 0, out + err
    assert "0 failures" in out
