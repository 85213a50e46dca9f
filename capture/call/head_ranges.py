"""Parses and formats sets of small numbers, such as `0,2,8-11`. Does not import torch."""

from __future__ import annotations

LARGEST = 1 << 16
"""Upper limit of head indices; models have fewer heads."""


def parse_ranges(text: str) -> tuple[int, ...]:
    """Return the numbers in a string such as `0,2,8-11`, sorted and without repetitions.

    Raises:
        ValueError: the string has another form, or a number is 65,536 or more.
    """
    numbers: set[int] = set()
    for part in text.split(","):
        first, dash, last = part.strip().partition("-")
        ends = (first, last) if dash else (first, first)
        if not all(end.isdecimal() and len(end) < 6 and int(end) < LARGEST for end in ends):
            raise ValueError(f"invalid range {part.strip()!r} (must be a number or such as 8-11)")
        if int(ends[0]) > int(ends[1]):
            raise ValueError(f"invalid range {part.strip()!r} (ends before it begins)")
        numbers.update(range(int(ends[0]), int(ends[1]) + 1))
    return tuple(sorted(numbers))


def ranges(numbers: tuple[int, ...]) -> str:
    """Format sorted numbers for `parse_ranges`."""
    runs: list[list[int]] = []
    for number in numbers:
        if runs and runs[-1][-1] == number - 1:
            runs[-1].append(number)
        else:
            runs.append([number])
    return ",".join(f"{run[0]}-{run[-1]}" if len(run) > 1 else str(run[0]) for run in runs)
