"""Text that a kernel writes into the pipe of its worker ends the worker."""

from typing import Any

import pytest

from replay.workers.messages import line_of, read

TOKEN = "0123abcd"


@pytest.mark.parametrize(
    "message", [{"at": "torch-math"}, {"probed": "a", "reason": None}, {"row": {"kernel": "a"}}]
)
def test_message_is_read(message: dict[str, Any]) -> None:
    line = line_of(message, TOKEN).encode()
    assert read(line, TOKEN) == message
    with pytest.raises(ValueError, match="its kernel may have written to the pipe"):
        read(line.removeprefix(TOKEN.encode()), TOKEN)


@pytest.mark.parametrize(
    "text",
    [
        *("", "5", "[1, 2]", "{}", "[" * 50_000, "\xff", '{"at": [1]}', '{"row": 5}'),
        *('{"judge": "x"}', '{"origin": 5}', '{"failed": 3}', '{"rounds": true}', '{"other": 1}'),
        *('{"called": "a", "first_call_ms": Infinity}', '{"done": true} {"done": true}'),
    ],
)
def test_other_text_is_refused_even_with_the_token(text: str) -> None:
    with pytest.raises(ValueError, match=r"."):
        read(f"{TOKEN}{text}".encode("latin-1"), TOKEN)
