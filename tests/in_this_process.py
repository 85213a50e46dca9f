"""Runs a command inside the process of the tests."""

from __future__ import annotations

from collections.abc import Callable

import pytest

RunCli = Callable[..., tuple[int, str, str]]


def runner(main: Callable[..., None], capsys: pytest.CaptureFixture[str]) -> RunCli:
    """Return a function that runs `main` and returns its exit code, stdout and stderr."""

    def run(*arguments: str) -> tuple[int, str, str]:
        capsys.readouterr()
        with pytest.raises(SystemExit) as stopped:
            main(arguments)
        printed = capsys.readouterr()
        code = stopped.value.code
        assert isinstance(code, int)
        return code, printed.out, printed.err

    return run
