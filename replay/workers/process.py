"""The parent's side of a child process: its start, requests, replies, stops and end."""

from __future__ import annotations

import contextlib
import importlib.util
import json
import logging
import os
import secrets
import select
import selectors
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from attention_replay.errors import Error
from capture.text.printable import printable
from replay.isolation import processes
from replay.kernels import registered_functions
from replay.rows.row import Status
from replay.workers.messages import read
from replay.workers.shared_file import SharedFile

logger = logging.getLogger(__name__)

MESSAGE_BYTES = 2**24
"""Maximum length of a message, which would otherwise fill this process's memory."""

LOG_BYTES = 4000
"""Number of bytes that are kept from the end of a worker's output."""

MOST_WORKERS = 4
"""Maximum number of workers that share rounds, because each holds a copy of the call."""

ANSWERING_SECONDS = 10.0
"""Minimum time limit for an interpreter to run its first line, whatever `timeout` is."""

STARTING_SECONDS = 300.0
"""Time limit for a worker to import torch, which takes minutes from a slow network disk."""

LOOK_SECONDS = 1.0
"""Interval between checks of a silent worker. Its pipe alone cannot show its end, because a process
that a kernel has forked may hold the pipe open."""

LEAST_RAN_SECONDS, RAN_SHARE = 0.01, 0.05
"""Processor time, in seconds and as a share of the elapsed time, above which a stopped family has
worked. System calls that it had begun may use less."""

ENDING_SECONDS = 10.0
"""Time limit for a worker to end after it has closed its pipe."""

_hiding = processes.Hiding()
"""Closes this process to others while it has a child."""

KEEPING_MEMORY = {
    "MALLOC_MMAP_THRESHOLD_": str(2**25),
    "MALLOC_TRIM_THRESHOLD_": str(2**30),
    "MALLOC_TOP_PAD_": str(2**26),
}
"""Environment variables that make glibc keep freed memory. Otherwise an intermediate result of a
kernel, such as a matrix of scores, is in new pages at each call or at none, by the process, which
changes the kernel's time on a CPU by up to a factor of two (`docs/method.md`)."""

IN_A_WORKER = "ATTENTION_REPLAY_WORKER"
"""Environment variable that marks workers, which must not start workers themselves."""

OUR_PACKAGES = """
import os, sys
os.write(int(sys.argv[3]), b'{"answers": true}\\n')
import gc
from importlib.machinery import PathFinder

roots = sys.argv[1].splitlines()
ours = ("attention_replay", "attention_kernels", "capture", "replay")

class OurPackages:
    @staticmethod
    def find_spec(name, path=None, target=None):
        return PathFinder.find_spec(name, roots) if name in ours else None

sys.meta_path.insert(0, OurPackages)
if sys.path[0] == "":
    del sys.path[0]
from replay.isolation import processes
processes.close_off()
processes.supervise(int(sys.argv[2]), int(sys.argv[3]))
gc.disable()  # collections during the import of PyTorch find nothing and take a fifth of the time
from replay.workers.worker import main
main(int(sys.argv[2]), int(sys.argv[3]), sys.argv[4])
"""
"""Program of the child. It finds only our packages among those of this interpreter, and none in the
current directory, because the child may use another interpreter."""


class CannotStart(Exception):
    """Error for a worker that cannot start: its interpreter or a required package is missing."""


class Died(Exception):
    """Error for a worker's unexpected end. `kernel` names the worker's last kernel or stage."""

    def __init__(self, status: Status, reason: str, kernel: str, log: str) -> None:
        super().__init__(reason)
        self.status = status
        self.reason = reason
        self.kernel = kernel
        self.log = log


class Stopped(Exception):
    """Error for processes that were ended on request, not because of a fault."""


