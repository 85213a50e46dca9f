"""Reads the requests that an engine is to answer. Does not import torch.

Prompts are lines of text, or JSON lines `{"prompt": TEXT or LIST OF TOKEN IDS, "max_tokens": N}`.
A trace has lengths and arrivals in one of two public forms: JSON lines with `timestamp` (in
milliseconds), `input_length` and `output_length`, as in Mooncake's traces, or a CSV table with the
columns TIMESTAMP, ContextTokens and GeneratedTokens, as in Azure's.
"""

from __future__ import annotations

import csv
import itertools
import json
import math
import random
import re
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from datetime import datetime, timezone
from pathlib import Path
from typing import Any

from attention_replay.errors import Error, shortened

NEW_TOKENS = 64
"""Tokens to generate for a prompt without `max_tokens`."""

PREFIX_BLOCK = 512
"""Number of tokens that each of a request's `hash_ids` stands for in Mooncake's traces."""


class RequestsError(Error):
    """A file of prompts or a trace cannot be used; the message names the line."""


@dataclass(frozen=True)
class RandomPrompt:
    """Token ids that are drawn when the engine needs them, because a trace may have millions."""

    length: int
    number: int
    """Number of the request, which makes its tokens differ from those of others."""
    blocks: tuple[int, ...] = ()
    """Numbers of the first blocks of `PREFIX_BLOCK` tokens, which requests may share."""

    def tokens(self, vocabulary: int, seed: int) -> list[int]:
        """Draw the token ids.

        Args:
            vocabulary: number of token ids.
        """
        blocks = self.blocks[: self.length // PREFIX_BLOCK]
        parts = [(f"{seed} block {block}", PREFIX_BLOCK) for block in blocks]
        parts.append((f"{seed} {self.number}", self.length - PREFIX_BLOCK * len(blocks)))
        every = range(vocabulary)
        return [
            each for key, length in parts for each in random.Random(key).choices(every, k=length)
        ]


@dataclass(frozen=True)
class Request:
    """One request to an engine."""

    prompt: str | tuple[int, ...] | RandomPrompt
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
        prompt = line.get("prompt")
        if isinstance(prompt, list):
            prompt = tuple(_whole("a token id", token, 0) for token in prompt)
        if not prompt or not isinstance(prompt, str | tuple):
            raise ValueError('needs "prompt": a text, or a list of token ids, which is not empty')
        return Request(prompt, _whole("max_tokens", line.get("max_tokens", NEW_TOKENS), 1))

    return _requests(path, request)


def read_trace(path: Path) -> list[Request]:
    """Read the lengths and arrivals of a trace, in the order of arrival.

    Raises:
        RequestsError: the file cannot be read, contains no request, or has an invalid line.
    """
    numbers = itertools.count()

    def request(line: Any) -> Request:
        is_table = "ContextTokens" in line
        names = (
            ("ContextTokens", "GeneratedTokens", "TIMESTAMP")
            if is_table
            else ("input_length", "output_length", "timestamp")
        )
        if isinstance(line, str) or any(line.get(name) is None for name in names):
            raise ValueError(f"needs {', '.join(names[:2])} and {names[2]}")
        read, written = (_whole(name, line[name], 0) for name in names[:2])
        arrival = _seconds(line[names[2]]) if is_table else _milliseconds(line[names[2]]) / 1000
        blocks = line.get("hash_ids") or []
        if not isinstance(blocks, list):
            raise ValueError(f"hash_ids is {blocks!r} (must be a list of whole numbers)")
        shared = tuple(_whole("hash_ids", block, 0) for block in blocks)
        prompt = RandomPrompt(max(read, 1), next(numbers), shared)
        return Request(prompt, max(written, 1), arrival, ignores_end=True)

    requests = sorted(_requests(path, request), key=lambda each: each.arrival)
    return [replace(each, arrival=each.arrival - requests[0].arrival) for each in requests]


def _requests(path: Path, request: Callable[[Any], Request]) -> list[Request]:
    found = []
    for number, line in _lines(path):
        try:
            found.append(request(line))
        except ValueError as error:
            raise RequestsError(f"{path}, line {number}: {shortened(str(error))}") from error
    if not found:
        raise RequestsError(f"{path} contains no requests")
    return found


def _lines(path: Path) -> Iterator[tuple[int, Any]]:
    """Yield each line with its number: a JSON object, a row of a CSV table, or text."""
    try:
        with path.open(encoding="utf-8-sig") as lines:  # tables often begin with a byte-order mark
            first = lines.readline()
            lines.seek(0)
            if "ContextTokens" in first and not first.startswith("{"):
                yield from enumerate(csv.DictReader(lines), 2)
                return
            for number, line in enumerate(lines, 1):
                if text := line.strip():
                    yield number, _object(path, number, text) if text[0] in "{[" else text
    except (OSError, UnicodeDecodeError, csv.Error) as error:
        reason = error.strerror if isinstance(error, OSError) else "not UTF-8 text"
        raise RequestsError(f"cannot read {path}: {reason}") from error


def _object(path: Path, number: int, text: str) -> Any:
    """Return a line's JSON object, or the text of a line such as `[INST] Hello`."""
    try:
        found = json.loads(text)
    except (ValueError, RecursionError) as error:
        if text[0] == "[":
            return text
        reason = f'is not JSON ({error}): write a text with a brace as {{"prompt": TEXT}}'
    else:
        if isinstance(found, dict):
            return found
        reason = "is a JSON array: write each request as an object on a line of its own"
    raise RequestsError(f"{path}, line {number} {reason}")


def _whole(name: str, given: Any, least: int) -> int:
    """Return a whole number that JSON, or the text of a table, gives.

    Raises:
        ValueError: it is another value, or smaller than `least`.
    """
    value = given
    if isinstance(given, str) and re.fullmatch(r"-?\d{1,18}", given.strip(), re.ASCII):
        value = int(given)
    if type(value) is not int or value < least:
        raise ValueError(f"{name} is {given!r} (must be a whole number of at least {least})")
    return value


def _milliseconds(given: Any) -> float:
    if isinstance(given, int | float) and math.isfinite(given):
        return float(given)
    raise ValueError(f"timestamp is {given!r} (must be a number of milliseconds)")


def _seconds(moment: str) -> float:
    """Return the seconds since 1970 of a time such as `2023-11-16 18:15:46.6805900`."""
    found = re.fullmatch(r"(\d{4}-\d\d-\d\d.\d\d:\d\d:\d\d)(\.\d+)?.*", moment)
    try:
        whole = datetime.fromisoformat(found[1] if found else "").replace(tzinfo=timezone.utc)
    except ValueError:
        example = "2023-11-16 18:15:46.68"
        raise ValueError(f"TIMESTAMP is {moment!r} (must be as in {example})") from None
    return whole.timestamp() + float((found and found[2]) or 0)
