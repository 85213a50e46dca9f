"""Exit codes and messages of the command, and processes that are interrupted."""

import json
import re
import signal
import subprocess
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from capture import load
from capture.cli.file_checks import check_files
from capture.errors import RecordingWarning
from tests.capture.storage.captures import alter

Run = Callable[..., tuple[int, str, str]]
Start = Callable[..., "subprocess.Popen[str]"]

USER_MODEL = """
import os
import signal
import sys
import time
import torch
import torch.nn.functional as F
from torch import nn


class Attention(nn.Module):
    def forward(self, states):
        return F.scaled_dot_product_attention(states, states, states.clone())


def build():
    attention = Attention()
    return attention, lambda: [attention(torch.randn(1, 2, 5, 8)) for _ in range(4)]


class Holding(nn.Module):
    def __init__(self):
        super().__init__()
        self.seen, self.held = Attention(), HeldAttention()

    def forward(self, states):
        return self.held(self.seen(states))


class HeldAttention(nn.Module):
    functions = {"sdpa": F.scaled_dot_product_attention}

    def forward(self, states):
        return self.functions["sdpa"](states, states, states)


def holding():
    model = Holding()
    return model, lambda: model(torch.randn(1, 2, 5, 8))


def slow():
    attention = Attention()

    def run():
        for index in range(10_000):
            attention(torch.randn(1, 2, 64, 64))
            if index == 50:
                os.chdir("/")
                print("RUNNING", flush=True)
            time.sleep(0.002)

    return attention, run


class Refused(nn.Module):
    def forward(self, x):
        F.scaled_dot_product_attention(x, x, x, scale=float("inf"))
        return F.scaled_dot_product_attention(x, x, x)


def refused():
    model = Refused()
    return model, lambda: (model(torch.randn(1, 2, 5, 8)), print("AFTER", file=sys.stderr))


def raising(error):
    def run():
        raise error

    return run


def after_a_call(end):
    attention = Attention()
    return attention, lambda: (attention(torch.randn(1, 2, 5, 8)), end())


def broken():
    return Attention(), raising(ZeroDivisionError("by nought"))


def interrupted_early():
    return Attention(), raising(KeyboardInterrupt())


def terminated_early():
    return Attention(), lambda: signal.raise_signal(signal.SIGTERM)


class Own(BaseException):
    pass


class Speechless(Exception):
    def __str__(self):
        raise RuntimeError("no text")


def exits():
    return after_a_call(lambda: sys.exit(3))


def own():
    return after_a_call(raising(Own("mine")))


def speechless():
    return after_a_call(raising(Speechless()))


def silent():
    return nn.Linear(2, 2), lambda: None
"""


