"""Each verb has help, and no verb ignores an option."""

import argparse
import importlib
from pathlib import Path

import pytest

from capture.cli.verbs import RECORD, VERBS
from tests.capture.cli.test_main import USER_MODEL
from tests.in_this_process import RunCli
from tests.noted_options import Noted, options

ALL_VERBS = {"record": RECORD, **VERBS}
GIVEN = {
    "record": ("--model", "my.py:build", "--overwrite"),
    "show": ("captured_inputs",),
    "check": ("captured_inputs",),
    "repair": ("captured_inputs",),
    "share": ("captured_inputs", "--to", "copy"),
}


@pytest.mark.parametrize("verb", ALL_VERBS)
def test_help_is_short(run_cli: RunCli, monkeypatch: pytest.MonkeyPatch, verb: str) -> None:
    narrow = run_cli(verb, "--help")[1].partition("examples:")[0]
    assert max(map(len, narrow.splitlines())) <= 80
    monkeypatch.setenv("COLUMNS", "100")
    code, printed, _ = run_cli(verb, "--help")
    lines = printed.splitlines()
    assert code == 0
    assert len(lines) <= 60
    assert max(map(len, lines)) <= 100
    assert verb == "record" or printed.startswith(f"usage: capture {verb} DIR")
    parser = importlib.import_module(ALL_VERBS[verb]).parser()
    assert len(options(parser)) <= 30


def test_help_of_the_command_is_that_of_record_with_five_examples(run_cli: RunCli) -> None:
    printed = run_cli("--help")[1]
    assert printed == run_cli("record", "--help")[1]
    assert printed.partition("examples:\n")[2].count("  capture ") == 5


@pytest.mark.parametrize("verb", ALL_VERBS)
def test_verb_reads_every_option(
    run_cli: RunCli, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, verb: str
) -> None:
    (tmp_path / "my.py").write_text(USER_MODEL)
    monkeypatch.chdir(tmp_path)
    assert run_cli(*GIVEN["record"])[0] == 0
    with monkeypatch.context() as patch:
        patch.setattr(argparse, "Namespace", Noted)
        Noted.read = {"debug"}  # read only when a command fails
        code, _, err = run_cli(verb, *GIVEN[verb])
    assert code == 0, err
    parser = importlib.import_module(ALL_VERBS[verb]).parser()
    unread = {action.dest for action in options(parser)} - Noted.read
    assert unread <= ({"quiet"} if verb == "repair" else set())
