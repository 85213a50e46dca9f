"""A replay that is interrupted, fails midway, or has no room for its files, keeps its rows."""

import os
import signal
from collections.abc import Callable, Iterator
from itertools import islice
from pathlib import Path
from typing import Any

import pytest

from replay.cli.files import NotWritten, opened
from replay.cli.replayed import _written_again
from replay.kernels.registry import Kernel
from replay.plan.plan import Budget, Plan, PlanError
from replay.rows.row_files import RowsError, read_jsonl, save_jsonl
from tests import factories
from tests.in_this_process import RunCli

QUICK = ("--rounds", "3", "--device", "cpu", "--in-process", "--kernels")
FULL = "/dev/full"
NO_ROOM = f"replay: cannot write {FULL}: No space left on device: make room"


def calls(path: Path) -> set[str]:
    return {row.call.name for row in read_jsonl(path).rows}


@pytest.fixture
def interrupted_after(monkeypatch: pytest.MonkeyPatch) -> Callable[..., None]:
    """`interrupted_after(3)` makes Ctrl-C, or another signal, end a replay after three rows."""
    from replay.bench.runner import replay_here

    def arrange(count: int, number: int = signal.SIGINT) -> None:
        def some(*given: Any, **options: Any) -> Iterator[Any]:
            yield from islice(replay_here(*given, **options), count)
            signal.raise_signal(number)

        monkeypatch.setattr("replay.workers.execution.replay_here", some)

    return arrange


def arguments(recorded: Path, *given: str) -> tuple[str, ...]:
    return ("--dir", str(recorded), *QUICK, "torch-flash", *given)


def test_rows_measured_before_control_c_are_shown_and_kept(
    run_cli: RunCli, recorded: Path, tmp_path: Path, interrupted_after: Callable[..., None]
) -> None:
    pytest.importorskip("vl_convert")
    interrupted_after(4)
    rows, page = (tmp_path / name for name in ("rows.jsonl", "out.html"))
    written = ("--json", str(rows), "--report", str(page))
    code, out, err = run_cli(*arguments(recorded, *written))
    assert code == 130
    assert "torch-flash" in out
    assert "2 calls" in out
    assert err.splitlines()[-1] == (
        f"replay: interrupted: {page} shows the calls that were measured whole; 1 of 3 calls "
        f"left out; the same command with --resume completes {rows}"
    )
    assert "replay: --rounds 3 cannot decide a speed-up: give at least 6\n" in err
    assert calls(rows) == {"model-000000", "model-000001"}
    assert page.is_file()
    err = run_cli(*arguments(recorded))[2]
    assert err.endswith("; give --json FILE, so that --resume can complete it\n")


def test_rows_of_an_incomplete_call_are_not_shown(
    run_cli: RunCli, recorded: Path, tmp_path: Path, interrupted_after: Callable[..., None]
) -> None:
    # The baseline lacks its row of the second call.
    interrupted_after(3, signal.SIGTERM)
    rows = tmp_path / "rows.jsonl"
    given = ("--dir", str(recorded), *QUICK, "torch-math,torch-flash", "--json", str(rows))
    code, out, err = run_cli(*given)
    assert code == 128 + signal.SIGTERM
    assert "· 1 call" in " ".join(out.split())
    assert "2 of 3 calls left out" in err
    assert calls(rows) == {"model-000000", "model-000001"}, "what was measured stays in the file"


def test_earlier_file_is_kept_until_there_is_a_row(
    run_cli: RunCli, recorded: Path, tmp_path: Path, kernels: Callable[..., Kernel]
) -> None:
    def interrupt(**_: Any) -> None:
        raise KeyboardInterrupt

    kernels("early", interrupt)
    earlier = tmp_path / "earlier"
    earlier.write_text("earlier")
    code, out, err = run_cli("--dir", str(recorded), *QUICK, "early", "--json", str(earlier))
    assert (code, out, earlier.read_text()) == (130, "", "earlier")
    stayed = f", and {earlier} stayed as before"
    assert err.endswith(f"replay: interrupted: no call was replayed{stayed}\n")


def test_replay_goes_on_when_there_is_no_room_for_its_rows(
    run_cli: RunCli, recorded: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("replay.cli.files.check_place", lambda path: None)  # it is full later
    code, out, err = run_cli(*arguments(recorded, "--json", FULL))
    assert code == 2
    assert "3 calls" in out
    assert err.splitlines().count(NO_ROOM) == 1
    assert f"{NO_ROOM}; the replay goes on" in err


def test_rows_are_written_at_the_end_if_there_is_room_then(
    run_cli: RunCli, recorded: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(*_: Any) -> None:
        raise NotWritten("cannot write rows.jsonl: No space left on device: make room")

    monkeypatch.setattr("replay.cli.replayed.write_jsonl", full)
    rows = tmp_path / "rows.jsonl"
    code, _, err = run_cli(*arguments(recorded, "--json", str(rows)))
    assert code == 0
    assert err.count("cannot write") == err.count("; the replay goes on") == 1
    assert len(calls(rows)) == 3


def test_failed_replacement_leaves_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(*_: Any) -> None:
        raise OSError(28, "No space left on device")

    path = tmp_path / "kept" / "file.jsonl"
    path.parent.mkdir()
    path.write_text("earlier")
    monkeypatch.setattr("replay.rows.replacement.os.replace", full)
    told = f"cannot write.* {path}: No space left on device: make room"
    with pytest.raises(PlanError, match=told):
        Plan("model", "random", Budget("cosine", 0.9), "own").save(path)
    with pytest.raises(RowsError, match=told):
        save_jsonl([], path)
    assert path.read_text() == "earlier"
    assert list(path.parent.iterdir()) == [path]


def test_file_is_opened_by_the_first_write(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "file"
    path.write_text("earlier")
    monkeypatch.chdir(tmp_path)
    with opened("file") as file:
        assert file is not None
        assert path.read_text() == "earlier"
        (tmp_path / "elsewhere").mkdir()
        os.chdir("elsewhere")  # as a kernel may do
        file.write("later")
        file.flush()
        assert path.read_text() == "later"
    with pytest.raises(ZeroDivisionError), opened(str(path)):
        raise ZeroDivisionError
    assert path.read_text() == "later"
    with opened(str(path)):
        pass
    assert path.read_text() == ""


def test_pipe_is_opened_before_the_first_row(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "pipe")
    reader = os.open(tmp_path / "pipe", os.O_RDONLY | os.O_NONBLOCK)
    with opened(str(tmp_path / "pipe")), pytest.raises(BlockingIOError):
        os.read(reader, 1)  # a writer is open, but no text has arrived
    assert os.read(reader, 1) == b""
    os.close(reader)


def test_rows_are_not_sent_to_a_pipe_again(tmp_path: Path) -> None:
    """The pipe's reader has ended, and opening the pipe again would wait for another reader."""
    pipe = tmp_path / "pipe"
    os.mkfifo(pipe)
    for told in ([], ["cannot write pipe: Broken pipe"]):
        assert _written_again([factories.row("eager")], pipe, told) == told
