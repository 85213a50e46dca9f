"""The first screen answers, fits a terminal and claims only measured results."""

import io
import re

import pytest
from rich.console import Console

from replay.report.matrix_table import print_first_screen
from replay.rows.row import INTERRUPTED_BLOCKS, Row
from replay.timing.defaults import ROUNDS
from tests.replay.report.test_matrix import on, quantised


def screen(rows: list[Row], width: int = 80, *, color: bool = False) -> str:
    file = io.StringIO()
    system = "standard" if color else None
    console = Console(
        file=file, width=width, highlight=False, force_terminal=color, color_system=system
    )
    print_first_screen(rows, console, "machine")
    return file.getvalue()


def rows() -> list[Row]:
    return [
        *(on(call, "base") for call in "abc"),
        *(on(call, "[/red]") for call in "ab"),
        on("a", "mine", 0.8),
        on("b", "mine", 2.0),
        quantised("a", "sage", 4.0),
        on("b", "zeros", 0.1, status="inaccurate", reason="max abs error 3 exceeds 1"),
        on("b", "twos", 0.1, status="inaccurate", reason="max abs error 2 exceeds 1"),
        on("a", "hangs", status="timeout", reason="took 300 s"),
        on("b", "hangs", status="timeout", reason="took 301 s"),
        on("c", "noisy", (0.4, 5.0) * 5),
        *(on("a", f"cuda-{i}", status="unavailable", reason="needs a GPU") for i in range(47)),
    ]


def test_first_screen_answers_first_and_lists_each_kernel_once() -> None:
    lines = screen(rows()).splitlines()
    assert lines[0] == "mine: 1.25× in 1 of 3 kinds of call; elsewhere keep base."
    cells = {
        line.split()[0]: line.split()[1:] for line in lines if re.match(r"\S+ .*[=✗?–×]", line)
    }
    assert cells["mine"] == ["1.25×", "0.50×", "–"]
    assert cells["[/red]"] == ["=", "=", "–"]
    assert cells["zeros"] == ["–", "✗", "–"]
    assert cells["sage"] == ["(quantised)", "0.25×", "–", "–"]
    assert cells["noisy"] == ["–", "–", "?"]
    assert "✗ zeros in B: max abs error 3 exceeds 1" in lines
    assert "✗ twos in B: max abs error 2 exceeds 1" in lines
    assert "✗ hangs in A, B: timeout: took 300 s" in lines
    own = "[/red], mine, hangs in C; sage in B, C; noisy in A, B; zeros, twos in A, C"
    assert f"– {own}: it was not replayed" in screen(rows(), 200).splitlines()
    assert "47 kernels not available here, listed by: replay kernels" in lines
    assert "cuda-" not in "".join(lines)
    assert "within" not in screen([on("a", "base", reason="max abs error 1 is within 2")])


@pytest.mark.parametrize(
    ("mine", "line"),
    [
        (on("a", "mine", flags=(INTERRUPTED_BLOCKS,)), "busy machine: use a quieter machine"),
        (on("a", "mine", (0.4, 5.0) * 5), "interval too wide: more --rounds and --max-seconds"),
        (on("a", "mine", (0.9, 1.1, 0.9)), f"too few rounds: --rounds {ROUNDS}"),
    ],
)
def test_inconclusive_speedup_has_a_remedy(mine: Row, line: str) -> None:
    assert f"? mine: {line}" in screen([on("a", "base"), mine]).splitlines()


@pytest.mark.parametrize("width", [40, 80, 100, 160])
def test_first_screen_fits_its_width(width: int) -> None:
    text = screen(rows(), width)
    assert max(map(len, text.splitlines())) <= width
    assert len(text.splitlines()) <= 40 or width < 80


def test_speedups_are_coloured_only_with_colour() -> None:
    coloured = screen(rows(), color=True)
    assert re.search(r"\x1b\[32m *1\.25×", coloured)
    assert re.search(r"\x1b\[31m *0\.50×", coloured)
    assert "\x1b" not in screen(rows())
