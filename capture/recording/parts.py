"""Which part of the model's call a rank has: by what the user says, or by distributed tensors.

Asks no other rank: a recording must not wait for anybody.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

from torch import Tensor, nn

from capture.call.head_ranges import ranges
from capture.call.splits import SPLITS
from capture.errors import CaptureError
from capture.hooks.interceptor import Arguments
from capture.storage.target import number_of_ranks

if TYPE_CHECKING:
    from torch.distributed.tensor import DTensor

_HEADS = 1
"""The dimension of a query."""


class RankPart(NamedTuple):
    """One rank's part of a call."""

    split: str = ""
    """One of `capture.call.splits.SPLITS`; empty for a whole call."""
    ranks: tuple[int, ...] = ()
    """Those that share the call, in the order of their parts."""
    heads: str = ""
    """The query heads of the whole call that are this part's, where that is known."""


WHOLE = RankPart()


def declared(
    split: str | None,
    ranks: Sequence[int] | None,
    rank: int | None,
    heads: Sequence[int] | None = None,
) -> RankPart | None:
    """Return the part that a user says this rank has; None if nothing is said.

    Args:
        heads: what alone is to be recorded of each call.

    Raises:
        ValueError: it cannot be so.
        CaptureError: nothing says how many ranks there are, or `heads` were given too.
    """
    if split is None:
        if ranks is not None:
            raise ValueError(f"split_ranks requires split: {' or '.join(SPLITS)}")
        return None
    if split not in SPLITS:
        raise ValueError(f"split must be {', '.join(SPLITS)} or None, not {split!r}")
    if heads is not None:
        raise CaptureError(
            "some heads of each part make no whole call: leave out `heads=` or `split=`"
        )
    if rank is None:  # the only one
        return WHOLE
    if ranks is None and number_of_ranks() <= rank:
        raise CaptureError(
            "which ranks share a call is not known: start them with torchrun, or record in a "
            "program, with split_ranks=[0, 1]"
        )
    sharing = tuple(ranks if ranks is not None else range(number_of_ranks()))
    if rank not in sharing:
        raise ValueError(f"rank {rank} is not in split_ranks, {ranges(tuple(sorted(sharing)))}")
    if len(set(sharing)) < len(sharing):
        raise ValueError("split_ranks names a rank twice")
    return RankPart(split, sharing) if len(sharing) > 1 else WHOLE


def of_weights(module: nn.Module, query: Tensor, key: Tensor) -> RankPart:
    """Return the part that an attention module's distributed weights tell of.

    A weight whose rows here are those that make the query, alone or fused with key and value, and
    that is sharded by rows, says that heads are shared out: torch's `parallelize_module`,
    transformers' `tp_plan`.

    Args:
        query: (B, Hq, Sq, D), with the heads of this rank.
        key: (B, Hkv, Sk, D), likewise.
    """
    heads, kv_heads, head_dim = query.shape[-3], key.shape[-3], query.shape[-1]
    for weight in _distributed(module):
        here, everywhere = weight.to_local().shape, weight.shape
        is_of_query = here[0] % (heads * head_dim) == 0  # with a gate, twice as many
        is_fused = here[0] == (heads + 2 * kv_heads) * head_dim
        if len(here) != 2 or here[0] == everywhere[0] or not (is_of_query or is_fused):
            continue
        sharding = [at for at, each in enumerate(weight.placements) if each.is_shard(0)]
        if len(sharding) == 1:
            return _part(weight, sharding[0], heads, ways=everywhere[0] / here[0])
    return WHOLE


def _distributed(module: nn.Module) -> Iterator[DTensor]:
    from torch.distributed.tensor import DTensor

    return (each for each in module.parameters() if isinstance(each, DTensor))


def _part(tensor: DTensor, mesh_dim: int, heads: int, *, ways: float) -> RankPart:
    """Return the part of a rank.

    Args:
        ways: how many times what this rank has makes the whole: its ranks, if all have as much.
    """
    from torch.distributed import get_process_group_ranks

    mesh = tensor.device_mesh
    ranks = tuple(get_process_group_ranks(mesh.get_group(mesh_dim)))
    first = mesh.get_local_rank(mesh_dim) * heads
    is_known = ways == len(ranks)
    return RankPart("heads", ranks, f"{first}-{first + heads - 1}" if is_known else "")


def is_distributed(arguments: Arguments) -> bool:
    """Whether the tensors are distributed ones (`torch.distributed.tensor`)."""
    return type(arguments.query) is not Tensor and hasattr(arguments.query, "to_local")


def as_local(arguments: Arguments, output: Any) -> tuple[Arguments, Any, RankPart] | None:
    """Return what this rank has of a call with distributed tensors, and which part that is.

    None if it is neither a whole call nor some heads of one.
    """
    from torch.distributed.tensor import DTensor

    given = {name: each for name, each in arguments._asdict().items() if isinstance(each, DTensor)}
    query = given["query"]
    placements = query.placements
    for name in ("key", "value"):  # a single head may be every rank's
        each = given.get(name)
        if each is None or (each.placements != placements and each.shape[_HEADS] > 1):
            return None
    if isinstance(output, DTensor) and all(each.is_replicate() for each in output.placements):
        # Gathered on the way, so that each rank has its own part and sends nothing.
        gathered: Any = output.detach()
        output = gathered.redistribute(query.device_mesh, placements)
    if isinstance(output, DTensor) and output.placements != placements:
        return None
    by_heads = [at for at, each in enumerate(placements) if each.is_shard(_HEADS)]
    for name, tensor in given.items():
        for mesh_dim, placement in enumerate(tensor.placements):
            heads = 0 if name == "sinks" else _HEADS
            of_heads = mesh_dim in by_heads and placement.is_shard(heads)
            of_batch = placement.is_shard(0) and name != "sinks"
            if not (placement.is_replicate() or of_batch or of_heads):
                return None
    if len(by_heads) > 1 or query.ndim != 4:
        return None
    here: dict[str, Any] = {name: each.to_local() for name, each in given.items()}
    local = arguments._replace(**here)
    part = WHOLE
    if by_heads:
        heads = local.query.shape[_HEADS]
        part = _part(query, by_heads[0], heads, ways=query.shape[_HEADS] / heads)
    return local, output.to_local() if isinstance(output, DTensor) else output, part
