"""Pieces of a head dimension whose sizes are powers of two."""

from __future__ import annotations

import triton


def pieces(head_dim: int, are_copied: bool) -> tuple[int, int]:
    """Return two powers of two that together cover a head dimension; the second may be 0.

    Each piece is at least 16. There is a second piece only if the two pieces together are smaller
    than the next power of two.

    Args:
        are_copied: whether rows are copied to shared memory asynchronously: they begin at multiples
            of 16 bytes, and every block is read. Other rows have one piece: two pieces gave wrong
            results at head_dim 72 and, with skipped blocks, 96 on an H200 with Triton 3.6, for an
            unknown reason.
    """
    whole = max(16, int(triton.next_power_of_2(head_dim)))
    if whole in (head_dim, 16) or not are_copied:
        return whole, 0
    main = whole // 2
    rest = max(16, triton.next_power_of_2(head_dim - main))
    return (main, rest) if main >= 16 and main + rest < whole else (whole, 0)
