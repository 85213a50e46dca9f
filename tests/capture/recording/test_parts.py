"""Each rank records its part of a call; the group of ranks is simulated."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as group
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Replicate, Shard
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.testing._internal.distributed.fake_pg import FakeStore

from capture import load, record
from capture.errors import CaptureError
from capture.recording.parts import WHOLE, RankPart, declared, of_weights
from tests.factories import normal


@pytest.fixture
def four_ranks(request: pytest.FixtureRequest) -> Iterator[None]:
    """Make this process one rank of four (by default rank 1), with collectives that do nothing."""
    rank = getattr(request, "param", 1)
    group.init_process_group("fake", rank=rank, world_size=4, store=FakeStore())
    # Other backends make PyTorch try every way to split tensors, which takes seconds.
    with sdpa_kernel(SDPBackend.MATH):
        yield
    group.destroy_process_group()


class Sdpa(nn.Module):
    def forward(self, *tensors: Tensor, **options: Any) -> Tensor:
        return F.scaled_dot_product_attention(*tensors, **options)


class Attention(nn.Module):
    """Attention with sixteen heads of dimension eight."""

    def __init__(self, *, fused: bool = False, rows: int = 128) -> None:
        super().__init__()
        self.q_proj = nn.Linear(128, 3 * rows if fused else rows, bias=False)
        self.o_proj = nn.Linear(128, 128, bias=False)


def distributed(tensor: Tensor, placement: Any) -> DTensor:
    """Return a distributed tensor whose local part, on this rank of four, is `tensor`."""
    mesh = init_device_mesh("cpu", (4,))
    return DTensor.from_local(tensor, mesh, [placement], run_check=False)


def query_and_key(heads: int, kv_heads: int) -> tuple[Tensor, Tensor]:
    return normal(1, heads, 3, 8), normal(1, kv_heads, 3, 8)


@pytest.mark.usefixtures("four_ranks")
@pytest.mark.parametrize(
    ("attention", "heads", "kv_heads", "expected"),
    [
        (Attention(), 4, 4, RankPart("heads", (0, 1, 2, 3), "4-7")),
        (Attention(), 4, 1, RankPart("heads", (0, 1, 2, 3), "4-7")),
        (Attention(fused=True), 4, 4, RankPart("heads", (0, 1, 2, 3), "4-7")),
        (Attention(rows=256), 4, 4, RankPart("heads", (0, 1, 2, 3), "4-7")),  # has a gate
        (Attention(rows=112), 4, 4, WHOLE),  # 28 rows are not four heads
        (Attention(), 16, 16, WHOLE),  # heads are gathered before attention
    ],
)
def test_weights_sharded_by_rows_give_the_rank_its_heads(
    attention: Attention, heads: int, kv_heads: int, expected: RankPart
) -> None:
    mesh = init_device_mesh("cpu", (4,))
    parallelize_module(attention, mesh, {"q_proj": ColwiseParallel(), "o_proj": RowwiseParallel()})
    assert of_weights(attention, *query_and_key(heads, kv_heads)) == expected


@pytest.mark.usefixtures("four_ranks")
def test_ranks_are_those_of_the_mesh() -> None:
    """The ranks are numbered by a mesh of two groups of two ranks."""
    attention = Attention()
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("data", "heads"))
    parallelize_module(attention, mesh["heads"], {"q_proj": ColwiseParallel()})
    assert of_weights(attention, *query_and_key(8, 8)) == RankPart("heads", (0, 1), "8-15")


@pytest.mark.parametrize(("four_ranks", "heads"), [(1, 2), (3, 1)], indirect=["four_ranks"])
@pytest.mark.usefixtures("four_ranks")
def test_uneven_heads_have_no_known_range(heads: int) -> None:
    """If four ranks share seven heads, three ranks have two heads and the last rank has one."""
    attention = Attention(rows=7 * 2)
    parallelize_module(attention, init_device_mesh("cpu", (4,)), {"q_proj": ColwiseParallel()})
    query = normal(1, heads, 3, 2)
    assert of_weights(attention, query, query) == RankPart("heads", (0, 1, 2, 3))


@pytest.mark.usefixtures("four_ranks")
def test_plain_and_replicated_weights_mean_a_whole_call() -> None:
    attention = Attention()
    assert of_weights(attention, *query_and_key(4, 4)) == WHOLE
    weight = attention.q_proj.weight.data
    attention.q_proj.weight = nn.Parameter(distributed(weight, Replicate()))
    assert of_weights(attention, *query_and_key(4, 4)) == WHOLE


@pytest.mark.usefixtures("four_ranks")
@pytest.mark.parametrize(
    ("placement", "shape", "heads"),
    [
        (Shard(1), (2, 2, 5, 8), "2-3"),
        (Shard(0), (2, 8, 5, 8), ""),
        (Replicate(), (8, 8, 5, 8), ""),
    ],
)
def test_distributed_tensors_are_stored_as_this_rank_has_them(
    tmp_path: Path, placement: Any, shape: tuple[int, ...], heads: str
) -> None:
    tensors = [distributed(normal(*shape, seed=seed), placement) for seed in range(3)]
    model = Sdpa()
    with record(model, tmp_path, name="model") as recording:
        output = model(*tensors)
    assert recording.problems == []
    (call,) = load(tmp_path)
    assert tuple(call.query.shape) == shape
    assert torch.equal(call.key, tensors[1].to_local())
    assert call.output is not None
    assert torch.equal(call.output, output.to_local())
    split = ("heads", [0, 1, 2, 3]) if heads else ("", [])
    assert (call.origin.split, call.origin.split_ranks, call.origin.heads) == (*split, heads)


@pytest.mark.usefixtures("four_ranks")
def test_gathered_output_is_stored_with_the_ranks_own_heads(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """PyTorch's flash attention gathers the output of a call with two batches."""
    whole = normal(2, 8, 5, 8)
    gathered = distributed(whole, Replicate())
    monkeypatch.setattr(F, "scaled_dot_product_attention", lambda query, key, value: gathered)
    tensor = distributed(normal(2, 2, 5, 8), Shard(1))
    model = Sdpa()
    with record(model, tmp_path, name="model") as recording:
        model(tensor, tensor, tensor)
    assert recording.problems == []
    (call,) = load(tmp_path)
    assert call.output is not None
    assert torch.equal(call.output, whole[:, 2:4])
    assert call.origin.heads == "2-3"


