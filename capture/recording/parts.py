"""Finds a rank's part of a call from the user's options or from distributed tensors.

The ranks do not communicate, because a recording must not wait for other ranks.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

from torch import Tensor, nn

from capture.call.head_ranges import ranges
from capture.call.per_head import PER_HEAD
from capture.call.splits import SPLITS
from capture.errors import CaptureError
from capture.hooks.interceptor import Arguments
from capture.storage.target import number_of_ranks

if TYPE_CHECKING:
    from torch.distributed.tensor import DTensor

_HEADS = 1
"""Dimension of the heads in a query tensor."""


class RankPart(NamedTuple):
    """Part of a call that one rank holds."""

    split: str = ""
    """One of `capture.call.splits.SPLITS`; empty for a whole call."""
    ranks: tuple[int, ...] = ()
    """Ranks that share the call, in the order of their parts."""
    heads: str = ""
    """Indices of this part's query heads in the whole call; empty if unknown."""


WHOLE = RankPart()


def declared(
    split: str | None,
    ranks: Sequence[int] | None,
    rank: int | None,
    heads: Sequence[int] | None = None,
) -> RankPart | None:
    """Return the part of each call that the user declared for this rank; None without `split`.

    Args:
        heads: query heads of each call that are recorded; None for all.
    """
    if split is None:
        if ranks is not None:
            raise ValueError(f"split_ranks requires split: {' or '.join(SPLITS)}")
        return None
    if split not in SPLITS:
        raise ValueError(f"split must be {', '.join(SPLITS)} or None, not {split!r}")
    if heads is not None:
        raise CaptureError(
            "some heads of each part do not make a whole call: leave out `heads=` or `split=`"
        )
    if rank is None:  # a single process
        return WHOLE
    if ranks is None and number_of_ranks() <= rank:
        raise CaptureError(
            "the ranks that share a call are not known: start them with torchrun, or record in a "
            "program with split_ranks=[0, 1]"
        )
    sharing = tuple(ranks if ranks is not None else range(number_of_ranks()))
    if rank not in sharing:
        raise ValueError(f"rank {rank} is not in split_ranks, {ranges(tuple(sorted(sharing)))}")
    if len(set(sharing)) < len(sharing):
        raise ValueError("split_ranks names a rank twice")
    return RankPart(split, sharing) if len(sharing) > 1 else WHOLE


def of_weights(module: nn.Module, query: Tensor, key: Tensor) -> RankPart:
    """Return the part of a call that follows from an attention module's distributed weights.

    The ranks split the heads if a weight is sharded by rows and its local rows produce the query,
    alone or fused with key and value. Torch's `parallelize_module` and transformers' `tp_plan`
    shard weights in this way.

    Args:
        query: (B, Hq, Sq, D), with the heads of this rank.
        key: (B, Hkv, Sk, D), with the heads of this rank.
    """
    from torch.distributed.tensor import DTensor

    heads, kv_heads, head_dim = query.shape[-3], key.shape[-3], query.shape[-1]
    for weight in module.parameters():
        if not isinstance(weight, DTensor):
            continue
        local, whole = weight.to_local().shape, weight.shape
        is_of_query = local[0] % (heads * head_dim) == 0  # a gate doubles the number of rows
        is_fused = local[0] == (heads + 2 * kv_heads) * head_dim
        if len(local) != 2 or local[0] == whole[0] or not (is_of_query or is_fused):
            continue
        sharding = [dim for dim, place in enumerate(weight.placements) if place.is_shard(0)]
        if len(sharding) == 1:
            return _part(weight, sharding[0], heads, ways=whole[0] / local[0])
    return WHOLE


def _part(tensor: DTensor, mesh_dim: int, heads: int, *, ways: float) -> RankPart:
    """Return this rank's part of a call that is split by heads.

    Args:
        ways: size of the whole call divided by the size of this rank's part. If all parts are
            equal, this is the number of ranks.
    """
    from torch.distributed import get_process_group_ranks

    mesh = tensor.device_mesh
    ranks = tuple(get_process_group_ranks(mesh.get_group(mesh_dim)))
    first = mesh.get_local_rank(mesh_dim) * heads
    is_known = ways == len(ranks)
    return RankPart("heads", ranks, f"{first}-{first + heads - 1}" if is_known else "")


def is_distributed(arguments: Arguments) -> bool:
    """Return whether the tensors are distributed (`torch.distributed.tensor`)."""
    return type(arguments.query) is not Tensor and hasattr(arguments.query, "to_local")


def as_local(arguments: Arguments, output: Any) -> tuple[Arguments, Any, RankPart] | None:
    """Return this rank's tensors of a call with distributed tensors, and its part of the call.

    The result is None if the local tensors are neither a whole call nor some heads of a call.
    """
    from torch.distributed.tensor import DTensor

    given = {name: arg for name, arg in arguments._asdict().items() if isinstance(arg, DTensor)}
    query = given["query"]
    placements = query.placements
    for name in ("key", "value"):  # every rank may hold a single head
        tensor = given.get(name)
        if tensor is None or (tensor.placements != placements and tensor.shape[_HEADS] > 1):
            return None
    if isinstance(output, DTensor) and all(place.is_replicate() for place in output.placements):
        # The output was gathered. Every rank takes its own part without communication.
        gathered: Any = output.detach()
        output = gathered.redistribute(query.device_mesh, placements)
    if isinstance(output, DTensor) and output.placements != placements:
        return None
    by_heads = [dim for dim, place in enumerate(placements) if place.is_shard(_HEADS)]
    for name, tensor in given.items():
        for mesh_dim, placement in enumerate(tensor.placements):
            heads = 0 if name in PER_HEAD else _HEADS
            of_heads = mesh_dim in by_heads and placement.is_shard(heads)
            of_batch = placement.is_shard(0) and name not in PER_HEAD
            if not (placement.is_replicate() or of_batch or of_heads):
                return None
    if len(by_heads) > 1 or query.ndim != 4:
        return None
    local_tensors: dict[str, Any] = {name: tensor.to_local() for name, tensor in given.items()}
    local = arguments._replace(**local_tensors)
    part = WHOLE
    if by_heads:
        heads = local.query.shape[_HEADS]
        part = _part(query, by_heads[0], heads, ways=query.shape[_HEADS] / heads)
    return local, output.to_local() if isinstance(output, DTensor) else output, part
