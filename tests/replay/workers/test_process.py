"""Start, death, replies and end of a worker's process."""

import gc
import os
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import torch

from replay.isolation import processes
from replay.isolation.process_state import ProcessState
from replay.workers import kernel_server
from replay.workers.environment_options import WorkerError
from replay.workers.environments import Environment
from replay.workers.process import (
    LOG_BYTES,
    CannotStart,
    Died,
    First,
    Placement,
    Process,
    Stopped,
    first_processes,
    judge_process,
)
from tests import factories

pytestmark = pytest.mark.skipif(
    sys.platform != "linux", reason="counts processes in /proc, and limits memory as Linux does"
)

SCRIPTS = {
    "talks-nonsense": "say(ready=True); receive(); os.write(replies, b'nonsense\\n'); rest()",
    "dies-idle": "say(ready=True); receive(); say(at='a'); say(done=True); os._exit(4)",
    "slow-and-partial": (
        "say(ready=True); receive()\n"
        "line = (token + '{\"at\": \"' + 'é' * 10**6 + '\"}\\n').encode()\n"
        "while line: line = line[os.write(replies, line[:70_001]):]\n"
        "say(done=True); rest()"
    ),
    "prints-for-ever": "os.write(1, b'y'); begin()\nwhile True: os.write(1, b'y' * 65536)",
    "never-ready": "print('not a worker'); sys.exit(5)",
    "aborts": (
        "begin(); print('x' * 2**20, flush=True)\n"
        "os.write(1, b'the last words, cut \\xff short'); os.abort()"
    ),
    "real-time-signal": "begin(); os.kill(os.getpid(), signal.SIGRTMIN + 1)",
    "shuts-its-mouth": "begin(); os.close(replies); rest()",
    "leaves-a-child-with-its-pipes": "begin(); os.fork() and os._exit(6); time.sleep(30)",
    "ends-in-its-first-preparation": (
        "say(ready=True); receive()\n"
        "if not os.path.exists('ended'): open('ended', 'w'); os._exit(4)\n"
        "say(works=True); say(done=True); rest()"
    ),
    "hangs": "begin(); rest()",
    "is-stopped": "begin(); os.kill(os.getpid(), signal.SIGSTOP); say(done=True); rest()",
    "waits-for-a-turn": "begin(); receive(); say(at='b'); say(done=True); rest()",
}
PRELUDE = """
import json, os, signal, sys, time
os.chdir(os.path.dirname(__file__))
requests, replies = int(sys.argv[-3]), int(sys.argv[-2])
token = ""
def say(**message): os.write(replies, f"{token}{json.dumps(message)}\\n".encode())
def receive():
    global token
    token = json.loads(os.read(requests, 65536).splitlines()[0]).get("token", token)
def rest(): time.sleep(3600)
def begin(): say(ready=True); receive(); say(at="a")
"""


MakeWorker = Callable[..., Process]


@pytest.fixture
def worker(tmp_path: Path) -> Iterator[MakeWorker]:
    """`worker(script)` starts a process that runs one of `SCRIPTS` in place of the worker."""
    started: list[Process] = []

    def make(name: str, timeout: float = 60) -> Process:
        script = tmp_path / f"{name}.py"
        script.write_text(PRELUDE + SCRIPTS[name])
        python = tmp_path / f"an interpreter for {name}"
        python.write_text(f'#!/bin/sh\nexec "{sys.executable}" -S "{script}" "$@"\n')
        python.chmod(0o755)
        started.append(Process(str(python), timeout))
        return started[-1]

    yield make
    for process in started:
        process.close()


def open_descriptors() -> int:
    return len(list(Path("/proc/self/fd").iterdir()))


@pytest.mark.parametrize(
    ("script", "reason", "log"),
    [
        ("talks-nonsense", "sent an invalid message", ""),
        ("prints-for-ever", "no message for 0.5 s", "y"),
        ("shuts-its-mouth", "closed its pipe and did not end", ""),
        ("aborts", "ended by SIGABRT", "the last words, cut � short"),
        ("real-time-signal", "ended by signal 3", ""),
        # The pipes stay open, so only the state of the process reveals its end.
        ("leaves-a-child-with-its-pipes", "exited with code 6", ""),
    ],
)
def test_each_end_of_a_worker_has_its_reason(
    worker: MakeWorker, monkeypatch: pytest.MonkeyPatch, script: str, reason: str, log: str
) -> None:
    if script == "shuts-its-mouth":  # the other scripts need more time
        monkeypatch.setattr("replay.workers.process.ENDING_SECONDS", 0.2)
    is_late = script == "prints-for-ever"
    process = worker(script, 0.5 if is_late else 3600)
    gc.collect()  # leftovers of earlier tests may hold descriptors
    before = open_descriptors()
    for _ in range(2):  # the second round restarts the process
        with pytest.raises(Died, match=reason) as died:
            list(process.ask(do="something"))
        assert died.value.status == ("timeout" if is_late else "crash")
        assert log in died.value.log
        assert len(died.value.log) <= LOG_BYTES
    assert open_descriptors() == before


