"""Files of prompts and traces, as an engine's requests."""

from pathlib import Path

import pytest

from capture.engines.requests import Request, RequestsError, read_prompts, read_trace

MOONCAKE = """{"timestamp": 3000, "input_length": 700, "output_length": 5, "hash_ids": [7, 8]}
{"timestamp": 1000, "input_length": 600, "output_length": 0, "hash_ids": [7, 9]}
"""
AZURE = """TIMESTAMP,ContextTokens,GeneratedTokens
2023-11-16 18:15:46.6805900,600,1
2023-11-16 18:15:48.6805900,700,5
"""


def test_prompts_are_lines_of_text_or_json(tmp_path: Path) -> None:
    file = tmp_path / "prompts"
    file.write_text('a panda\n\n{"prompt": "a street", "max_tokens": 3}\n{"prompt": [4, 5]}\n')
    assert read_prompts(file) == [
        Request("a panda", 64),
        Request("a street", 3),
        Request((4, 5), 64),
    ]


@pytest.mark.parametrize("text", [MOONCAKE, AZURE], ids=["mooncake", "azure"])
def test_trace_gives_lengths_in_order_of_arrival(text: str, tmp_path: Path) -> None:
    file = tmp_path / "trace"
    file.write_text(text)
    first, second = read_trace(file, vocabulary=50, seed=0)
    for request, length, tokens, arrival in ((first, 600, 1, 0), (second, 700, 5, 2)):
        assert len(request.prompt) == length
        assert set(request.prompt) == set(range(50))
        assert (request.max_tokens, request.ignores_end) == (tokens, True)
        assert request.arrival == pytest.approx(arrival, abs=1e-6)
    shared = 512 if text is MOONCAKE else 0
    assert first.prompt[:shared] == second.prompt[:shared]
    assert first.prompt[shared : shared + 80] != second.prompt[shared : shared + 80]
    assert [first, second] == read_trace(file, vocabulary=50, seed=0)


@pytest.mark.parametrize(
    ("text", "reason"),
    [
        ("", " contains no requests"),
        ('{"input_length": 5,', ", line 1 is not JSON: "),
        ('\n{"input_length": 5, "timestamp": 0}', ", line 2: no 'output_length'"),
        (
            "TIMESTAMP,ContextTokens,GeneratedTokens\ntoday,5,5",
            ", line 2: TIMESTAMP 'today' is not",
        ),
        ("some text", ", line 1: "),
    ],
)
def test_invalid_trace_is_refused_with_its_line(text: str, reason: str, tmp_path: Path) -> None:
    file = tmp_path / "trace"
    file.write_text(text)
    with pytest.raises(RequestsError) as error:
        read_trace(file, vocabulary=50, seed=0)
    assert str(error.value).startswith(f"{file}{reason}")
