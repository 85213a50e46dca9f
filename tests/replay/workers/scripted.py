"""Workers with scripted messages, which take the place of processes."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

from replay.workers.process import Died

Script = Sequence[Any]
"""Messages of a worker for one request; an exception among the messages is raised."""


class Scripted:
    """Process with a script for each request.

    After a message with `rounds`, the process takes every turn that it gets. A number under
    `dies_at` is the turn in which the process dies.
    """

    python, pid = "python", None

    def __init__(self, *scripts: Script, environment: str = "this", name: str = "") -> None:
        self.environment, self.name = environment, name
        self.scripts = list(scripts)
        self.requests: list[dict[str, Any]] = []
        self.turns: list[int] = []
        self.after_another: list[bool] = []
        self.is_running, self.is_closed, self.closings = False, True, 0
        self.goes_on = False
        """True if the process goes on although it was stopped."""
        self.left_work, self.probes = False, 0
        """True from a message to the closing of the process; probes since the last message."""
        self.others: list[Scripted] = []
        """Processes that must not run while this process runs."""

    def ask(self, **request: Any) -> Iterator[dict[str, Any]]:
        self._run()
        self.requests.append(request)
        for message in self.scripts.pop(0):
            if isinstance(message, Exception):
                raise message
            yield {name: value for name, value in message.items() if name != "dies_at"}
            while "rounds" in message and "number" in self._told:
                self.turns.append(self._told["number"])
                self.after_another.append(self._told["after_another"])
                if self.turns[-1] == message.get("dies_at"):
                    raise died(message.get("at", "mine"))
                yield {"taken": True, "enough": False}

    def tell(self, **message: Any) -> None:
        self._run()
        self._told = message
        self.left_work, self.probes = True, 0

    def _run(self) -> None:
        self.is_running, self.is_closed = True, False
        assert not any(each.is_running for each in self.others)

    def stop(self) -> None:
        self.is_running = False

    def ran_while_stopped(self) -> bool:
        return self.goes_on and not self.is_closed

    def close(self) -> None:
        self.closings += not self.is_closed
        self.is_running, self.is_closed, self.left_work = False, True, False

    def broken(self, reason: str) -> Died:
        return died("")

    def another(self) -> Scripted:
        return Scripted(environment=self.environment)

    def kernels(self) -> list[list[str]]:
        return [request["kernels"] for request in self.requests]


def died(kernel: str) -> Died:
    return Died("crash", "gone", kernel, "its last words")
