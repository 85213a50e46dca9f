"""The child process, which handles requests of its parent. Each message is one line of JSON.

Before any work that could end the child, it sends a line that names the work, so that the parent
knows which kernel to blame. Kernels may use stdout and stderr, whose last lines the parent keeps.
"""

from __future__ import annotations

import functools
import gc
import importlib
import json
import os
import sys
import traceback
from collections.abc import Callable
from typing import Any, TextIO

from attention_replay.errors import Error
from replay.isolation.shared_streams import keep_open
from replay.kernels.failures import ContextLost, classify
from replay.workers.messages import line_of

Say = Callable[..., None]
"""Function that sends one line to the parent: `say(name=value, …)`."""

Hear = Callable[[], dict[str, Any]]
"""Function that waits for the parent's next line."""


def main(requests_fd: int, replies_fd: int, handler: str) -> None:
    """Handle requests until the parent closes its end of the pipe.

    Args:
        handler: a module with `handle(request, say, hear)`, which handles one request.
    """
    for descriptor in (requests_fd, replies_fd):
        # A compiler that outlives this process must not inherit the pipes.
        os.set_inheritable(descriptor, False)
    os.register_at_fork(after_in_child=functools.partial(_hang_up, requests_fd, replies_fd))
    requests = os.fdopen(requests_fd, "r")
    replies = os.fdopen(replies_fd, "w", buffering=1)
    for stream in (sys.stdout, sys.stderr):
        keep_open(stream)
    handle = importlib.import_module(handler).handle
    gc.freeze()  # exempts half a million objects of PyTorch from collections
    gc.enable()

    def next_line() -> str:
        os.set_blocking(requests_fd, True)  # a kernel may have changed the mode
        return requests.readline()

    def hear() -> dict[str, Any]:
        line = next_line()
        if not line:  # the parent has ended, or this is a fork by a kernel
            os._exit(0)
        reply: dict[str, Any] = json.loads(line)
        return reply

    _say(replies, "", ready=True)
    while line := next_line():
        request = json.loads(line)
        say = functools.partial(_say, replies, request.pop("token"))
        try:
            handle(request, say, hear)
        except ContextLost as error:
            say(lost=str(error), status=error.status)
            continue
        except MemoryError:  # a kernel took so much that its error could not be handled
            say(lost="it left no memory to go on", status="out-of-memory")
            continue
        except Exception as error:  # a full disk or our own bug, not a kernel's fault
            failed = str(error) if isinstance(error, Error) else classify(error)[1]
            say(failed=failed, traceback=traceback.format_exc())
        say(done=True)


def _hang_up(*descriptors: int) -> None:
    """Disconnect a fork of this process from the parent."""
    nowhere = os.open(os.devnull, os.O_RDWR)
    for descriptor in descriptors:
        os.dup2(nowhere, descriptor, inheritable=False)
    os.close(nowhere)


def _say(replies: TextIO, token: str, **message: Any) -> None:
    os.set_blocking(replies.fileno(), True)
    replies.write(line_of(message, token))
