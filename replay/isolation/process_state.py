"""What kernels may not change for one another: settings of the process, and functions."""

from __future__ import annotations

from replay.isolation.state_snapshot import HOOKS, RandomState, SettingsSnapshot
from replay.isolation.trusted_functions import TrustedFunctions


class ProcessState:
    """The process as it is now, before any kernel's library is imported."""

    def __init__(self) -> None:
        self._state = SettingsSnapshot()
        self._hooks = SettingsSnapshot(HOOKS)
        self._functions = TrustedFunctions()
        self._random = RandomState()
        self._changed: dict[str, dict[str, None]] = {}
        self._replaced: dict[str, dict[str, None]] = {}

    def restore(self, kernel: str) -> None:
        """Put everything back, and note what this kernel has changed.

        Called whenever a kernel ran, before another does: else that one would be blamed.
        """
        if changed := self._state.restore():
            self._changed.setdefault(kernel, {}).update(dict.fromkeys(changed))
        self._random.restore()
        if replaced := [*self._hooks.restore(), *self._functions.restore()]:
            self._replaced.setdefault(kernel, {}).update(dict.fromkeys(replaced))

    def flags(self, kernel: str) -> tuple[str, ...]:
        """Settings that the kernel was seen to change, one flag each."""
        return tuple(f"changes {name}" for name in self._changed.get(kernel, ()))

    def disturbing(self) -> list[str]:
        """The kernels that changed settings, or after which functions were other ones."""
        return sorted({*self._changed, *self._replaced})

    def replaced(self, kernel: str) -> str:
        """TrustedFunctions that the kernel was seen to replace, in a sentence; empty for none."""
        names = list(self._replaced.get(kernel, ()))
        if not names:
            return ""
        more = f" and {len(names) - 1} more" if len(names) > 1 else ""
        return f"replaces {names[0]}{more}, which measurements rely on"
