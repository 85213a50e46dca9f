"""Faults in a recording do not reach the model, and no complete call is lost."""

from __future__ import annotations

import gc
import operator
import os
import random
import shutil
import signal
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any
from weakref import WeakSet

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from capture import load, record
from capture.errors import CaptureError, RecordingWarning
from capture.recording.recording import Recording, _close_all
from capture.recording.termination import SIGNALS
from capture.storage import locks
from capture.storage.capture_record import CaptureRecord
from capture.storage.journal import Journal
from capture.storage.repair import repair
from tests.capture_faults import FAULTS, WAYS, Fault, kept_in, kill, orphans, try_fault


class Model(nn.Module):
    """Model that runs a given function before attention."""

    def forward(self, states: Tensor, before: Callable[[], object] = int) -> Tensor:
        before()
        return F.scaled_dot_product_attention(states, states, states)


STATES = torch.randn(1, 2, 5, 8)


@pytest.fixture
def scratch(tmp_path: Path) -> Iterator[Path]:
    """Scratch directory, in memory if possible, because disks are slow."""
    memory = Path("/dev/shm")
    if not os.access(memory, os.W_OK):
        yield tmp_path
        return
    with tempfile.TemporaryDirectory(dir=memory) as directory:
        yield Path(directory)


QUICK = dict.fromkeys(("open", "close", "flock"), "first")
QUICK |= dict.fromkeys(("fsync", "fstat", "allocate", "start_new_thread"), "durable")
"""Way in which the quick test tries each function's faults (default: "spread")."""
MANY_KINDS = ("flock", "allocate")
"""Functions whose errors are treated differently, so that all of them are tried."""


@pytest.mark.parametrize("fault", FAULTS, ids=lambda fault: fault.name)
def test_failing_system_call_does_not_reach_the_model(fault: Fault, scratch: Path) -> None:
    way = QUICK.get(fault.name, "spread")
    try_fault(fault, way, scratch, overwrite=way == "spread", every=False, both=False)


@pytest.mark.slow
@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("fault", FAULTS, ids=lambda fault: fault.name)
def test_failing_system_call_does_not_reach_the_model_in_any_way(
    fault: Fault, way: str, scratch: Path
) -> None:
    """Every second case overwrites an earlier recording; `tests.capture_faults` tries both ways."""
    overwrite = (FAULTS.index(fault) + list(WAYS).index(way)) % 2 == 1
    every = fault.name in MANY_KINDS
    try_fault(fault, way, scratch, overwrite=overwrite, every=every, both=True)


@pytest.mark.parametrize("overwrite", [False, True])
@pytest.mark.parametrize("way", WAYS)
def test_killed_process_loses_no_complete_call(way: str, overwrite: bool, tmp_path: Path) -> None:
    kill(tmp_path, way, random.uniform(0.005, 0.3), overwrite=overwrite)


def recorded(out: Path, *before: Callable[[], object], **options: Any) -> Recording:
    """Record a call after each function, and check the model's outputs."""
    model = Model()
    with record(model, out, name="model", **options) as recording:
        outputs = [model(STATES, each) for each in before]
    expected = Model()(STATES)
    assert all(torch.equal(output, expected) for output in outputs)
    return recording


@pytest.mark.parametrize("error", [ZeroDivisionError("mine"), KeyboardInterrupt(), SystemExit(3)])
@pytest.mark.parametrize("full", [False, True])
def test_model_s_own_exception_arrives(
    error: BaseException,
    full: bool,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    recwarn: pytest.WarningsRecorder,
) -> None:
    def fails() -> None:
        if full:
            monkeypatch.setattr(os, "write", lambda *_: (_ for _ in ()).throw(OSError(28, "full")))
        raise error

    with pytest.raises(type(error)) as raised:
        recorded(tmp_path, int, fails)
    assert raised.value is error
    assert any("full: make room" in str(each.message) for each in recwarn) == full
    monkeypatch.undo()
    assert kept_in(tmp_path) == (0 if full else 1)
    assert full or not load(tmp_path).captures[0].complete
    assert not orphans(tmp_path)


