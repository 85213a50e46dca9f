"""Every option of `capture` is used or refused, whatever else is given."""

from __future__ import annotations

import argparse
from collections.abc import Callable
from pathlib import Path

import pytest

from capture.cli import main
from capture.cli.combinations import OF_EVERY_JOB, misuse
from tests.noted_options import Noted, ignored

Run = Callable[..., tuple[int, str, str]]

MODEL = """
import torch
from torch import nn
from torch.nn.functional import scaled_dot_product_attention


class Attention(nn.Module):
    def forward(self, states):
        return scaled_dot_product_attention(states, states, states)


def build():
    attention = Attention()
    return attention, lambda: attention(torch.randn(1, 2, 5, 8))
"""

JOBS = {
    "model": ("--model", "my.py:build", "--overwrite"),
    "show": ("--show", "captured_inputs"),
    "statistics": ("--show", "captured_inputs", "--stats"),
    "verify": ("--verify", "captured_inputs"),
    "repair": ("--repair", "captured_inputs"),
}


@pytest.mark.parametrize("job", JOBS)
def test_no_job_ignores_an_option(
    run_cli: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, job: str
) -> None:
    def checked(arguments: argparse.Namespace) -> str:
        wrong = misuse(arguments)
        Noted.read = set(OF_EVERY_JOB)
        return wrong

    (tmp_path / "my.py").write_text(MODEL)
    monkeypatch.chdir(tmp_path)
    assert run_cli(*JOBS["model"])[0] == 0
    monkeypatch.setattr(main, "misuse", checked)
    with monkeypatch.context() as patch:
        patch.setattr(argparse, "Namespace", Noted)
        code, _, err = run_cli(*JOBS[job])
    assert code == 0, err
    read = {*Noted.read}
    assert "show" in read
    assert ignored(main._parser(), read, JOBS[job][:2], misuse) == []


@pytest.mark.parametrize("option", ["--max 10", "--heads 0", "--overwrite", "--dtype bf16"])
@pytest.mark.parametrize("job", ["--show", "--verify", "--repair"])
def test_what_is_recorded_is_no_matter_of_looking_at_it(
    run_cli: Run, job: str, option: str
) -> None:
    """Not even where the value is the default one."""
    code, out, err = run_cli(job, "x", *option.split())
    assert (code, out) == (2, "")
    assert f"{option.split()[0]} is about what is recorded: give --model, or leave it out" in err
    assert err.count("\n") == 1
