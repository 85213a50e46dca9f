"""Division by multiplication agrees with Python's division."""

import random

import pytest

pytest.importorskip("triton.experimental.gluon")
from attention_kernels.tiles.division import reciprocal

LARGEST = 2**31 - 1
DIVISORS = [*range(1, 300), 2**16 - 1, 2**16 + 1, 2**30, 2**30 + 1, LARGEST - 1, LARGEST]


def in_python(number: int, reciprocal: int) -> int:
    """Compute `quotient` in Python, with its 64-bit multiplication."""
    product = number * (reciprocal & 0xFFFFFFFF)
    assert product < 2**64
    return product >> (reciprocal >> 32)


def test_quotients_are_exact() -> None:
    """Wrong quotients would occur next to multiples of the divisor."""
    for divisor in DIVISORS:
        rng = random.Random(divisor)
        most, by = LARGEST // divisor, reciprocal(divisor)
        for multiple in {0, 1, 2, most - 1, most, *(rng.randint(0, most) for _ in range(50))}:
            for number in (multiple * divisor - 1, multiple * divisor, multiple * divisor + 1):
                if 0 <= number <= LARGEST:
                    assert in_python(number, by) == number // divisor, (number, divisor)


def test_it_has_the_same_type_for_every_divisor() -> None:
    """Triton would recompile a kernel for an int32 in place of an int64."""
    assert all(2**31 <= reciprocal(divisor) < 2**63 for divisor in DIVISORS)
