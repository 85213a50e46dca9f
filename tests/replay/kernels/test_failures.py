"""An exception becomes a row's status and one line that fits a table."""

from pathlib import Path

import pytest
import torch

from replay.kernels.failures import LONGEST_REASON, classify
from replay.kernels.registry import find

CUDA = (
    "CUDA out of memory. Tried to allocate 20.00 GiB. GPU 0 has a total capacity of 79.11 GiB of "
    "which 10.05 GiB is free. Including non-PyTorch memory, this process has 69.05 GiB memory in "
    "use. Of the allocated memory 68.31 GiB is allocated by PyTorch, and 12.34 MiB is reserved."
)
CPU = (
    "[enforce fail at alloc_cpu.cpp:119] err == 0. DefaultCPUAllocator: can't allocate memory: you "
    "tried to allocate 1610612736 bytes. Error code 12 (Cannot allocate memory)"
)


class Silent(Exception):
    def __str__(self) -> str:
        raise SystemExit(3)


@pytest.mark.parametrize(
    ("error", "status", "reason"),
    [
        (
            torch.OutOfMemoryError(CUDA),
            "out-of-memory",
            "needed 20.00 GiB, 10.05 GiB of 79.11 GiB free",
        ),
        (RuntimeError(CPU), "out-of-memory", "needed 1.5 GiB"),
        (
            RuntimeError(
                "[DefaultCPUAllocator] not enough memory: you tried to allocate 12 bytes."
            ),
            "out-of-memory",
            "needed 12 bytes",
        ),
        (MemoryError(), "out-of-memory", "MemoryError"),
        (MemoryError("too much"), "out-of-memory", "too much"),
        (SystemExit(0), "error", "SystemExit: 0"),
        (GeneratorExit(), "error", "GeneratorExit: GeneratorExit"),
        (Silent(), "error", "Silent: no message, since asking for it raises SystemExit"),
        (ValueError("no such tile\nlong story"), "error", "ValueError: no such tile"),
        (NotImplementedError("head_dim 64 only\nlong story"), "unsupported", "head_dim 64 only"),
        (NotImplementedError(), "unsupported", "NotImplementedError"),
    ],
)
def test_an_exception_becomes_one_line(error: BaseException, status: str, reason: str) -> None:
    assert classify(error) == (status, reason)


def test_an_interruption_is_not_caught() -> None:
    with pytest.raises(KeyboardInterrupt):
        classify(KeyboardInterrupt())


def test_an_error_in_a_users_file_says_where(tmp_path: Path) -> None:
    """A user's message is kept in full; a library's message is cut to its first line."""
    file = tmp_path / "mine.py"
    file.write_text(
        "import json\n"
        "def own(query, key, value):\n    raise ValueError('must be\\na power of 2')\n"
        "def theirs(query, key, value):\n    json.loads('')\n"
        "def silent(query, key, value):\n    assert False\n"
    )
    for name, reason in (
        ("own", "ValueError: must be a power of 2 (mine.py, line 3)"),
        ("theirs", "JSONDecodeError: Expecting value: line 1 column 1 (char 0) (mine.py, line 5)"),
        ("silent", "AssertionError: AssertionError (mine.py, line 7)"),
    ):
        kernel = find(f"{file}:{name}").loaded()
        with pytest.raises(Exception) as caught:  # noqa: PT011
            kernel.attention(None, None, None)
        assert classify(caught.value) == ("error", reason)


def test_a_long_message_is_cut_and_printable() -> None:
    status, reason = classify(RuntimeError("\x1b[31m" + "x" * 10_000))
    assert status == "error"
    assert reason.isprintable()
    assert len(reason) < LONGEST_REASON + 50
