"""Batches of a toy inference engine: requests arrive at random and share steps of the engine.

The lengths of prompts and answers are log-normal, fitted to public traces (Azure's LLM inference
traces of 2023, Mooncake's conversations). A step decodes one token of every request that has read
its prompt, and reads prompts with the rest of its budget of tokens, in parts if necessary. The
time of a step, which decides how many requests arrive meanwhile, is assumed:
8 ms, 33 µs for each new token and 39 ns for each key.
"""

from __future__ import annotations

import itertools
import random
from collections import deque
from collections.abc import Iterator
from dataclasses import dataclass
from typing import NamedTuple

from capture.call.batch import Batch

LONGEST = 131_072
MOST_REQUESTS = 256
STEP_S, TOKEN_S, KEY_S = 8e-3, 33e-6, 39e-9
WARM_UP = 200
"""Number of steps before the first batch that is returned."""


class Trace(NamedTuple):
    """Requests of a trace; the lengths are of the logarithm."""

    prompt: tuple[float, float]
    """Mean and deviation."""
    answer: tuple[float, float]
    per_second: float


TRACES = {
    "conversation": Trace((6.63, 0.99), (5.02, 0.86), 5.5),
    "code": Trace((7.00, 1.36), (2.79, 0.85), 2.6),
    "mooncake": Trace((8.74, 1.20), (5.34, 1.36), 1.7),
}


@dataclass(eq=False)
class _Request:
    prompt: int
    answer: int
    keys: int = 0
    """Number of tokens in the cache."""

    @property
    def decodes(self) -> bool:
        return self.keys >= self.prompt


def batches(
    trace: str, number: int, chunk: int, rate: float = 1.0, seed: int = 0
) -> list[tuple[str, Batch]]:
    """Return batches of consecutive steps with their phases.

    Args:
        trace: name in `TRACES`.
        chunk: largest number of tokens of a step.
        rate: factor of the trace's requests per second.
    """
    steps = _steps(TRACES[trace], chunk, rate, random.Random(seed))
    return list(itertools.islice(steps, WARM_UP, WARM_UP + number))


def _steps(
    trace: Trace, chunk: int, rate: float, draw: random.Random
) -> Iterator[tuple[str, Batch]]:
    now, waiting, running = 0.0, deque[_Request](), list[_Request]()
    arrival = draw.expovariate(trace.per_second * rate)
    while True:
        while arrival <= now:
            prompt, answer = (
                max(1, int(draw.lognormvariate(*each))) for each in (trace.prompt, trace.answer)
            )
            waiting.append(_Request(min(prompt, LONGEST), answer))
            arrival += draw.expovariate(trace.per_second * rate)
        parts = [(request, 1) for request in running if request.decodes]
        room = chunk - len(parts)
        for request in [*running, *waiting]:
            if room <= 0 or len(running) >= MOST_REQUESTS:
                break
            if not request.decodes:
                parts.append((request, min(request.prompt - request.keys, room)))
                room -= parts[-1][1]
        for _ in range(len(parts) - sum(request in running for request, _ in parts)):
            running.append(waiting.popleft())
        if not parts:
            now = arrival
            continue
        phases = {
            "decode" if request.decodes else "extend" if request.keys else "prefill"
            for request, _ in parts
        }
        for request, tokens in parts:
            request.keys += tokens
        batch = Batch(
            tuple(tokens for _, tokens in parts), tuple(request.keys for request, _ in parts)
        )
        yield phases.pop() if len(phases) == 1 else "mixed", batch
        now += STEP_S + TOKEN_S * sum(batch.queries) + KEY_S * sum(batch.keys)
        running = [each for each in running if each.keys < each.prompt + each.answer]
