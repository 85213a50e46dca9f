"""Tests of the options of every verb: their number, their declaration and their use."""

import ast
import importlib
import inspect
import re
from collections import Counter
from dataclasses import fields
from pathlib import Path

import pytest

from capture.command_line import run_options
from replay import cli
from replay.api.call_choices import RandomCalls, RecordedCalls, SuiteCalls
from replay.api.choices import MeasureChoice, RunPlace
from replay.api.recorded_models import ModelRequest
from replay.cli import files, replayed, requests
from replay.cli.main import DEFAULT, VERBS
from replay.cli.shared_options import OPTIONS
from tests.in_this_process import RunCli, refusal
from tests.noted_options import options

ALL = {"": DEFAULT, **VERBS}
COMMON = ("quiet", "verbose", "debug")
"""Options of all verbs, which are not counted."""
MOST = 27
OTHER_MEANINGS = {"--out", "--checks", "--budget"}
"""Options whose meaning differs between verbs: files written or read, and limits."""
CHOICES = (RecordedCalls, RandomCalls, SuiteCalls, MeasureChoice, RunPlace, ModelRequest)
"""Dataclasses whose fields are read from arguments of the same names."""
SHARED = "".join(map(inspect.getsource, (files, requests, replayed, run_options)))


@pytest.mark.parametrize("verb", ALL)
def test_verb_has_few_options_and_reads_each(verb: str) -> None:
    module = importlib.import_module(ALL[verb])
    declared = [action.dest for action in options(module.parser())]
    found = [name for name in declared if name not in COMMON]
    assert len(found) == len(declared) - len(COMMON) <= MOST
    assert not module.parser().allow_abbrev
    source = inspect.getsource(module) + SHARED
    chosen = {field.name for choice in CHOICES for field in fields(choice)}
    for name in {*found} - chosen:
        assert re.search(rf"arguments\.{name}\b|\"{name}\"", source), name


@pytest.mark.parametrize("verb", ALL)
def test_help_fits_60_lines(run_cli: RunCli, monkeypatch: pytest.MonkeyPatch, verb: str) -> None:
    monkeypatch.setenv("COLUMNS", "100")
    code, out, _ = run_cli(*filter(None, [verb]), "--help")
    lines = out.splitlines()
    assert code == 0
    assert len(lines) <= 60
    assert max(map(len, lines)) <= 100
    assert max(map(len, out.split("\n\n")[1].splitlines())) <= 85
    if not verb:
        examples = out.partition("examples:\n")[2].partition("\n\n")[0]
        assert len(examples.splitlines()) == 5
        assert all(re.search(rf"\b{name}\b", out) for name in VERBS)


def test_option_is_declared_once() -> None:
    declared = Counter([*OPTIONS])
    for path in Path(cli.__file__).parent.glob("*.py"):
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            if isinstance(node, ast.Call) and getattr(node.func, "attr", "") == "add_argument":
                names = [arg.value for arg in node.args if isinstance(arg, ast.Constant)]
                declared.update(name for name in map(str, names) if name.startswith("--"))
    twice = {name for name, count in declared.items() if count > 1}
    assert twice <= OTHER_MEANINGS


@pytest.mark.parametrize(
    ("flag", "verbs"),
    [
        ("--random", "`replay random`"),
        ("--trust-code", "`replay verify`"),
        ("--dtype", "`replay foretell` or `replay random` or `replay suite` or `replay tune`"),
    ],
)
def test_option_of_a_verb_names_the_verb(run_cli: RunCli, flag: str, verbs: str) -> None:
    err = refusal(run_cli, "--dir", "recorded", f"{flag}=x")
    assert err == f"replay: unknown option {flag}: use {verbs}\n"
