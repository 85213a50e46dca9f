"""The parent's side of a worker: start it, ask it, and tell what happened when it dies."""

from __future__ import annotations

import contextlib
import json
import os
import selectors
import signal
import subprocess
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import IO, Any

from replay.results import Status

LOG_BYTES = 4000
"""What is kept of a dead worker's output: its end."""


class Died(Exception):
    """The worker is gone; `kernel` is what it was doing."""

    def __init__(self, status: Status, reason: str, kernel: str, log: str) -> None:
        super().__init__(reason)
        self.status = status
        self.reason = reason
        self.kernel = kernel
        self.log = log


class Process:
    """A child Python that runs `replay.worker`, started when first asked and again after death.

    Args:
        python: the interpreter; it needs torch and safetensors, and gets this package's source.
        timeout: seconds without a sign of life after which the child is killed.
    """

    def __init__(self, python: str, timeout: float) -> None:
        self.python = python
        self.timeout = timeout
        self._child: subprocess.Popen[bytes] | None = None
        self._requests: IO[str] | None = None
        self._replies = -1
        self._unread = b""
        self._log: IO[bytes] | None = None
        self._sources = _our_packages_alone()

    def ask(self, **request: Any) -> Iterator[dict[str, Any]]:
        """Send a request and yield the replies until the child says it is done.

        Raises:
            Died: the child crashed, hung, lost its GPU, or could not start.
        """
        if self._child is None:
            self._start()
        assert self._requests is not None
        at = ""
        try:
            self._requests.write(json.dumps(request) + "\n")
            self._requests.flush()
        except BrokenPipeError:
            raise self._death("", None) from None
        while True:
            message = self._receive(at)
            if message.get("done"):
                return
            if "lost" in message:
                raise self._death(at, message["lost"])
            at = message.get("at", at)
            yield message

    def close(self) -> None:
        """End the child, whatever it is doing, and everything it started."""
        if self._child is None:
            return
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self._child.pid, signal.SIGKILL)
        self._child.wait()
        if self._requests is not None:
            with contextlib.suppress(BrokenPipeError):
                self._requests.close()
        os.close(self._replies)
        if self._log is not None:
            self._log.close()
        self._child, self._unread = None, b""

    def _start(self) -> None:
        child_reads, we_write = os.pipe()
        we_read, child_writes = os.pipe()
        self._log = tempfile.TemporaryFile()  # noqa: SIM115 - lives as long as the child
        command = [self.python, "-m", "replay.worker", str(child_reads), str(child_writes)]
        inherited = os.environ.get("PYTHONPATH")
        path = os.pathsep.join(filter(None, (self._sources.name, inherited)))
        try:
            self._child = subprocess.Popen(
                command,
                stdin=subprocess.DEVNULL,
                stdout=self._log,
                stderr=self._log,
                pass_fds=(child_reads, child_writes),
                env={**os.environ, "PYTHONPATH": path},
                # A group of its own, so that compilers it started die with it; and Ctrl-C is ours.
                start_new_session=True,
            )
        except OSError as error:
            raise Died("error", f"cannot start {self.python}: {error.strerror}", "", "") from error
        finally:
            os.close(child_reads)
            os.close(child_writes)
        self._requests = os.fdopen(we_write, "w")
        self._replies = we_read

    def _receive(self, at: str) -> dict[str, Any]:
        """The next message.

        Raises:
            Died: there will be none.
        """
        deadline = time.monotonic() + self.timeout
        with selectors.DefaultSelector() as selector:
            selector.register(self._replies, selectors.EVENT_READ)
            while b"\n" not in self._unread:
                if not selector.select(max(0.0, deadline - time.monotonic())):
                    reason = f"no sign of life for {self.timeout:g} s (--timeout)"
                    raise self._death(at, reason, "timeout")
                received = os.read(self._replies, 1 << 16)
                if not received:
                    raise self._death(at, None)
                self._unread += received
        line, _, self._unread = self._unread.partition(b"\n")
        message: dict[str, Any] = json.loads(line)
        return message

    def _death(self, at: str, reason: str | None, status: Status = "crash") -> Died:
        assert self._child is not None
        if reason is None:
            with contextlib.suppress(subprocess.TimeoutExpired):
                self._child.wait(10)
            reason = _how_it_ended(self._child.poll())
        log = self._end_of_log()
        self.close()
        return Died(status, reason, at, log)

    def _end_of_log(self) -> str:
        assert self._log is not None
        size = self._log.seek(0, os.SEEK_END)
        self._log.seek(max(0, size - LOG_BYTES))
        return self._log.read().decode(errors="replace")


def _how_it_ended(code: int | None) -> str:
    if code is None:
        return "the worker closed its pipe and did not end"
    if code < 0:
        name = signal.Signals(-code).name
        hint = ", perhaps by a system out of memory" if name == "SIGKILL" else ""
        return f"the worker was ended by {name}{hint}"
    return f"the worker exited with code {code}"


def _our_packages_alone() -> tempfile.TemporaryDirectory[str]:
    """A directory that holds nothing but links to our packages.

    Another interpreter must not see what is installed beside them for this one.
    """
    directory = tempfile.TemporaryDirectory(prefix="attention-replay-")
    root = Path(__file__).resolve().parent.parent
    for package in ("capture", "replay"):
        (Path(directory.name) / package).symlink_to(root / package)
    return directory
