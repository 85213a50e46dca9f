"""A command in the process of the tests."""

from __future__ import annotations

from collections.abc import Callable

import pytest

RunCli = Callable[..., tuple[int, str, str]]


def runner(main: Callable[..., None], capsys: pytest.CaptureFixture[str]) -> RunCli:
    """`run("suite", "flux")`: exit code, stdout and stderr of a command's `main`."""

    def run(*arguments: str) -> tuple[int, str, str]:
        capsys.readouterr()
        with pytest.raises(SystemExit) as stopped:
            main(arguments)
        printed = capsys.readouterr()
        code = stopped.value.code
        assert isinstance(code, int)
        return code, printed.out, printed.err

    return run