@dataclass(frozen=True)
class Placement:
    """Place of child processes: one of several devices, or the same place as this process."""

    variables: Mapping[str, str] = field(default_factory=dict)
    """Environment variables that differ from this process's variables."""
    cpus: frozenset[int] = frozenset()
    """Logical CPUs of the processes and their children; empty for the CPUs of this process."""
    stopped: threading.Event = field(default_factory=threading.Event)
    """Event that any thread may set, to end processes with open requests within `LOOK_SECONDS`."""
    shared: SharedFile = field(default_factory=SharedFile)
    """File that all processes at this place have open."""


class Process:
    """Child process that runs `replay.workers.worker`. It is started on demand, also after its end.

    Args:
        python: the interpreter, which needs torch and safetensors, and imports this package's code.
        timeout: seconds without a message after which the child is killed.
        handler: the module that handles requests in the child, with `handle(request, say, hear)`.
        place: the place where the child runs.
    """

    def __init__(
        self,
        python: str,
        timeout: float,
        handler: str = "replay.workers.kernel_server",
        place: Placement | None = None,
    ) -> None:
        self.python = python
        self.place = place or Placement()
        self._handler = handler
        self.timeout = timeout
        self._child: subprocess.Popen[bytes] | None = None
        self._requests = -1
        self._replies = -1
        self._selector: selectors.BaseSelector | None = None
        self._is_ready = False
        self._token = ""
        """Beginning of the child's messages, which other writers to its pipe do not know."""
        self._is_stopped = False
        self._has_stopped, self._at_stop = True, (0.0, 0.0)
        """Time of the last stop, and the processor time that the family had used by then."""
        self._cores: dict[int, set[int]] = {}
        """CPUs of the family's threads at the last stop. Other processes may change them later."""
        self._preparing = 0
        """Number of `prepare` requests that the child has not answered."""
        self._unread = b""
        self._log = b""
        self._at = ""

    @property
    def pid(self) -> int | None:
        """Process number of the child, which is the head of its family; None without a child."""
        return None if self._child is None else self._child.pid

    def stop(self) -> None:
        """Stop the child and its descendants until the next message to the child.

        First wait until a child that is starting is ready, so that its next turn need not wait.
        """
        with contextlib.suppress(CannotStart, Died):  # the next request reports it
            if self._child is not None and not self._is_stopped:
                self._wait_until_ready()
                self._wait_until_prepared()
        if self._child is not None and not self._is_stopped:
            self._has_stopped = processes.stop(self._child.pid, spared=processes.IS_POSSIBLE)
            self._is_stopped = True
            self._at_stop = time.monotonic(), processes.processor_seconds(self._child.pid)
            self._cores = processes.cores(self._child.pid)

    def ran_while_stopped(self) -> bool:
        """Return whether processes of the child's family ran after `stop`.

        Another process can continue a stopped process, and so can a notification of the system that
        the process requested before.
        """
        if self._child is None or not self._is_stopped:
            return False
        if not self._has_stopped:
            return True
        began, used = self._at_stop
        ran = processes.processor_seconds(self._child.pid) - used
        return ran > max(LEAST_RAN_SECONDS, RAN_SHARE * (time.monotonic() - began))

    def another(self, python: str = "") -> Process:
        """Return another process of the same kind at the same place, not yet started."""
        return Process(python or self.python, self.timeout, self._handler, self.place)

    def ask(self, **request: Any) -> Iterator[dict[str, Any]]:
        """Send a request and yield the replies until the child reports that it is done.

        Raises:
            CannotStart: the interpreter does not run, or lacks a package.
            Died: the child crashed, hung, or lost its GPU.
            Stopped: the child was ended on request.
        """
        self._at, done = "", False
        try:
            if self._child is not None and self._child.poll() is not None:
                self.close()  # the child ended before this request
            self.start()
            self._resume()
            self._wait_until_ready()
            self._wait_until_prepared()
            self._send({**request, "token": self._token})
            while True:
                message = self._receive(self.timeout)
                if message.get("done"):
                    done = True
                    return
                if "lost" in message:
                    starved = message.get("status") == "out-of-memory"
                    raise self._death(message["lost"], "out-of-memory" if starved else "crash")
                self._at = message.get("at", self._at)
                yield message
        finally:
            # After an interruption, later replies must not be read as replies to the next request.
            if not done:
                self.close()

    def start(self) -> None:
        """Start the child if there is none, without waiting until it has imported PyTorch."""
        if self.place.stopped.is_set():
            raise Stopped
        if self._child is None:
            self._start()

    def prepare(self, **request: Any) -> None:
        """Send a request that prepares the child, without waiting for the reply."""
        self.start()
        self._preparing += 1
        with contextlib.suppress(Died):  # the next request starts another child
            self._send({**request, "token": self._token})

    def tell(self, **message: Any) -> None:
        """Answer a question that the child asked during a request."""
        self._send(message)

    def broken(self, reason: str) -> Died:
        """End the child, because its messages are invalid; return the error to raise."""
        return self._death(reason, "crash")

    def answer(self, **request: Any) -> dict[str, Any]:
        """Return the only reply to a request."""
        (reply,) = list(self.ask(**request))
        return reply

    def end(self) -> None:
        """Kill the child and all processes that it started; `close` waits for the end."""
        if self._child is not None:
            self._kill()

    def close(self) -> None:
        """End the child, even a busy one, and all processes that the child started."""
        self.end()
        if self._child is None:
            return
        assert self._child.stdout is not None
        assert self._selector is not None
        try:
            self._child.wait(ENDING_SECONDS)
        except subprocess.TimeoutExpired:
            self._child.kill()
            self._child.wait()
        self._selector.close()
        self._child.stdout.close()
        os.close(self._requests)
        os.close(self._replies)
        self._child, self._selector = None, None
        _hiding.end()
        self._is_stopped = False
        self._preparing = 0
        self._unread = self._log = b""

    def _start(self) -> None:
        if IN_A_WORKER in os.environ:
            raise Error(
                "a worker process imports this file: put what starts a replay under "
                '`if __name__ == "__main__":`'
            )
        child_reads, requests = os.pipe()
        replies, child_writes = os.pipe()
        roots = "\n".join(_folders_of_ours())
        command = [self.python, "-c", OUR_PACKAGES, roots]
        command += [str(child_reads), str(child_writes), self._handler]
        _hiding.begin()
        try:
            child = subprocess.Popen(
                command,
                stdin=subprocess.DEVNULL,
                stdout=subprocess.PIPE,
                stderr=subprocess.STDOUT,
                pass_fds=(child_reads, child_writes, self.place.shared.descriptor),
                # The child must write its output and the traceback of a crash before it ends.
                env={
                    "TRITON_CACHE_DIR": _triton_cache(),
                    **KEEPING_MEMORY,
                    **os.environ,
                    "PYTHONUNBUFFERED": "1",
                    "PYTHONFAULTHANDLER": "1",
                    IN_A_WORKER: "1",
                    **registered_functions.variables(self.python),
                    **self.place.variables,
                },
                # In a group of its own, the child gets no Ctrl-C, and ends with its compilers.
                start_new_session=True,
            )
        except OSError as error:
            _hiding.end()
            os.close(requests)
            os.close(replies)
            raise CannotStart(error.strerror) from error
        finally:
            os.close(child_reads)
            os.close(child_writes)
        if self.place.cpus:  # bind before threads start: threads keep their CPUs
            with contextlib.suppress(ProcessLookupError):
                os.sched_setaffinity(child.pid, self.place.cpus)
        assert child.stdout is not None
        os.set_blocking(child.stdout.fileno(), False)
        role = self._handler.rpartition(".")[2].replace("_", " ")
        logger.info("started a %s: process %d of %s", role, child.pid, self.python)
        self._child, self._requests, self._replies = child, requests, replies
        self._token = secrets.token_hex(8)
        self._selector = selectors.DefaultSelector()
        self._selector.register(replies, selectors.EVENT_READ)
        self._selector.register(child.stdout, selectors.EVENT_READ)
        self._is_ready = False

    def _wait_until_ready(self) -> None:
        if self._is_ready:
            return
        try:
            longer = max((self.timeout, "--timeout"), (ANSWERING_SECONDS, "limit for its start"))
            if "answers" in self._receive(*longer):
                self._receive(STARTING_SECONDS, "limit for its imports")
            self._is_ready = True
            assert self._child is not None
            logger.info("process %d is ready", self._child.pid)
        except Died as death:
            last = death.log.strip().splitlines()[-1:]
            raise CannotStart(": ".join([death.reason, *last])) from death

    def _wait_until_prepared(self) -> None:
        """Skip the replies to `prepare` requests; start another child if the current child ends."""
        try:
            while self._preparing:
                self._preparing -= bool(self._receive(STARTING_SECONDS).get("done"))
        except Died:
            self.start()
            self._wait_until_ready()

    def _resume(self) -> None:
        assert self._child is not None
        if self._is_stopped:
            processes.bind(self._cores)
            processes.resume(self._child.pid)
            self._is_stopped = False

    def _send(self, request: dict[str, Any]) -> None:
        assert self._child is not None
        if self._child.poll() is not None:  # a kernel may have ended the supervisor alone
            raise self._death()
        self._resume()
        unsent = memoryview(json.dumps(request).encode() + b"\n")
        pipe = select.poll()
        pipe.register(self._requests, select.POLLOUT)
        try:
            while unsent:
                if not pipe.poll(self.timeout * 1000):
                    raise self._death(f"read no message for {self.timeout:g} s", "timeout")
                unsent = unsent[os.write(self._requests, unsent[: select.PIPE_BUF]) :]
        except BrokenPipeError:
            raise self._death() from None

    def _receive(self, patience: float, allowed: str = "--timeout") -> dict[str, Any]:
        """Return the next message; also read the child's output, so that the child never blocks.

        Args:
            allowed: name of the limit `patience`, for the error message.
        """
        assert self._child is not None
        assert self._selector is not None
        deadline = time.monotonic() + patience
        while b"\n" not in self._unread:
            if self.place.stopped.is_set():
                raise Stopped
            left = deadline - time.monotonic()
            if left <= 0:
                reason = f"sent no message for {patience:g} s ({allowed})"
                raise self._death(reason, "timeout")
            ready = [key.fd for key, _ in self._selector.select(min(left, LOOK_SECONDS))]
            if not ready:
                if self._child.poll() is not None:
                    raise self._death()
                processes.resume(self._child.pid)  # a kernel may have stopped it
            if self._replies in ready:
                received = os.read(self._replies, 1 << 16)
                if not received:
                    raise self._death()
                self._unread += received
                if len(self._unread) > MESSAGE_BYTES and b"\n" not in self._unread:
                    raise self._death(f"sent a message of more than {MESSAGE_BYTES:,} bytes")
            elif ready and not self._read_log():
                self._selector.unregister(ready[0])
        line, _, self._unread = self._unread.partition(b"\n")
        try:
            return read(line, self._token if self._is_ready else "")
        except ValueError as error:
            raise self._death(printable(str(error))) from error

    def _read_log(self) -> bool:
        """Read the child's output; return False at its end."""
        assert self._child is not None
        assert self._child.stdout is not None
        try:
            printed = os.read(self._child.stdout.fileno(), 1 << 16)
        except BlockingIOError:
            return True
        self._log = (self._log + printed)[-LOG_BYTES:]
        return bool(printed)

    def _death(self, reason: str | None = None, status: Status = "crash") -> Died:
        assert self._child is not None
        if reason is None:
            with contextlib.suppress(subprocess.TimeoutExpired):
                self._child.wait(ENDING_SECONDS)
            reason = _how_it_ended(self._child.poll())
        logger.info("process %d is gone: %s", self._child.pid, reason)
        self._kill()
        # Stop after a full pipe, because a process that left the group may print for ever.
        for _ in range(16):
            if not self._read_log():
                break
        log = self._log.decode(errors="replace")
        self.close()
        return Died(status, reason, self._at, log)

    def _kill(self) -> None:
        assert self._child is not None
        processes.kill(self._child.pid)
        if not processes.IS_POSSIBLE:
            # On macOS, a group refuses signals if its only process has ended.
            with contextlib.suppress(ProcessLookupError, PermissionError):
                os.killpg(self._child.pid, signal.SIGKILL)