def test_end_while_idle_is_blamed_on_no_kernel(worker: MakeWorker) -> None:
    process = worker("dies-idle")
    for _ in range(3):
        assert list(process.ask(do="something")) == [{"at": "a"}]
        os.waitid(os.P_PID, process._child.pid, os.WEXITED | os.WNOWAIT)


def test_long_line_is_read_in_pieces_also_after_an_interrupted_request(worker: MakeWorker) -> None:
    process = worker("slow-and-partial")
    answers = process.ask(do="something")
    next(answers)
    answers.close()  # type: ignore[attr-defined]
    (message,) = process.ask(do="something")
    assert message["at"] == "é" * 10**6


def test_worker_that_cannot_start_is_reported(worker: MakeWorker, tmp_path: Path) -> None:
    (tmp_path / "text").write_text("no program")
    (tmp_path / "text").chmod(0o755)
    refused = {
        "exited with code 5: not a worker": worker("never-ready"),
        "No such file": Process(str(tmp_path / "nothing"), 5),
        "Exec format error": Process(str(tmp_path / "text"), 5),
    }
    gc.collect()
    before = open_descriptors()
    for reason, process in refused.items():
        with pytest.raises(CannotStart, match=reason):
            list(process.ask(do="something"))
    assert open_descriptors() == before


def test_workers_can_start_before_this_process_imports_torch() -> None:
    program = "import replay.workers.process, sys; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", program]).returncode == 0


def environments_of(monkeypatch: pytest.MonkeyPatch, **variables: str) -> list[dict[str, str]]:
    """Return the environments that a worker and the judge would be started with."""
    started: list[dict[str, str]] = []

    def popen(*_: object, env: dict[str, str], **__: object) -> None:
        started.append(env)
        raise OSError("enough")

    with monkeypatch.context() as patch:
        patch.setattr(subprocess, "Popen", popen)
        place = Placement(variables)
        for process in (Process(sys.executable, 1.0, place=place), judge_process(1.0, place)):
            with pytest.raises(CannotStart):
                process.start()
    return started


def test_processes_have_their_variables(monkeypatch: pytest.MonkeyPatch) -> None:
    """A judge's threads sleep; a kernel's threads wait as usual, because their waits are timed."""
    monkeypatch.delenv("OMP_WAIT_POLICY", raising=False)
    both = environments_of(monkeypatch, CUDA_VISIBLE_DEVICES="3")
    assert [env.get("OMP_WAIT_POLICY") for env in both] == [None, "PASSIVE"]
    assert [env["CUDA_VISIBLE_DEVICES"] for env in both] == ["3", "3"]


