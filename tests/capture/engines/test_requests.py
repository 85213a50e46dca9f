"""Files of prompts and traces, as an engine's requests."""

import json
import math
from pathlib import Path
from typing import Any

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
    lines = '[INST] a panda\n\n{"prompt": "a\u2028b", "max_tokens": 3}\n{"prompt": [4, 5]}\n'
    file.write_text(f"\ufeff{lines}", encoding="utf-8")
    expected = [("[INST] a panda", 64), ("a\u2028b", 3), ((4, 5), 64)]
    assert read_prompts(file) == [Request(*each) for each in expected]


@pytest.mark.parametrize("text", [MOONCAKE, AZURE], ids=["mooncake", "azure"])
def test_trace_gives_lengths_in_order_of_arrival(text: str, tmp_path: Path) -> None:
    file = tmp_path / "trace"
    file.write_text(text)
    requests = read_trace(file)
    first, second = (each.prompt.tokens(50, seed=0) for each in requests)
    for request, length, tokens, arrival in zip(requests, (600, 700), (1, 5), (0, 2), strict=True):
        assert request.prompt.length == length
        assert (request.max_tokens, request.ignores_end) == (tokens, True)
        assert request.arrival == pytest.approx(arrival, abs=1e-6)
    assert (len(first), len(second), {*first}, {*second}) == (600, 700, {*range(50)}, {*range(50)})
    shared = 512 if text is MOONCAKE else 0
    assert first[:shared] == second[:shared]
    assert first[shared : shared + 80] != second[shared : shared + 80]
    assert first == requests[0].prompt.tokens(50, seed=0) != requests[0].prompt.tokens(50, seed=1)


TRACED = {"timestamp": 1, "input_length": 5, "output_length": 5}
AZURES = AZURE.splitlines()[0]


@pytest.mark.parametrize(
    ("read", "text", "reason"),
    [
        (read_trace, "", " contains no requests"),
        (read_trace, '{"input_length": 5,', ", line 1 is not JSON ("),
        (read_trace, '\n{"input_length": 5, "timestamp": 0}', ", line 2: needs input_length, "),
        (read_trace, "some text", ", line 1: needs input_length, output_length and timestamp"),
        (read_trace, {"input_length": -5}, ", line 1: input_length is -5 (must be a whole number"),
        (read_trace, {"input_length": math.inf}, ", line 1: input_length is inf (must be a"),
        (read_trace, {"timestamp": math.nan}, ", line 1: timestamp is nan (must be a number of"),
        (read_trace, {"hash_ids": 7}, ", line 1: hash_ids is 7 (must be a list of whole numbers)"),
        (read_trace, f"{AZURES}\ntoday,5,5", ", line 2: TIMESTAMP is 'today' (must be as in"),
        (read_trace, f"{AZURES}\n2023-11-16 18:15:46", ", line 2: needs ContextTokens, "),
        (read_trace, f"{AZURES}\n2023-99-16 18:15:46,5,5", ", line 2: TIMESTAMP is '2023-99-"),
        (read_prompts, "{name} is", ", line 1 is not JSON ("),
        (read_prompts, '[{"prompt": "a"}]', ", line 1 is a JSON array: write each request"),
        (read_prompts, {"text": "a"}, ', line 1: needs "prompt": a text, or a list of token ids'),
        (read_prompts, {"prompt": []}, ', line 1: needs "prompt": a text, or a list of token ids'),
        (read_prompts, {"prompt": [1.5]}, ", line 1: a token id is 1.5 (must be a whole number"),
        (read_prompts, {"prompt": "a", "max_tokens": 0}, ", line 1: max_tokens is 0 (must be a"),
    ],
)
def test_invalid_line_is_refused_with_its_number(
    read: Any, text: Any, reason: str, tmp_path: Path
) -> None:
    file = tmp_path / "trace"
    traced = TRACED if read is read_trace else {}
    file.write_text(text if isinstance(text, str) else json.dumps({**traced, **text}))
    with pytest.raises(RequestsError) as error:
        read(file)
    assert str(error.value).startswith(f"{file}{reason}")
