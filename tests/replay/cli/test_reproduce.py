"""`replay reproduce` writes scripts that show planted faults without this project."""

import shutil
import site
import subprocess
import sys
from itertools import chain
from pathlib import Path
from typing import Any

import pytest

from capture.cli.main import main as capture
from capture.storage.dataset import load
from replay.reproduce import kernel_call
from replay.workloads.recorded import from_directory
from tests.factories import random_call, save_calls
from tests.in_this_process import RunCli, exit_code, refusal

PLANTED = Path(__file__).parents[1] / "reproduce" / "planted.py"
ALONE = f"""
import runpy, sys
try:
    import replay
except ImportError:
    sys.path += {site.getsitepackages()!r}
    sys.argv = ["reproduce.py"]
    runpy.run_path("reproduce.py", run_name="__main__")
sys.exit("this project can be imported")
"""
"""Program that runs a script without the paths of editable installations."""


@pytest.fixture
def recorded(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A directory with one call, next to the kernels' file."""
    monkeypatch.chdir(tmp_path)
    shutil.copyfile(PLANTED, "planted.py")
    Path("factors.py").write_text("WRONG_FACTOR = 1.5\n")
    origin = {"model": "[x](http://y)", "module": "a\n\n# b\ud800"}
    call = random_call(batch=2, q_heads=4, kv_heads=2, kv_len=21, with_output=True, origin=origin)
    return save_calls(tmp_path / "recorded", [call])


def command(kernel: str, *others: str) -> tuple[str, ...]:
    """Return the command's arguments with some of them replaced."""
    given = {"--dir": "recorded", "--call": "model-000000", "--kernel": kernel, "--out": "bug"}
    given |= {"--device": "cpu"} | dict(zip(others[::2], others[1::2], strict=True))
    return ("reproduce", *chain.from_iterable(given.items()))


def run_alone() -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-I", "-S", "-c", ALONE],
        cwd="bug",
        capture_output=True,
        text=True,
        check=False,
    )


@pytest.mark.slow
@pytest.mark.usefixtures("recorded")
def test_wrong_head_is_shown_alone(run_cli: RunCli, capsys: pytest.CaptureFixture[str]) -> None:
    code, out, err = run_cli(*command("planted.py:head"))
    assert (code, err) == (0, "")
    seen, written = out.splitlines()
    assert seen.startswith("planted.py:head: inaccurate: ")
    assert written.startswith("bug: ")
    (call,) = load("bug")
    assert call.shape[:5] == (1, 2, 1, 1, 1)
    assert call.output is not None
    assert "recomputed" in call.origin.derived
    alone = run_alone()
    assert (alone.returncode, alone.stderr) == (1, ""), alone.stdout
    assert "FAILS" in alone.stdout
    assert "worst row: batch 0, head 1, query 0" in alone.stdout
    Path("bug/kernel/factors.py").write_text("WRONG_FACTOR = 1.0\n")
    mended = run_alone()
    assert mended.returncode == 0
    assert mended.stdout.endswith("does not fail\n")
    for option, text in (("show", "(derived: sequence"), ("check", "; derived: sequence")):
        assert exit_code(capture, option, "bug") == 0
        assert text in " ".join(capsys.readouterr().out.split())
    page = Path("bug/README.md").read_text()
    assert "recorded from `[x](http://y)` (`a  # b`): " in page
    headings = [line for line in page.splitlines() if line.startswith("#")]
    assert headings == ["# planted.py:head: inaccurate"]


@pytest.mark.slow
@pytest.mark.usefixtures("recorded")
def test_crash_is_shown_even_if_the_search_has_no_time(run_cli: RunCli) -> None:
    """Every trial that crashes costs a new worker."""
    code, out, err = run_cli(*command("planted.py:crash", "--max-seconds", "0.001"))
    assert (code, err) == (0, "")
    assert out.startswith("planted.py:crash: crash: ")
    assert "--max-seconds ended the search" in out
    alone = run_alone()
    assert (alone.returncode, alone.stderr) == (1, "")
    assert "FAILS" in alone.stdout


@pytest.mark.usefixtures("recorded")
def test_kernel_that_does_not_fail_writes_nothing(run_cli: RunCli) -> None:
    code, out, err = run_cli(*command("planted.py:right"))
    assert (code, err) == (1, "")
    assert out.startswith("planted.py:right does not fail on model-000000, it is ok")
    assert not Path("bug").exists()


def test_kernel_of_pytorch_needs_no_file(recorded: Path, tmp_path: Path) -> None:
    said: list[dict[str, Any]] = []
    source = from_directory(recorded)[0][0].source.to_json()
    request = {"kernel": "torch-math", "workload": source, "device": "cpu"}
    asked = {**request, "stored": str(tmp_path / "stored")}
    kernel_call.handle(asked, lambda **message: said.append(message), lambda: {})
    call = said[-1]["call"]
    assert (call["imports"], call["library"], call["adapter"]) == ([], "", "")
    assert "SDPBackend.MATH" in call["lines"][0]


@pytest.mark.slow
@pytest.mark.usefixtures("recorded")
def test_files_of_our_adapters_are_copied(run_cli: RunCli, monkeypatch: pytest.MonkeyPatch) -> None:
    """The kernel fails, because the limits are very strict."""
    monkeypatch.setenv("TRITON_INTERPRET", "1")
    Path("strict.toml").write_text("[exact]\nrounding_factor = 1e-9\nsame_dtype_factor = 1e-9\n")
    given = ("--tolerances", "strict.toml", "--max-seconds", "0.001")
    code, _, err = run_cli(*command("triton-fa2", *given))
    assert (code, err) == (0, "")
    ours = {str(path.relative_to("bug/kernel")) for path in Path("bug/kernel").rglob("*.py")}
    assert ours >= {"replay/kernels/registry.py", "attention_kernels/portable/prefill.py"}
    monkeypatch.delenv("TRITON_INTERPRET")
    assert run_alone().returncode == 1


@pytest.mark.usefixtures("recorded")
def test_wrong_arguments_are_one_sentence(run_cli: RunCli) -> None:
    Path("full").mkdir()
    Path("full/file").touch()
    for changed, sentence in (
        (("--out", "full"), "--out full is not empty: name another directory\n"),
        (("--out", "no/where"), "cannot write --out no/where (No such file or directory)"),
        (("--out", "planted.py"), "cannot write --out planted.py (Not a directory)"),
        (("--call", "other"), "no call 'other' was recorded: "),
        (("--kernel", "planted.py:hea"), "no kernel 'planted.py:hea': "),
        (("--env", "x"), "--env x: write NAME=PATH/TO/python"),
    ):
        err = refusal(run_cli, *command("planted.py:right", *changed))
        assert err.startswith(f"replay reproduce: {sentence}")