def test_a_workers_results_lie_in_the_same_pages_at_each_call(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    program = (
        "import resource, torch\n"
        "for number in range(20):\n"
        "    if number == 10: first = resource.getrusage(resource.RUSAGE_SELF).ru_minflt\n"
        "    [torch.ones(3 * 2**20).softmax(0) for _ in range(4)]\n"
        "print(resource.getrusage(resource.RUSAGE_SELF).ru_minflt - first)"
    )
    (environment, _) = environments_of(monkeypatch)
    command = [sys.executable, "-c", program]
    new_pages = subprocess.run(command, env=environment, capture_output=True, check=True).stdout
    assert int(new_pages) < 1000


def test_torch_compile_does_not_move_tritons_cache(monkeypatch: pytest.MonkeyPatch) -> None:
    """Otherwise torch.compile moves Triton's cache, so that later kernels are compiled again."""
    knobs = pytest.importorskip("triton.knobs", reason="an older Triton")
    monkeypatch.delenv("TRITON_CACHE_DIR", raising=False)
    assert environments_of(monkeypatch)[0]["TRITON_CACHE_DIR"] == knobs.cache.dir
    monkeypatch.setenv("TRITON_CACHE_DIR", "/elsewhere")
    assert environments_of(monkeypatch)[0]["TRITON_CACHE_DIR"] == "/elsewhere"


def test_worker_runs_where_it_is_placed() -> None:
    place = Placement(cpus=frozenset({max(os.sched_getaffinity(0))}))
    for made in (Process(sys.executable, 60, place=place), judge_process(60, place)):
        process = made.another()
        process.start()
        try:
            assert os.sched_getaffinity(process.pid or 0) == place.cpus
        finally:
            process.close()


@pytest.fixture(scope="module")
def first() -> Iterator[First]:
    """Start a worker and the judge, which are told to prepare a missing device and kernel."""
    with first_processes(60) as processes:
        processes.prepare("no such device")
        processes.warm_up("no such kernel")
        yield processes


def test_answers_to_preparation_are_skipped(first: First) -> None:
    for process in first:
        child = process._child
        assert list(process.ask(do="touch", device="cpu")) == [{"works": True}]
        assert process._child is child
    environment = Environment("this", sys.executable, 60, worker=first.worker)
    with pytest.raises(WorkerError, match="environment this cannot use cuda:7: "):
        environment.check(torch.device("cuda:7"))


def test_processes_cannot_open_each_others_files(first: First) -> None:
    """Otherwise a kernel could write rows into the pipes of other workers and of the parent."""
    program = f"""
import os, sys
sys.path.insert(0, {str(Path(processes.__file__).parents[2])!r})
from replay.isolation import processes
processes.close_off()
for path in sys.argv[1:]:
    try: print(path, os.open(path, os.O_RDWR))
    except PermissionError: pass
"""
    children = [each for process in first for each in processes.family(process.pid or 0)]
    paths = [f"/proc/{pid}/{name}" for pid in (os.getpid(), *children) for name in ("fd/0", "mem")]
    assert subprocess.check_output([sys.executable, "-c", program, *paths], text=True) == ""
    for pid in children:  # root may open every file unless it gives up this right
        capabilities = Path(f"/proc/{pid}/status").read_text().partition("CapEff:")[2].split()[0]
        assert not int(capabilities, 16) & 1 << processes._CAP_SYS_PTRACE


def test_compilers_are_imported_once(monkeypatch: pytest.MonkeyPatch) -> None:
    done: list[str] = []

    def fails() -> None:
        done.append("failed")
        raise ImportError

    warm_ups = {"plain": None, "broken": fails, "needs": lambda: done.append("imported")}
    kernels = [factories.kernel(name, warm_up=warm_up) for name, warm_up in warm_ups.items()]
    process_state = ProcessState()
    monkeypatch.setattr(process_state, "restore", lambda name: done.append(f"{name} restored"))
    monkeypatch.setattr(kernel_server, "_warm", set())
    monkeypatch.setattr(gc, "freeze", lambda: done.append("frozen"))
    for _ in range(2):
        kernel_server._warm_up(kernels, process_state)
    assert done == ["failed", "broken restored", "imported", "needs restored", "frozen"]


def test_worker_that_ends_in_preparation_is_replaced(worker: MakeWorker) -> None:
    process = worker("ends-in-its-first-preparation")
    process.prepare(do="call")
    child = process._child
    assert process.answer(do="touch") == {"works": True}
    assert child is not None
    assert process._child is not child


def test_stopped_worker_goes_on_later(worker: MakeWorker, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(processes, "IS_POSSIBLE", False)  # the script has no supervisor
    process = worker("waits-for-a-turn", 5)
    process.start()
    process.stop()  # even before it is ready
    answers = process.ask(do="something")
    assert next(answers) == {"at": "a"}
    process.stop()
    _, status = os.waitpid(process._child.pid, os.WUNTRACED)
    assert os.WIFSTOPPED(status)
    all_cores, pid = os.sched_getaffinity(0), process._child.pid
    os.sched_setaffinity(pid, {min(all_cores)})  # another worker can do this too
    process.tell(number=0)
    assert list(answers) == [{"at": "b"}]
    assert os.sched_getaffinity(pid) == all_cores
    process.stop()
    process.close()  # stopped processes end too
    assert process.pid is None


def test_foreign_stop_is_undone(worker: MakeWorker, monkeypatch: pytest.MonkeyPatch) -> None:
    """A kernel can send signals to the judge."""
    monkeypatch.setattr("replay.workers.process.LOOK_SECONDS", 0.05)
    assert list(worker("is-stopped", 5).ask(do="something")) == [{"at": "a"}]


def test_worker_that_reads_nothing_is_given_up(worker: MakeWorker) -> None:
    """Without a time limit, this process would wait for ever for room in the pipe."""
    process = worker("hangs", 0.5)
    answers = process.ask(do="something")
    assert next(answers) == {"at": "a"}
    with pytest.raises(Died, match=r"read no message for 0\.5 s") as died:
        process.tell(text="x" * 2**20)
    assert (died.value.status, died.value.kernel) == ("timeout", "a")


def test_wait_for_a_worker_can_be_stopped(worker: MakeWorker) -> None:
    process = worker("hangs", 600)
    answers = process.ask(do="something")
    assert next(answers) == {"at": "a"}
    child = process._child
    process.place.stopped.set()
    with pytest.raises(Stopped):
        next(answers)
    assert child.poll() is not None
    with pytest.raises(Stopped):
        process.start()
