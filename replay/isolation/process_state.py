"""The state of the process that kernels share: settings and functions."""

from __future__ import annotations

from replay.isolation.state_snapshot import HOOKS, RandomState, SettingsSnapshot
from replay.isolation.trusted_functions import TrustedFunctions


class ProcessState:
    """State of the process at construction, before any kernel's library is imported."""

    def __init__(self) -> None:
        self._state = SettingsSnapshot()
        self._hooks = SettingsSnapshot(HOOKS)
        self._functions = TrustedFunctions()
        self._random = RandomState()
        self._changed: dict[str, dict[str, None]] = {}
        self._replaced: dict[str, dict[str, None]] = {}

    def restore(self, kernel: str) -> None:
        """Restore everything, and note the changes that this kernel made.

        Call this after every run of a kernel; otherwise the next kernel would be blamed.
        """
        if changed := self._state.restore():
            self._changed.setdefault(kernel, {}).update(dict.fromkeys(changed))
        self._random.restore()
        if replaced := [*self._hooks.restore(), *self._functions.restore()]:
            self._replaced.setdefault(kernel, {}).update(dict.fromkeys(replaced))

    def flags(self, kernel: str) -> tuple[str, ...]:
        """Return a flag for each setting that the kernel changed."""
        return tuple(f"changes {name}" for name in self._changed.get(kernel, ()))

    def disturbing(self) -> list[str]:
        """Return the kernels that changed settings or replaced functions."""
        return sorted({*self._changed, *self._replaced})

    def replaced(self, kernel: str) -> str:
        """Return a sentence about functions that the kernel replaced; empty if it replaced none."""
        names = list(self._replaced.get(kernel, ()))
        if not names:
            return ""
        more = f" and {len(names) - 1} more" if len(names) > 1 else ""
        return f"replaces {names[0]}{more}, which measurements rely on"
