"""Reads the requests that an engine is to answer. Does not import torch.

Prompts are lines of text, or JSON lines `{"prompt": TEXT or LIST OF TOKEN IDS, "max_tokens": N}`.
A trace has lengths and arrivals in one of two public forms: JSON lines with `timestamp` (in
milliseconds), `input_length` and `output_length`, as in Mooncake's traces, or a CSV table with the
columns TIMESTAMP, ContextTokens and GeneratedTokens, as in Azure's.
"""

from __future__ import annotations

import csv
import json
import random
import re
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from datetime import datetime, timezone
from pathlib import Path
from typing import Any

from attention_replay.errors import Error

NEW_TOKENS = 64
"""Tokens to generate for a prompt without `max_tokens`."""

PREFIX_BLOCK = 512
"""Number of tokens that each of a request's `hash_ids` stands for in Mooncake's traces."""


class RequestsError(Error):
    """A file of prompts or a trace cannot be used; the message names the line."""


@dataclass(frozen=True)
class Request:
    """One request to an engine."""

    prompt: str | tuple[int, ...]
    """Text or token ids."""
    max_tokens: int
    arrival: float = 0.0
    """Time after the first request, in seconds."""
    ignores_end: bool = False
    """True to generate exactly `max_tokens` tokens."""


def read_prompts(path: Path) -> list[Request]:
    """Read prompts, which all arrive at once.

    Raises:
        RequestsError: the file cannot be read, contains no prompt, or has an invalid line.
    """

    def request(line: Any) -> Request:
        if isinstance(line, str):
            return Request(line, NEW_TOKENS)
        prompt = line["prompt"]
        if not isinstance(prompt, str):
            prompt = tuple(map(int, prompt))
        return Request(prompt, int(line.get("max_tokens", NEW_TOKENS)))

    return _requests(path, request)


def read_trace(path: Path, vocabulary: int, seed: int) -> list[Request]:
    """Read a trace, and draw token ids for its requests: random ones, or shared by `hash_ids`.

    Args:
        vocabulary: number of token ids.

    Raises:
        RequestsError: the file cannot be read, contains no request, or has an invalid line.
    """
    draw = random.Random(seed)

    def tokens(length: int, blocks: list[int]) -> tuple[int, ...]:
        shared = [random.Random(f"{seed} {block}") for block in blocks[: length // PREFIX_BLOCK]]
        draws = [each for each in shared for _ in range(PREFIX_BLOCK)]
        draws += [draw] * (length - len(draws))
        return tuple(each.randrange(vocabulary) for each in draws)

    def request(line: Any) -> Request:
        if "ContextTokens" in line:
            lengths = int(line["ContextTokens"]), int(line["GeneratedTokens"])
            arrival = _seconds(line["TIMESTAMP"])
        else:
            lengths = int(line["input_length"]), int(line["output_length"])
            arrival = float(line["timestamp"]) / 1000
        prompt = tokens(max(lengths[0], 1), line.get("hash_ids", []))
        return Request(prompt, max(lengths[1], 1), arrival, ignores_end=True)

    requests = sorted(_requests(path, request), key=lambda each: each.arrival)
    return [replace(each, arrival=each.arrival - requests[0].arrival) for each in requests]


def _requests(path: Path, request: Callable[[Any], Request]) -> list[Request]:
    found = []
    for number, line in _lines(path):
        try:
            found.append(request(line))
        except (AttributeError, KeyError, TypeError, ValueError) as error:
            reason = f"no {error}" if isinstance(error, KeyError) else str(error)
            raise RequestsError(f"{path}, line {number}: {reason}") from error
    if not found:
        raise RequestsError(f"{path} contains no requests")
    return found


def _lines(path: Path) -> Iterator[tuple[int, Any]]:
    """Yield each line with its number: a JSON value, a row of a CSV table, or text."""
    try:
        lines = path.read_text(encoding="utf-8").splitlines()
    except (OSError, UnicodeDecodeError) as error:
        reason = error.strerror if isinstance(error, OSError) else "not UTF-8 text"
        raise RequestsError(f"cannot read {path}: {reason}") from error
    if lines and "ContextTokens" in lines[0] and not lines[0].startswith("{"):
        yield from enumerate(csv.DictReader(lines), 2)
        return
    for number, line in enumerate(lines, 1):
        if line.startswith("{"):
            try:
                yield number, json.loads(line)
            except ValueError as error:
                raise RequestsError(f"{path}, line {number} is not JSON: {error}") from error
        elif line.strip():
            yield number, line


def _seconds(moment: str) -> float:
    """Return the seconds since 1970 of a time such as `2023-11-16 18:15:46.6805900`."""
    found = re.fullmatch(r"(\d{4}-\d\d-\d\d.\d\d:\d\d:\d\d)(\.\d+)?.*", moment)
    if found is None:
        raise ValueError(f"TIMESTAMP {moment!r} is not a date and time")
    whole = datetime.fromisoformat(found[1]).replace(tzinfo=timezone.utc)
    return whole.timestamp() + float(found[2] or 0)