@pytest.mark.parametrize("function", ["rename", "mkdir"])
def test_capture_that_cannot_be_moved_is_moved_by_repair(
    function: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    recorded(tmp_path, int, int)

    def fails(*_: object, **__: object) -> None:
        raise OSError(5, "Input/output error")

    def stop() -> None:
        monkeypatch.setattr(os, function, fails)
        raise ZeroDivisionError

    def run() -> None:
        recorded(tmp_path, int, int, int, stop, overwrite=True)

    with pytest.raises(ZeroDivisionError), pytest.warns(RecordingWarning, match="Input/output"):
        run()
    monkeypatch.undo()
    assert kept_in(tmp_path) == 2
    repair(tmp_path)
    assert kept_in(tmp_path) == 2
    assert kept_in(tmp_path / "unfinished-model_2") == 3
    assert not orphans(tmp_path)


@pytest.mark.filterwarnings("error")
def test_warnings_that_are_errors_do_not_reach_the_model(tmp_path: Path) -> None:
    recording = recorded(tmp_path, int, lambda: shutil.rmtree(tmp_path), int)
    assert recording.kept == 0
    assert recording.problems


def test_trace_contains_nothing_of_ours(tmp_path: Path) -> None:
    class Plain(nn.Module):
        def forward(self, states: Tensor) -> Tensor:
            return F.scaled_dot_product_attention(states, states, states)

    model = Plain()
    with record(model, tmp_path) as recording:
        traced = torch.jit.trace(model, STATES, check_trace=False)
        symbolic = torch.fx.symbolic_trace(model)
        model(STATES)
    assert recording.kept == 1
    assert torch.equal(traced(STATES), model(STATES))
    assert sum(node.op == "call_function" for node in symbolic.graph.nodes) <= 1
    assert not any("getattr" in str(node.target) for node in symbolic.graph.nodes)


def in_child(work: Callable[[], object]) -> int:
    """Fork, run a function in the child, and return how the child ended."""
    process = os.fork()
    if not process:
        try:
            work()
        finally:
            os._exit(7)
    return os.waitpid(process, 0)[1]


@pytest.fixture
def sent(request: pytest.FixtureRequest) -> Iterator[signal.Signals]:
    """Signal with its default action, which a parent such as nohup may have changed."""
    before = signal.signal(request.param, signal.SIG_DFL)
    yield request.param
    signal.signal(request.param, before)


ending = pytest.mark.parametrize("sent", SIGNALS, indirect=True)


def test_forked_child_leaves_the_recording_alone(tmp_path: Path) -> None:
    model = Model()

    def fork() -> None:
        assert os.waitstatus_to_exitcode(in_child(lambda: [model(STATES) for _ in range(5)])) == 7

    recording = recorded(tmp_path, int, fork, int)
    assert kept_in(tmp_path) == recording.kept == recording.seen == 3


@ending
def test_forked_child_ends_on_a_signal(sent: signal.Signals, tmp_path: Path) -> None:
    def fork() -> None:
        def ends() -> None:
            os.kill(os.getpid(), sent)
            time.sleep(30)

        assert os.WTERMSIG(in_child(ends)) == sent

    assert kept_in(tmp_path) == 0
    assert recorded(tmp_path, fork, int).kept == 2


def test_child_that_is_forked_while_a_thread_records_can_leave_the_block(tmp_path: Path) -> None:
    with record(Model(), tmp_path) as recording:
        taken, done = threading.Event(), threading.Event()

        def hold() -> None:
            with recording.calls.lock:
                taken.set()
                done.wait(60)

        thread = threading.Thread(target=hold)
        thread.start()
        assert taken.wait(60)

        def leaves() -> None:
            signal.signal(signal.SIGALRM, signal.SIG_DFL)
            signal.alarm(20)
            recording.close(complete=False)

        status = in_child(leaves)
        done.set()
        thread.join()
    assert os.waitstatus_to_exitcode(status) == 7


@pytest.mark.parametrize("held", ["_writer._changed", "calls.lock", "_target._journal._lock"])
@ending
def test_signal_writes_what_is_in_memory_wherever_it_interrupts(
    held: str, sent: signal.Signals, tmp_path: Path
) -> None:
    def terminated() -> None:
        model = Model()
        with record(model, tmp_path, name="model", max=5) as recording:
            for _ in range(5):
                model(STATES)
            with operator.attrgetter(held)(recording):  # the writer needs this lock
                os.kill(os.getpid(), sent)
            time.sleep(60)

    assert os.WTERMSIG(in_child(terminated)) == sent
    assert kept_in(tmp_path) == 5
    assert not orphans(tmp_path)


def test_sigterm_loses_no_call_that_a_thread_has_recorded(tmp_path: Path) -> None:
    """Python handles signals only in the main thread, so the calls are written at once."""

    def records() -> None:
        model = Model()
        with record(model, tmp_path, name="model") as recording:
            for _ in range(3):
                model(STATES)
            while recording._writer is None or len(recording._writer.completed) < 3:
                time.sleep(0.01)
            os.kill(os.getpid(), signal.SIGTERM)
            time.sleep(60)

    def terminated() -> None:
        signal.alarm(20)  # if the calls stay in memory
        thread = threading.Thread(target=records)
        thread.start()
        thread.join()

    assert os.WTERMSIG(in_child(terminated)) == signal.SIGTERM
    assert kept_in(tmp_path) == 3


def test_no_ctrl_c_is_lost_while_a_recording_is_freed(tmp_path: Path) -> None:
    """Python discards exceptions in callbacks of weak references, such as those of `WeakSet`."""

    def note(frame: Any, event: str, _: object) -> None:
        if event == "call" and frame.f_code.co_filename == weakrefset:
            callbacks.append(frame.f_code.co_name)

    callbacks: list[str] = []
    weakrefset = WeakSet.add.__code__.co_filename
    before = sys.getprofile()
    sys.setprofile(note)
    try:
        recorded(tmp_path, int, int)
        gc.collect()
    finally:
        sys.setprofile(before)
    assert callbacks == []


def test_ignored_signal_stays_ignored(tmp_path: Path) -> None:
    def hangs_up() -> None:
        signal.signal(signal.SIGHUP, signal.SIG_IGN)  # as nohup does
        recorded(tmp_path, *[lambda: os.kill(os.getpid(), signal.SIGHUP)] * 5)
        assert signal.getsignal(signal.SIGHUP) is signal.SIG_IGN
        os._exit(3)

    assert os.waitstatus_to_exitcode(in_child(hangs_up)) == 3
    assert kept_in(tmp_path) == 5
    assert load(tmp_path).captures[0].complete


def test_handlers_are_put_back(tmp_path: Path) -> None:
    before = [signal.getsignal(each) for each in SIGNALS]
    with record(Model(), tmp_path):
        pass
    assert [signal.getsignal(each) for each in SIGNALS] == before


def test_sigterm_ends_the_program_whose_handler_passes_it_to_the_former_one(tmp_path: Path) -> None:
    def terminated() -> None:
        with record(Model(), tmp_path):
            former = signal.getsignal(signal.SIGTERM)
            assert callable(former)
            signal.signal(signal.SIGTERM, lambda *signalled: former(*signalled))
        os.kill(os.getpid(), signal.SIGTERM)
        time.sleep(10)

    assert os.WTERMSIG(in_child(terminated)) == signal.SIGTERM


def test_ctrl_c_while_it_is_written_gives_up_the_rest(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from capture.storage import call_file

    original, may_go_on = call_file.write_safetensors, threading.Event()
    signals = [signal.SIGINT]  # one, although several threads write

    def slow(*arguments: Any) -> str:
        writer = recordings[0]._writer
        while writer is None or not writer.is_closing:
            time.sleep(0.01)
        with suppress(IndexError):
            signal.pthread_kill(main, signals.pop())
        may_go_on.wait(60)
        return original(*arguments)

    main = threading.get_ident()
    monkeypatch.setattr(call_file, "write_safetensors", slow)
    recordings: list[Recording] = []

    def run() -> None:
        model = Model()
        with record(model, tmp_path, name="model") as recording:
            recordings.append(recording)
            for _ in range(4):
                model(STATES)

    with pytest.raises(KeyboardInterrupt), pytest.warns(RecordingWarning, match="dropped"):
        run()
    may_go_on.set()
    assert recordings[0]._writer is not None
    # After an interrupted `join`, Python < 3.13 wrongly considers a running thread ended.
    while recordings[0]._writer._writing:
        time.sleep(0.01)
    assert recordings[0].kept == kept_in(tmp_path) == 0
    monkeypatch.undo()
    assert recorded(tmp_path, int).kept == 1
    assert not orphans(tmp_path)


def test_ctrl_c_after_it_is_written_leaves_the_directory_usable(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def interrupted(recording: Recording) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(Recording, "missed_attention", property(interrupted))
    with pytest.raises(KeyboardInterrupt):
        recorded(tmp_path, int, int)
    monkeypatch.undo()
    assert kept_in(tmp_path) == 2
    assert recorded(tmp_path, int, overwrite=True).kept == kept_in(tmp_path) == 1
    assert not orphans(tmp_path)


def test_program_that_ends_inside_the_block_keeps_its_calls(tmp_path: Path) -> None:
    model = Model()
    with record(model, tmp_path, name="model"):
        model(STATES)
        _close_all()  # registered with atexit
        assert kept_in(tmp_path) == 1


@pytest.mark.filterwarnings("ignore::capture.errors.RecordingWarning")
def test_captures_of_others_stay_without_locks(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def unsupported(*_: object) -> None:
        raise OSError(37, "No locks available")

    monkeypatch.setattr(locks.fcntl, "flock", unsupported)
    other = Journal.begin(
        tmp_path / "other.journal", CaptureRecord("other", "random").to_json(), replaces=False
    )
    recording = recorded(tmp_path, int)
    assert kept_in(tmp_path) == recording.kept == 1
    assert "without locks" in recording.problems[0]
    assert other.path.exists()
    with (
        pytest.raises(CaptureError, match=r"another capture of other .* or was killed"),
        record(Model(), tmp_path, name="other"),
    ):
        pytest.fail("ran")
    other.close()
    repair(tmp_path)
    assert not other.path.exists()


def test_locked_directory_loses_only_the_manifest(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(locks, "PATIENCE_AT_THE_END_SECONDS", 0.05)
    descriptor = os.open(tmp_path, os.O_RDONLY)

    with pytest.warns(RecordingWarning, match="another process keeps it locked"):
        recording = recorded(tmp_path, int, lambda: locks.try_lock(descriptor))
    assert kept_in(tmp_path) == recording.kept == 2
    os.close(descriptor)
    assert (
        "model ended, but is not in the manifest: 2 complete calls; finish" in load(tmp_path).note
    )
    repair(tmp_path)
    assert load(tmp_path).note == ""


def test_file_that_is_cut_in_mid_run_is_reported(tmp_path: Path) -> None:
    def cut() -> None:
        os.truncate(tmp_path / "model-000000.safetensors", 100)

    with pytest.warns(RecordingWarning, match="its file has 100 bytes, not "):
        recording = recorded(tmp_path, int, cut, durable=True)
    assert (recording.kept, recording.lost) == (kept_in(tmp_path), 1) == (1, 1)


def test_link_in_place_of_the_directory_is_not_followed(tmp_path: Path) -> None:
    out, elsewhere = tmp_path / "out", tmp_path / "elsewhere"
    elsewhere.mkdir()

    def replace() -> None:
        out.rename(tmp_path / "before")
        out.symlink_to(elsewhere)

    with pytest.warns(
        RecordingWarning, match="the directory was moved, replaced or deleted meanwhile"
    ):
        recording = recorded(out, int, replace, int)
    assert (recording.kept, recording.lost) == (0, 3)
    assert recording.problems[1] == (
        f"{out}/model.journal was moved, replaced or deleted meanwhile, so the calls are not "
        "listed; if the directory was moved, `capture repair` lists its calls in the new place"
    )
    assert not any(elsewhere.iterdir())


@pytest.mark.parametrize("sample", ["spread", "first"])
def test_files_written_before_the_directory_was_moved_are_repaired(
    tmp_path: Path, sample: str
) -> None:
    out, moved = tmp_path / "out", tmp_path / "moved"

    def move() -> None:
        out.rename(moved)

    with pytest.warns(RecordingWarning, match="the directory was moved, replaced or deleted"):
        recording = recorded(out, int, int, move, sample=sample, durable=True)
    assert (recording.kept, recording.lost) == (0, 3)
    repair(moved)
    assert [entry.origin.call_index for entry in load(moved).entries] == [0, 1]