@pytest.fixture(scope="module")
def model_file(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("user") / "my.py"
    path.write_text(USER_MODEL)
    return path


@pytest.mark.parametrize(("arguments", "code"), [(["--help"], 0), (["show", "nowhere"], 2)])
def test_command_that_needs_no_torch_imports_none(
    start_python: Start, arguments: list[str], code: int, tmp_path: Path
) -> None:
    script = (
        "import sys, capture.cli.main\n"
        "try:\n"
        "    capture.cli.main.main(sys.argv[1:])\n"
        "finally:\n"
        "    assert not {'torch', 'numpy', 'rich'} & sys.modules.keys()\n"
    )
    process = start_python("-c", script, *arguments, cwd=tmp_path)
    _, errors = process.communicate(timeout=200)
    assert process.returncode == code, errors


@pytest.mark.parametrize(
    ("arguments", "sentence"),
    [
        ([], "--model is required"),
        (["--max", "0", "--model", "llama"], "must be an integer of at least 1, not 0"),
        (["--max", "many", "--model", "llama"], "must be an integer of at least 1, not many"),
        (["--steps", "-1", "--model", "llama"], "must be an integer of at least 1, not -1"),
        (["--set", "=3", "--model", "llama"], "must be NAME=VALUE, not '=3'"),
        (["--set", "height", "--model", "llama"], "must be NAME=VALUE, not 'height'"),
        (["--max-bytes", "lots"], "invalid size 'lots' (must be such as 500M or 20G)"),
        (["--max-bytes", "inf"], "invalid size 'inf'"),
        (["--max-bytes", "0"], "invalid size '0'"),
        (["--max", "per-layer", "--sample", "first", "--model", "llama"], "needs sample spread"),
        (["--sample", "random"], "spread, hard, first or every:N (N at least 1), not 'random'"),
        (["--rank", "-1", "--model", "llama"], "must be an integer of at least 0, not -1"),
        (["--modle", "llama"], "unknown option --modle: did you mean --modules or --model?"),
        (["--overw"], "unknown option --overw: did you mean --overwrite"),
        (["shwo", "a"], "unknown verb 'shwo': did you mean show?"),
        (["show", "a", "--max", "10"], "unknown option --max"),
    ],
)
def test_wrong_usage(run_cli: Run, arguments: list[str], sentence: str) -> None:
    code, out, err = run_cli(*arguments)
    assert (code, out) == (2, "")
    assert sentence in err
    assert re.match("capture( show)?: ", err)
    assert err.count("\n") == 1
    assert "_positive" not in err


@pytest.mark.parametrize(
    ("text", "nbytes"),
    [("500M", 500 * 10**6), ("20G", 20 * 10**9), ("1.5k", 1500), ("7", 7), ("2TB", 2 * 10**12)],
)
def test_sizes(text: str, nbytes: int) -> None:
    from capture.command_line.parser import size

    assert size(text) == nbytes


def sentence_of(result: tuple[int, str, str], code: int) -> str:
    """Check the exit code and that stderr has one line; return it, with N for a line of a file."""
    got, out, err = result
    lines = [line for line in err.splitlines() if line.startswith("capture: ")]
    assert (got, out) == (code, "")
    assert len(lines) == 1, err
    assert "Traceback" not in err
    return re.sub(r", line \d+", ", line N", lines[0].removeprefix("capture: "))


@pytest.mark.parametrize("below", ["file", "file/x"])
def test_directory_that_cannot_be_written(run_cli: Run, tmp_path: Path, below: str) -> None:
    (tmp_path / "file").write_text("")
    result = run_cli("--model", "llama", "--out", str(tmp_path / below))
    assert sentence_of(result, 2).endswith("choose another with --out")


def test_parts_of_calls_that_no_rank_shares_are_refused_first(run_cli: Run, tmp_path: Path) -> None:
    for given, said in (
        (("--split", "heads", "--heads", "0"), "leave out --heads or --split"),
        (("--split", "queries", "--rank", "1"), "start them with torchrun"),
    ):
        result = run_cli("--model", "no such model", "--out", str(tmp_path / "out"), *given)
        assert said in sentence_of(result, 2)


def test_missed_attention_is_printed(run_cli: Run, tmp_path: Path, model_file: Path) -> None:
    command = ("--model", f"{model_file}:holding", "--out", str(tmp_path / "out"))
    code, printed, errors = run_cli(*command)
    assert code == 0
    assert printed.startswith("recorded 1 of 1 attention call")
    missed = "missed, and not in the census: 1 run of 1 module of class HeldAttention"
    assert f"kept of the eligible calls: 1 of 1; {missed}" in errors
    assert errors.count("HeldAttention") == 1


def test_user_s_function_and_one_name_twice(run_cli: Run, tmp_path: Path, model_file: Path) -> None:
    out = str(tmp_path / "out")
    command = ("--model", f"{model_file}:build", "--out", out, "--max", "3")
    code, printed, _ = run_cli(*command)
    assert code == 0
    assert printed == f"recorded 3 of 4 attention calls (3.8 kB) in {out}/\n"
    assert len(load(out)) == 3
    again = run_cli(*command)
    assert "already contains a capture of" in sentence_of(again, 2)
    assert "--overwrite" in sentence_of(again, 2)
    code, _, _ = run_cli(*command, "--overwrite", "--no-output", "--sample", "first")
    assert code == 0
    assert [call.output for call in load(out)] == [None] * 3
    code, _, _ = run_cli(*command, "--rank", "5")
    assert code == 0
    assert [call.origin.rank for call in load(out)] == [None] * 3 + [5] * 3


def test_quiet_and_verbose(run_cli: Run, tmp_path: Path, model_file: Path) -> None:
    out = str(tmp_path / "two words")
    command = ("--model", f"{model_file}:build", "--out", out, "--overwrite")
    *_, err = run_cli(*command)
    assert err.startswith("my.py:build: size unknown before the run\nweights: ")
    assert err.endswith(f" these calls through the default kernels: replay --dir '{out}'\n")
    quiet = run_cli(*command, "--quiet", "--max-bytes", "3k")
    assert quiet[2].startswith("reached --max-bytes")
    assert len(quiet[2].splitlines()) == 1
    assert quiet[1].startswith("recorded 2 of 4")
    *_, err = run_cli(*command, "--verbose")
    for said in ("loaded my.py:build", "4 calls seen, 4 kept", "stored "):
        assert re.search(rf"^ +[\d.]+ s  .*{said}", err, re.MULTILINE), err


@pytest.fixture
def _default_sigterm() -> Iterator[None]:
    """Set Python's own handler of SIGTERM, which Ray replaces."""
    before = signal.signal(signal.SIGTERM, signal.SIG_DFL)
    yield
    signal.signal(signal.SIGTERM, before)


@pytest.mark.usefixtures("_default_sigterm")
@pytest.mark.parametrize(
    ("function", "options", "code", "said"),
    [
        ("broken", ["--modules", "attn*"], 2, "no module matches 'attn*'; available: "),
        ("build", ["--max-bytes", "1k"], 2, "no call fits in --max-bytes; increase it"),
        ("build", ["--heads", "99"], 2, "choose others with --heads"),
        ("silent", [], 2, "no attention call was seen"),
        ("broken", [], 1, "ZeroDivisionError: by nought (my.py, line N; traceback with --debug)"),
        ("absent", [], 2, "has no function 'absent'"),
        ("interrupted_early", [], 130, "interrupted; nothing was recorded"),
        ("terminated_early", [], 143, "interrupted; nothing was recorded"),
    ],
)
def test_runs_that_keep_nothing(
    run_cli: Run,
    tmp_path: Path,
    model_file: Path,
    function: str,
    options: list[str],
    code: int,
    said: str,
    recwarn: pytest.WarningsRecorder,
) -> None:
    out = tmp_path / "out"
    result = run_cli("--model", f"{model_file}:{function}", "--out", str(out), *options)
    assert not [each for each in recwarn if each.category is RecordingWarning]  # printed only once
    assert said in sentence_of(result, code)
    assert not out.exists()


@pytest.mark.parametrize(
    ("function", "code", "said"),
    [
        ("own", 1, "failed with Own: mine (my.py, line N; traceback with --debug)"),
        ("speechless", 1, "failed with Speechless (my.py, line N; traceback with --debug)"),
        ("exits", 2, "the run of exits in {file} ended in SystemExit: 3"),
    ],
)
def test_models_exception_is_a_sentence_and_its_calls_are_kept(
    run_cli: Run, tmp_path: Path, model_file: Path, function: str, code: int, said: str
) -> None:
    out = tmp_path / "out"
    result = run_cli("--model", f"{model_file}:{function}", "--out", str(out))
    kept = f"; calls already in {out} are readable"
    assert sentence_of(result, code) == said.format(file=model_file) + kept
    assert len(load(out)) == 1


def test_failure_claims_no_earlier_calls(run_cli: Run, tmp_path: Path, model_file: Path) -> None:
    out = tmp_path / "out"
    run_cli("--model", f"{model_file}:build", "--out", str(out))
    for function, code in (("broken", 1), ("absent", 2), ("build", 2)):
        result = run_cli("--model", f"{model_file}:{function}", "--out", str(out))
        assert "calls already in" not in sentence_of(result, code)


def test_problem_is_shown_once_and_at_once(run_cli: Run, tmp_path: Path, model_file: Path) -> None:
    out = tmp_path / "out"
    code, _, err = run_cli("--model", f"{model_file}:refused", "--out", str(out))
    told = [line for line in err.splitlines() if "cannot be stored: scale inf" in line]
    assert (code, len(told)) == (1, 1)
    assert err.index(told[0]) < err.index("AFTER")


def test_debug_shows_the_traceback(model_file: Path, tmp_path: Path) -> None:
    from capture.cli.main import main

    command = ["--model", f"{model_file}:broken", "--out", str(tmp_path), "--debug"]
    with pytest.raises(ZeroDivisionError, match="by nought"):
        main(command)


def test_brackets_in_a_name_are_printed(run_cli: Run, tmp_path: Path) -> None:
    directory = tmp_path / "[red]x[/blue]"
    directory.mkdir(parents=True)
    (directory / "my.py").write_text(USER_MODEL)
    command = ("--model", f"{directory}/my.py:build", "--out", str(tmp_path / "out"))
    code, _, err = run_cli(*command)
    assert code == 0, err
    assert "[red]x[/blue]" in err.replace("\n", "")


@pytest.mark.parametrize("option", ["show", "check"])
def test_looking_at_what_is_not_there(run_cli: Run, tmp_path: Path, option: str) -> None:
    assert "no such directory" in sentence_of(run_cli(option, str(tmp_path / "nowhere")), 2)
    (tmp_path / "file").touch()
    told = sentence_of(run_cli(option, str(tmp_path / "file")), 2)
    assert "is a file: give a directory that `capture` wrote, or an archive of one (.zip," in told
    assert "holds no recorded call" in sentence_of(run_cli(option, str(tmp_path)), 2)
    (tmp_path / "manifest.json").write_text('{"format": "attention-replay/9"}')
    assert "this version reads" in sentence_of(run_cli(option, str(tmp_path)), 2)


def test_check_names_what_is_wrong(run_cli: Run, tmp_path: Path, model_file: Path) -> None:
    out = tmp_path / "out"
    run_cli("--model", f"{model_file}:build", "--out", str(out))
    code, printed, _ = run_cli("check", str(out))
    assert (code, printed.splitlines()[-1]) == (0, "4 of 4 files passed")
    altered, missing = sorted(out.glob("*.safetensors"))[:2]
    alter(altered)
    missing.unlink()
    code, printed, _ = run_cli("check", str(out))
    assert code == 1
    # In a pipe, each call takes one line, however long.
    assert printed.splitlines()[:2] == [
        f"FAIL {altered.name}  altered since it was recorded (checksum differs)",
        f"FAIL {missing.name}  missing",
    ]
    assert printed.splitlines()[-1] == "2 of 4 files passed"
    (out / "manifest.json").unlink()
    code, _, err = run_cli("check", str(out))
    assert code == 1
    assert "is missing: the files were read instead" in err


def test_control_c_leaves_a_dataset(start_python: Start, model_file: Path, tmp_path: Path) -> None:
    """The dataset stays readable even though the model has changed the current directory."""
    model = f"{model_file}:slow"
    process = start_python("-m", "capture", "--model", model, "--out", "out", cwd=tmp_path)
    assert any("RUNNING" in line for line in process.stdout)
    process.send_signal(signal.SIGINT)
    _, errors = process.communicate(timeout=200)
    out = tmp_path / "out"
    assert process.returncode == 130
    assert errors.splitlines()[-1] == f"capture: interrupted; calls already in {out} are readable"
    data = load(out)
    assert (data.note, len(data), len(list(out.glob("*.safetensors")))) == ("", 10, 10)
    assert not data.captures[0].complete
    assert data.captures[0].calls_seen >= 51
    assert all(finding.good for finding in check_files(data))


FUNCTION = """
from models.attention import build as build_there


def build():
    import models

    assert models.WHOSE == "the user's"
    model, run = build_there()

    def run_and_import():
        from models.late import LATE

        assert LATE
        return run()

    return model, run_and_import
"""


@pytest.mark.slow
def test_function_imports_its_own_models_package(start_python: Start, tmp_path: Path) -> None:
    package = tmp_path / "models"
    package.mkdir()
    (package / "__init__.py").write_text('WHOSE = "the user\'s"\n')
    (package / "attention.py").write_text(USER_MODEL)
    (package / "late.py").write_text("LATE = True\n")
    (tmp_path / "my.py").write_text(FUNCTION)
    process = start_python("-m", "capture", "--model", "my.py:build", "--out", "x", cwd=tmp_path)
    printed, errors = process.communicate(timeout=200)
    assert process.returncode == 0, errors
    assert printed.startswith("recorded 4 of 4 ")
    manifest = json.loads((tmp_path / "x" / "manifest.json").read_text())
    assert manifest["captures"][0]["model"] == "my.py:build"
