"""Every option of `replay` is used or refused, whatever else is given.

The lists of options are made from the parsers, so that an option added later is in them.
"""

from __future__ import annotations

import argparse
import contextlib
import importlib
import inspect
import re
from collections import Counter
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from replay.cli.combinations import SOURCES, USES, misuse

from replay.cli import main
from replay.cli.compare_kernels import parser
from replay.workloads import random_calls
from tests.in_this_process import RunCli
from tests.noted_options import Noted, ignored, options

SHAPE = ("random", "-hq", "2", "-sq", "16", "-d", "32")
ONE = ("--kernels", "torch-math")
FAST = ("--rounds", "3")

MODES = {
    "random": (SHAPE, (*ONE, *FAST)),
    "recorded": (("--dir", "recorded"), (*ONE, *FAST)),
    "suite": (("suite", "llama"), (*ONE, *FAST)),
    "list": (("kernels",), ()),
    "selftest": (("selftest",), ()),
    "profile": ((*SHAPE, "--once"), ONE),
    "command of a profile": ((*SHAPE, "--ncu"), ONE),
}
"""What chooses a mode, and what else makes it short."""

READ_ANYWAY = ("verbose", "debug", "quiet", "random")
"""Before any mode is chosen, or to choose it; and there may be no progress to keep quiet about."""


@pytest.fixture
def noted(monkeypatch: pytest.MonkeyPatch) -> None:
    """What is read counts from where everything was checked, in runs without workers."""
    check = main.check_early

    def checked(arguments: argparse.Namespace) -> None:
        check(arguments)
        Noted.read = set(READ_ANYWAY)

    def shapes(*_: Any) -> list[random_calls.Spec]:
        return [random_calls.Spec(1, 2, 2, 16, 16, 32, 32)]

    monkeypatch.setattr(argparse, "Namespace", Noted)
    monkeypatch.setattr(main, "check_early", checked)
    monkeypatch.setattr(main, "_first_processes", lambda *_: contextlib.nullcontext([]))
    monkeypatch.setattr(random_calls, "suite", shapes)
    passed = SimpleNamespace(passed=True)
    monkeypatch.setattr("replay.cli.selftest.run_selftest", lambda *_, **__: passed)
    monkeypatch.setattr("replay.report.selftest_table.print_selftest", lambda *_: None)


@pytest.mark.usefixtures("noted")
@pytest.mark.parametrize("mode", MODES)
def test_no_mode_ignores_an_option(
    run_cli: RunCli, recorded: Path, monkeypatch: pytest.MonkeyPatch, mode: str
) -> None:
    monkeypatch.chdir(recorded.parent)
    chosen, short = MODES[mode]
    code, _, err = run_cli(*chosen, *short, "--device", "cpu", "--quiet")
    assert code == 0, err
    read = {*Noted.read}
    assert "device" in read
    assert ignored(parser(), read, chosen, misuse) == []


def test_each_option_says_where_it_is_used() -> None:
    said = Counter(option for use in USES for option in use.options)
    assert set(said.values()) == {1}
    assert said.keys() == {action.dest for action in options(parser())}
    assert all(set(use.sources) <= set(SOURCES) for use in USES)


@pytest.mark.parametrize("name", main.SUBCOMMANDS)
def test_sub_commands_read_their_options(name: str) -> None:
    module = importlib.import_module(main.SUBCOMMANDS[name])
    source = inspect.getsource(module)
    for action in options(module.parser()):
        is_read = re.search(rf"arguments\.{action.dest}\b|\"{action.dest}\"", source)
        assert action.dest == "debug" or is_read, action.dest
