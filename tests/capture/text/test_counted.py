"""Numbers are printed with their nouns, in singular or plural."""

from __future__ import annotations

from capture.text.counted import counted


def test_one_has_no_plural() -> None:
    assert [counted(number, "call") for number in (0, 1, 2)] == ["0 calls", "1 call", "2 calls"]
    assert counted(1024, "complete call") == "1,024 complete calls"
