"""`replay reproduce` writes scripts that show planted faults without this project."""

from __future__ import annotations

import errno
import shutil
import site
import subprocess
import sys
from collections.abc import Callable
from dataclasses import replace
from itertools import chain
from pathlib import Path
from typing import NamedTuple

import pytest

from capture.cli.main import main as capture
from capture.storage.call_file import PackedCall
from capture.storage.dataset import Dataset, load
from tests.factories import random_call

RunCli = Callable[..., tuple[int, str, str]]
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


class Planted(NamedTuple):
    """Smallest failing part of a call with B 2, 4 query heads, 2 key heads, Sq 9 and Sk 21."""

    status: str
    shape: tuple[int, ...]
    is_derived: bool = True


FAULTS = {
    "head": Planted("inaccurate", (1, 2, 1, 1, 1)),
    "row": Planted("inaccurate", (1, 2, 1, 6, 1)),
    "key_block": Planted("inaccurate", (1, 2, 1, 1, 17)),
    "odd_length": Planted("error", (1, 2, 1, 1, 1)),
    "crash": Planted("crash", (1, 2, 1, 1, 17)),
}


@pytest.fixture
def recorded(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A directory with one call, next to the kernels' file."""
    monkeypatch.chdir(tmp_path)
    shutil.copyfile(PLANTED, "planted.py")
    Path("factors.py").write_text("WRONG_FACTOR = 1.5\n")
    directory = tmp_path / "recorded"
    directory.mkdir()
    call = random_call(
        batch=2, q_heads=4, kv_heads=2, kv_len=21, with_output=True, origin={"module": "layers.0"}
    )
    entry = PackedCall.of(call).write(directory / "model-000000.safetensors")
    Dataset(directory, [entry], []).save_manifest()
    return directory


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
@pytest.mark.parametrize("fault", FAULTS)
@pytest.mark.usefixtures("recorded")
def test_planted_fault_is_shown_without_this_project(
    run_cli: RunCli, capsys: pytest.CaptureFixture[str], fault: str
) -> None:
    planted = FAULTS[fault]
    code, out, err = run_cli(*command(f"planted.py:{fault}"))
    assert (code, err) == (0, "")
    seen, written = out.splitlines()
    assert seen.startswith(f"planted.py:{fault}: {planted.status}: ")
    assert written.startswith("bug: ")
    (call,) = load("bug")
    assert call.shape[:5] == planted.shape
    assert call.output is not None
    assert ("recomputed" in call.origin.derived) == planted.is_derived
    alone = run_alone()
    assert alone.returncode == 1, alone.stdout + alone.stderr
    assert "FAILS" in alone.stdout
    assert not alone.stderr
    assert f"planted.py:{fault}: {planted.status}" in Path("bug/README.md").read_text()
    if fault == "head":
        assert "worst row: batch 0, head 1, query 0" in alone.stdout
        Path("bug/kernel/factors.py").write_text("WRONG_FACTOR = 1.0\n")
        mended = run_alone()
        assert mended.returncode == 0
        assert mended.stdout.endswith("does not fail\n")
        for option, text in (("show", "(derived: sequence"), ("check", "; derived: sequence")):
            with pytest.raises(SystemExit) as ended:
                capture([option, "bug"])
            assert ended.value.code == 0
            assert text in " ".join(capsys.readouterr().out.split())


@pytest.mark.usefixtures("recorded")
def test_kernel_that_does_not_fail_writes_nothing(run_cli: RunCli) -> None:
    code, out, err = run_cli(*command("planted.py:right"))
    assert (code, err) == (1, "")
    assert out.startswith("planted.py:right does not fail on model-000000, it is ok")
    assert not Path("bug").exists()


@pytest.mark.slow
@pytest.mark.usefixtures("recorded")
def test_kernels_of_pytorch_need_no_file(run_cli: RunCli) -> None:
    """Every kernel fails, because the limits are very strict, and the search is short."""
    Path("strict.toml").write_text("[exact]\nrounding_factor = 1e-9\nsame_dtype_factor = 1e-9\n")
    given = ("--tolerances", "strict.toml", "--max-seconds", "0.001")
    code, out, err = run_cli(*command("torch-math", *given))
    assert (code, err) == (0, "")
    assert "--max-seconds ended the search" in out
    assert not Path("bug/kernel").exists()
    assert "SDPBackend.MATH" in Path("bug/reproduce.py").read_text()
    assert run_alone().returncode == 1


@pytest.mark.slow
@pytest.mark.parametrize("kernel", ["triton-fa2", "flex"])
@pytest.mark.usefixtures("recorded")
def test_files_of_our_adapters_are_copied(
    run_cli: RunCli, monkeypatch: pytest.MonkeyPatch, kernel: str
) -> None:
    if kernel == "triton-fa2":
        monkeypatch.setenv("TRITON_INTERPRET", "1")
    Path("strict.toml").write_text("[exact]\nrounding_factor = 1e-9\nsame_dtype_factor = 1e-9\n")
    given = ("--tolerances", "strict.toml", "--max-seconds", "1")
    code, _, err = run_cli(*command(kernel, *given))
    assert (code, err) == (0, "")
    ours = {str(path.relative_to("bug/kernel")) for path in Path("bug/kernel").rglob("*.py")}
    assert "replay/kernels/registry.py" in ours
    assert ("attention_kernels/portable/prefill.py" in ours) == (kernel == "triton-fa2")
    monkeypatch.delenv("TRITON_INTERPRET", raising=False)
    assert run_alone().returncode == 1


@pytest.mark.slow
def test_names_of_a_recording_are_escaped_in_markdown(
    run_cli: RunCli, recorded: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    call = random_call(kv_len=21, with_output=True, origin={"module": "a\n\n# b\ud800"})
    call = replace(call, origin=replace(call.origin, model="[x](http://y)"))
    entry = PackedCall.of(call).write(recorded / "model-000000.safetensors")
    Dataset(recorded, [entry], []).save_manifest()
    monkeypatch.setattr("replay.reproduce.reproducer._check_script", lambda *_: None)
    assert run_cli(*command("planted.py:key_block"))[0] == 0
    text = Path("bug/README.md").read_text()
    assert "recorded from `[x](http://y)` (`a  # b`): " in text
    assert [line for line in text.splitlines() if line.startswith("#")] == [
        "# planted.py:key_block: inaccurate"
    ]


@pytest.mark.usefixtures("recorded")
def test_write_protected_place_is_refused_first(
    run_cli: RunCli, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(**_: object) -> str:
        raise PermissionError(errno.EACCES, "Permission denied")

    monkeypatch.setattr("replay.reproduce.reproducer.tempfile.mkdtemp", refuse)
    code, out, err = run_cli(*command("planted.py:right"))
    assert (code, out) == (2, "")
    assert (
        err
        == "replay reproduce: cannot write --out bug (Permission denied): name another directory\n"
    )


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
        code, out, err = run_cli(*command("planted.py:right", *changed))
        assert (code, out) == (2, "")
        assert err.startswith(f"replay reproduce: {sentence}")
