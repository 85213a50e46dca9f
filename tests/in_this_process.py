"""Runs a command inside the process of the tests."""

from collections.abc import Callable

import pytest

RunCli = Callable[..., tuple[int, str, str]]


def exit_code(main: Callable[..., None], *arguments: str) -> int:
    with pytest.raises(SystemExit) as stopped:
        main(arguments)
    assert isinstance(stopped.value.code, int)
    return stopped.value.code


def runner(main: Callable[..., None], capsys: pytest.CaptureFixture[str]) -> RunCli:
    """Return a function that runs `main` and returns its exit code, stdout and stderr."""

    def run(*arguments: str) -> tuple[int, str, str]:
        capsys.readouterr()
        code = exit_code(main, *arguments)
        printed = capsys.readouterr()
        return code, printed.out, printed.err

    return run


def refusal(run_cli: RunCli, *arguments: str) -> str:
    """Run a command that must be refused, and return the one line that it prints."""
    code, out, err = run_cli(*arguments)
    assert (code, out, err.count("\n")) == (2, "", 1), err
    assert err.startswith("replay")
    return err
