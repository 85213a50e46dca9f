"""Stdout contains only rows, even if kernels print."""

import importlib
import io
import os
import subprocess
import sys

import pytest

from replay.cli.compare_kernels import parser
from replay.cli.files import DIRECTORIES, STDOUT, WRITTEN_FILES
from replay.cli.main import VERBS
from replay.cli.stdout import reserved_stdout
from tests.noted_options import options


def make_noise() -> None:
    print("python")
    os.write(1, b"compiled code\n")
    subprocess.run([sys.executable, "-c", "print('child')"], check=True)


def test_output_of_kernels_goes_to_stderr(capfd: pytest.CaptureFixture[str]) -> None:
    print("before")
    with reserved_stdout() as stdout:
        make_noise()
        stdout.write("row\n")
        make_noise()
    print("after")
    out, err = capfd.readouterr()
    assert out == "before\nrow\nafter\n"
    for noise in ("python", "compiled code", "child"):
        assert err.count(f"{noise}\n") == 2


def test_stdout_outlives_a_kernel_that_closes_it(capfd: pytest.CaptureFixture[str]) -> None:
    with reserved_stdout() as stdout:
        os.close(1)
        stdout.write("row\n")
    print("after")
    assert capfd.readouterr().out == "row\nafter\n"


def test_stream_that_a_kernel_closes_opens_for_the_next(capfd: pytest.CaptureFixture[str]) -> None:
    with reserved_stdout() as stdout:
        for stream in (sys.stdout, sys.stderr):
            stream.close()
            with stream:
                print("noise")
        stdout.write("row\n")
    print("after")
    out, err = capfd.readouterr()
    assert out == "row\nafter\n"
    assert err == "noise\n" * 2


def test_text_that_cannot_be_encoded_is_escaped(capfd: pytest.CaptureFixture[str]) -> None:
    with reserved_stdout() as stdout:
        stdout.write("half a letter \udc80\n")
    assert capfd.readouterr().out == "half a letter \\udc80\n"


def test_stdout_without_a_descriptor_is_used_unchanged(monkeypatch: pytest.MonkeyPatch) -> None:
    notebook = io.StringIO()
    monkeypatch.setattr(sys, "stdout", notebook)
    with reserved_stdout() as stdout:
        print("noise")
        stdout.write("row\n")
    assert notebook.getvalue() == "row\n"


def test_file_to_write_may_be_stdout_by_any_of_its_names() -> None:
    commands = [importlib.import_module(module).parser() for module in VERBS.values()]
    found = set()
    for action in (action for each in (parser(), *commands) for action in options(each)):
        if "- for stdout" in (action.help or ""):
            assert callable(action.type)
            assert {action.type(name) for name in STDOUT} == {"-"}
            assert action.type("file") == "file"
            found.add(action.dest)
    assert found == {*WRITTEN_FILES} - {*DIRECTORIES}