@pytest.mark.usefixtures("four_ranks")
@pytest.mark.parametrize(
    ("of_query", "of_key"), [(Shard(2), Shard(2)), (Shard(1), Replicate())], ids=str
)
def test_distributed_tensors_that_are_split_otherwise_are_reported(
    tmp_path: Path, of_query: Any, of_key: Any
) -> None:
    """The tensors are split by tokens, or their key/value heads are on other ranks."""
    query, key = (
        distributed(normal(1, heads, 8, 8), placement)
        for heads, placement in ((4, of_query), (4 if of_key == of_query else 16, of_key))
    )
    model = Sdpa()
    told = pytest.warns(match="Sdpa splits its tensors by more than batch and heads")
    with told, record(model, tmp_path, name="model") as recording:
        model(query, key, key)
    assert (recording.seen, recording.kept) == (1, 0)


@pytest.mark.parametrize(
    ("split", "ranks", "rank", "expected"),
    [
        (None, None, 1, None),
        ("heads", None, None, WHOLE),
        ("heads", [1], 1, WHOLE),
        ("heads", [3, 1], 1, RankPart("heads", (3, 1))),
        ("queries", (0, 1), 0, RankPart("queries", (0, 1))),
    ],
)
def test_declared_part_is_returned(split: Any, ranks: Any, rank: int | None, expected: Any) -> None:
    assert declared(split, ranks, rank) == expected


def test_ranks_of_the_environment_share_a_call(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("WORLD_SIZE", "3")
    assert declared("heads", None, 2) == RankPart("heads", (0, 1, 2))


@pytest.mark.parametrize(
    ("split", "ranks", "rank", "kind", "reason"),
    [
        ("tokens", None, 0, ValueError, "split must be heads, queries or None, not 'tokens'"),
        (None, [0, 1], 0, ValueError, "split_ranks requires split: heads or queries"),
        ("heads", [0, 1], 2, ValueError, "rank 2 is not in split_ranks, 0-1"),
        ("heads", [0, 1, 0], 0, ValueError, "names a rank twice"),
        ("heads", None, 3, CaptureError, "start them with torchrun, or record in"),
    ],
)
def test_invalid_split_is_refused(
    split: Any, ranks: Any, rank: int, kind: type, reason: str
) -> None:
    with pytest.raises(kind, match=reason):
        declared(split, ranks, rank)


def test_calls_of_a_step_are_counted_for_ranks(tmp_path: Path) -> None:
    """Calls are counted by module: parts match even if the ranks' other calls differ."""
    attention = Sdpa()

    class Twice(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.attention = attention

        def forward(self, tensor: Tensor) -> Tensor:
            once = self.attention(tensor, tensor, tensor)
            F.scaled_dot_product_attention(once, once, once)
            again: Tensor = self.attention(once, tensor, tensor)
            return again

    model = Twice()
    with record(model, tmp_path, name="model", rank=0):
        for _ in range(2):
            model(normal(1, 2, 3, 8))
    counted = [
        (call.origin.module, call.origin.step, call.origin.call_in_step) for call in load(tmp_path)
    ]
    assert counted == [
        (module, step, visit)
        for step in range(2)
        for module, visit in (("attention", 0), ("Twice", 0), ("attention", 1))
    ]


@pytest.mark.usefixtures("four_ranks")
def test_part_with_selected_heads_is_not_joined(tmp_path: Path) -> None:
    tensor = distributed(normal(1, 4, 5, 8), Shard(1))
    model = Sdpa()
    with record(model, tmp_path, name="model", heads=[1, 2]):
        model(tensor, tensor, tensor)
    (call,) = load(tmp_path)
    assert (call.shape.q_heads, call.origin.split, call.origin.heads) == (2, "", "1-2")
    refused = pytest.raises(CaptureError, match="leave out `heads=` or `split=`")
    with refused, record(model, tmp_path / "other", heads=[1], split="heads"):
        pass
