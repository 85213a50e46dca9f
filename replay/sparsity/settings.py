"""Settings of a block-sparse head, and names of kernels with a setting for each head."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal, NamedTuple

from attention_kernels.sparse.block_policy import BlockPolicy

DENSE = 1.0
"""Share of a head that keeps all blocks, by either rule."""


class Setting(NamedTuple):
    """Rule of `BlockPolicy` that takes one number for each head, and the number."""

    rule: Literal["keep", "mass"]
    share: float
    """Number, more than 0 and less than 1."""

    @property
    def policy(self) -> BlockPolicy:
        is_keep = self.rule == "keep"
        return BlockPolicy(keep=self.share) if is_keep else BlockPolicy(mass=self.share)


SETTINGS = (
    *(Setting("keep", share) for share in (0.05, 0.1, 0.2, 0.3, 0.5, 0.75)),
    *(Setting("mass", share) for share in (0.5, 0.7, 0.8, 0.9, 0.95, 0.98)),
)
"""Settings that a tuning tries at each head."""


def named(kernel: str, rule: str, shares: Sequence[float]) -> str:
    """Name a kernel with a share for each head, such as `triton-block-sparse[keep=0.2/1/0.5]`."""
    distinct = shares[:1] if len(set(shares)) == 1 else shares
    return f"{kernel}[{rule}={'/'.join(f'{share:g}' for share in distinct)}]"


def shares_of(name: str, heads: int) -> tuple[str, list[float]]:
    """Return rule and shares of a name that `named` made."""
    rule, _, shares = name.partition("[")[2].removesuffix("]").partition("=")
    found = [float(share) for share in shares.split("/")]
    return rule, found * heads if len(found) == 1 else found
