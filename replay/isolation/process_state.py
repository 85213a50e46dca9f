"""The settings of a process that several kernels share; even honest libraries change settings."""

from __future__ import annotations

from replay.isolation.state_snapshot import RandomState, SettingsSnapshot


class ProcessState:
    """Settings of the process at construction, before any kernel's library is imported."""

    def __init__(self) -> None:
        self._state = SettingsSnapshot()
        self._random = RandomState()
        self._changed: dict[str, dict[str, None]] = {}

    def restore(self, kernel: str) -> None:
        """Restore all settings, and note which of them this kernel changed.

        Call this after every run of a kernel. Otherwise the next kernel would be blamed.
        """
        if changed := self._state.restore():
            self._changed.setdefault(kernel, {}).update(dict.fromkeys(changed))
        self._random.restore()

    def flags(self, kernel: str) -> tuple[str, ...]:
        """Return a flag for each setting that the kernel changed."""
        return tuple(f"changes {name}" for name in self._changed.get(kernel, ()))