@dataclass(frozen=True)
class First:
    """First processes of a replay in workers, which import PyTorch at the same time."""

    worker: Process
    judge: Process
    users: Mapping[str, Process] = field(default_factory=dict)
    """Workers of users' kernels, by file or package."""

    def __iter__(self) -> Iterator[Process]:
        return iter((self.worker, self.judge, *self.users.values()))

    def prepare(self, device: str | None) -> None:
        """Tell all processes to initialise a device (None for the default); do not wait."""
        for process in self:
            process.prepare(do="touch", device=device)

    def warm_up(self, kernels: str | None) -> None:
        """Let the worker import the compilers of these kernels, without waiting.

        Args:
            kernels: names and globs; None for the default kernels.
        """
        self.worker.prepare(do="warm up", kernels=kernels)

    def close(self) -> None:
        """End all processes."""
        for process in self:
            process.close()


def judge_process(timeout: float, place: Placement | None = None) -> Process:
    """Make the process that judges outputs, without starting it.

    Its threads sleep while they wait, because kernels use the same CPUs.
    """
    place = place or Placement()
    asleep = replace(place, variables={**place.variables, "OMP_WAIT_POLICY": "PASSIVE"})
    return Process(sys.executable, timeout, "replay.workers.judge_worker", asleep)


@contextlib.contextmanager
def first_processes(
    timeout: float, place: Placement | None = None, sources: Sequence[str] = ()
) -> Iterator[First]:
    """Start a worker of this interpreter and the judge; all processes end with the `with` block.

    This module imports no torch, so a command can import it while these processes start.

    Args:
        sources: files or packages of users' kernels; each of the first few gets a worker too.

    Raises:
        CannotStart: the interpreter does not run.
    """
    worker = Process(sys.executable, timeout, place=place)
    users = {source: worker.another() for source in sources[: MOST_WORKERS - 1]}
    first = First(worker, judge_process(timeout, worker.place), users)
    try:
        for process in first:
            process.start()
        yield first
    finally:
        first.close()


def _folders_of_ours() -> list[str]:
    """Return the folders of our packages; the kernels may be installed in another folder."""
    folders = [str(Path(__file__).resolve().parents[2])]
    kernels = importlib.util.find_spec("attention_kernels")
    if kernels is not None and kernels.origin is not None:
        folders.append(str(Path(kernels.origin).resolve().parents[1]))
    return folders


def _triton_cache() -> str:
    """Return Triton's usual cache directory.

    Otherwise `torch.compile` would set another directory for the whole process, and later kernels
    would be compiled again.
    """
    home = os.environ.get("TRITON_HOME") or os.path.expanduser("~")
    return os.path.join(home, ".triton", "cache")


def _how_it_ended(code: int | None) -> str:
    if code is None:
        return "the worker closed its pipe and did not end"
    if code >= 0:
        return f"the worker exited with code {code}"
    if code == -signal.SIGKILL:
        return "the worker was ended by SIGKILL, perhaps because the system ran out of memory"
    try:
        return f"the worker was ended by {signal.Signals(-code).name}"
    except ValueError:  # real-time signals have no names
        return f"the worker was ended by signal {-code}"
