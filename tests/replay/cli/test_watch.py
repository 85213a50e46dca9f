"""Tests of `replay watch`: the watched files, the changes that count, and the output."""

import os
from collections.abc import Callable, Iterator
from contextlib import nullcontext
from pathlib import Path
from types import SimpleNamespace

import pytest

from attention_replay.errors import Error
from replay.api.call_choices import RandomCalls
from replay.api.choices import ReplayRequest, RunPlace
from replay.cli import watch
from replay.cli.watch import Files
from replay.rows.row import Row
from replay.workers import process
from tests.factories import row
from tests.in_this_process import RunCli, refusal

_NO_PROCESSES = nullcontext(SimpleNamespace(prepare=lambda _: None, warm_up=lambda _: None))

REQUEST = ReplayRequest(
    RandomCalls(q_heads=(1,), q_len=(8,), head_dim=(8,)), "mine.py:f", place=RunPlace(timeout=1.0)
)


@pytest.fixture(autouse=True)
def _kernel(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("PYTHONDONTWRITEBYTECODE", "")
    Path("mine.py").write_text("import beside\nimport torch\n")
    Path("beside.py").write_text("from package import tiles\n")
    Path("package").mkdir()
    Path("package/__init__.py").touch()
    Path("package/tiles.py").write_text("")
    Path("unrelated.py").write_text("")


def edits(*steps: Callable[[], object]) -> Callable[[float], None]:
    """Return a `sleep` that performs one step per call, and nothing after the last step."""
    left = iter(steps)

    def sleep(_: float) -> None:
        next(left, lambda: None)()

    return sleep


def write(path: str, text: str) -> Callable[[], object]:
    return lambda: Path(path).write_text(text)


@pytest.mark.parametrize(
    "path", ["mine.py", "beside.py", "package/tiles.py", "package/__init__.py"]
)
def test_change_of_a_kernels_own_file_is_noticed(path: str) -> None:
    sleep = edits(write("unrelated.py", "1"), write(path, "import beside, package.tiles  # new"))
    assert Files([Path("mine.py")]).wait(sleep) == [Path(path).name]


def test_unfinished_file_is_waited_for() -> None:
    looks = []
    more = [write("mine.py", "import beside\n" + "#" * length) for length in range(4)]
    sleep = edits(*more, lambda: looks.append("stable"))
    assert Files([Path("mine.py")]).wait(sleep) == ["mine.py"]
    assert looks == ["stable"]


def test_imports_of_a_broken_file_are_still_watched() -> None:
    files = Files([Path("mine.py")])
    assert files.wait(edits(write("mine.py", "import beside\ndef mine(:"))) == ["mine.py"]
    assert files.wait(edits(write("beside.py", "VALUE = 2"))) == ["beside.py"]


def test_change_during_a_replay_is_noticed() -> None:
    files = Files([Path("mine.py")])
    Path("mine.py").write_text("changed during the replay")
    assert files.wait(edits()) == ["mine.py"]


def test_every_run_is_compared_with_the_one_before(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """A command that fails prints one sentence, and the watch continues."""
    monkeypatch.setattr(process, "first_processes", lambda *_, **__: _NO_PROCESSES)
    monkeypatch.setattr(Files, "wait", lambda self: ["mine.py"])
    runs: Iterator[list[Row] | Exception] = iter(
        [
            [row("mine.py:f", ms=2.0)],
            Error("no function 'f'"),
            [row("mine.py:f", ms=1.0)],
            [row("mine.py:f", status="error", reason="SyntaxError: invalid syntax")],
            KeyboardInterrupt(),  # type: ignore[list-item]
        ]
    )

    def replay(first: process.First) -> list[Row]:
        found = next(runs)
        if isinstance(found, BaseException):
            raise found
        return found

    with pytest.raises(KeyboardInterrupt):
        watch.watch(REQUEST, replay)
    printed = capsys.readouterr()
    lines = [line for line in printed.out.splitlines() if line.startswith("mine.py:f")]
    assert lines == ["mine.py:f: 2 → 1 ms", "mine.py:f: ok → error"]
    assert "replay: no function 'f'\n" in printed.err
    assert os.environ["PYTHONDONTWRITEBYTECODE"] == "1"


def test_wrong_arguments_end_the_watch(monkeypatch: pytest.MonkeyPatch) -> None:
    """Changing the kernel's file cannot correct wrong arguments."""
    monkeypatch.setattr(process, "first_processes", lambda *_, **__: _NO_PROCESSES)
    monkeypatch.setattr(Files, "wait", lambda self: pytest.fail("waits for a change"))

    def replay(first: process.First) -> list[Row]:
        raise Error("nowhere: no such directory")

    with pytest.raises(Error, match="no such directory"):
        watch.watch(REQUEST, replay)


@pytest.mark.parametrize(
    ("given", "sentence"),
    [
        ("--kernels torch-math", "no file to watch: give --kernels FILE.py:FUNCTION"),
        ("--kernels mine.py:f --json -", "`replay watch` shows tables: name a file in place of -"),
    ],
)
def test_watch_refuses_kernels_without_a_file(run_cli: RunCli, given: str, sentence: str) -> None:
    err = refusal(run_cli, "watch", "random", *given.split())
    assert err.startswith(f"replay watch: {sentence}")
