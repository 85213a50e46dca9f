"""A Llama and a smaller model, run by several ranks and recorded; a program for torchrun.

    torchrun --nproc-per-node 2 tests/distributed_model.py OUT SCENARIO…

Every scenario records into OUT/SCENARIO. Without torchrun, a single process runs the same models.
"""

import os
import signal
import subprocess
import sys
from collections.abc import Callable
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any

import torch
import torch.distributed as group
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

from capture import record
from tests.factories import tiny_llama

HEADS, HEAD_DIM, TOKENS = 4, 8, 6
WIDTH = HEADS * HEAD_DIM


class Projected(nn.Module):
    """Attention whose weights and states are small integers, which makes all sums exact."""

    def __init__(self) -> None:
        super().__init__()
        generator = torch.Generator().manual_seed(0)
        for name in ("query", "key", "value"):
            layer = nn.Linear(WIDTH, WIDTH, bias=False)
            layer.weight.data = _integers(WIDTH, WIDTH, generator=generator)
            setattr(self, name, layer)

    def forward(self, states: Tensor) -> Tensor:
        query, key, value = (
            getattr(self, name)(states).unflatten(-1, (-1, HEAD_DIM)).transpose(1, 2)
            for name in ("query", "key", "value")
        )
        return F.scaled_dot_product_attention(query / 64, key / 64, value)


class Ulysses(nn.Module):
    """Attention between two all-to-alls that exchange shares of tokens for shares of heads."""

    def forward(self, query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        return F.scaled_dot_product_attention(*map(_to_heads, (query, key, value)))


def _to_heads(tensor: Tensor) -> Tensor:
    """Exchange (B, this rank's S, H, D) for (B, S, this rank's H, D)."""
    ranks = _ranks()
    sent = [part.contiguous() for part in tensor.chunk(ranks, dim=2)]
    received = [torch.empty_like(sent[_rank()]) for _ in range(ranks)]
    if ranks > 1:
        group.all_to_all(received, sent) if _on_gpu() else _exchanged(received, sent)
    else:
        received = sent
    return torch.cat(received, dim=1).transpose(1, 2)


def _exchanged(received: list[Tensor], sent: list[Tensor]) -> None:
    """Perform an all-to-all by gathers, because gloo has no all-to-all."""
    for rank in range(_ranks()):
        group.gather(sent[rank], received if rank == _rank() else None, dst=rank)


class Queries(nn.Module):
    """Attention with some of the queries and all keys on each rank."""

    def forward(self, query: Tensor, key: Tensor, value: Tensor, mask: Tensor) -> Tensor:
        rows = slice(*_share(query.shape[2]))
        return F.scaled_dot_product_attention(
            query[:, :, rows], key, value, attn_mask=mask[:, :, rows]
        )


def launch(ranks: int, out: Path, *scenarios: str, fails: bool = False, **environment: str) -> None:
    """Run this program in `ranks` processes with torchrun, or in one process without it.

    Args:
        fails: whether the program is expected to fail.
        environment: `RANKS_ON="cuda"` gives each rank a GPU.
    """
    by_torchrun = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(ranks)]
    finished = subprocess.run(
        [sys.executable, *(by_torchrun if ranks > 1 else []), __file__, str(out), *scenarios],
        env={**os.environ, "PYTHONPATH": str(Path(__file__).parents[1]), **environment},
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
    )
    assert (finished.returncode != 0) == fails, finished.stderr


def tensor_parallel(out: Path) -> None:
    """Generate three tokens with a Llama whose heads are split between ranks."""
    model = _llama("q_proj", "k_proj", "v_proj")
    with _recorded(model, out):
        _generate(model)


def one_key_head(out: Path) -> None:
    """Run the tensor-parallel Llama with one key/value head, which every rank holds."""
    model = _llama("q_proj", num_key_value_heads=1)
    with _recorded(model, out):
        _generate(model)


def medium(out: Path) -> None:
    """Run a bfloat16 Llama with 16 heads of dimension 64 on 512 tokens."""
    model = _llama(
        *("q_proj", "k_proj", "v_proj"),
        hidden_size=1024,
        num_attention_heads=16,
        num_key_value_heads=4,
        dtype=torch.bfloat16,
    )
    with _recorded(model, out), torch.no_grad():
        model(torch.arange(512, device=_device())[None] % 64)


def exact(out: Path) -> None:
    """Run a model with exact sums, so that joined parts have the same bits as the whole."""
    model = Projected().to(_device())
    _parallelize(model, ["query", "key", "value"])
    with _recorded(model, out):
        for seed in range(2):
            model(_states(seed))


def ulysses(out: Path) -> None:
    """Run a model whose tokens are split between ranks and exchanged for heads before attention."""
    model = Ulysses()
    tokens = slice(*_share(8))
    with _recorded(model, out, split="heads"):
        model(*(_normal(1, 8, HEADS, HEAD_DIM, seed=seed)[:, tokens] for seed in range(3)))


def queries(out: Path) -> None:
    """Run a model whose queries are split unevenly between ranks."""
    tensors = [_normal(1, HEADS, 7, HEAD_DIM, seed=seed) for seed in range(3)]
    mask = torch.ones(1, 1, 7, 7, dtype=torch.bool, device=_device()).tril()
    model = Queries()
    with _recorded(model, out, split="queries"):
        model(*tensors, mask)


def differing_calls(out: Path) -> None:
    """Run an extra model on the first rank, before the other ranks start and after they stop."""
    model = nn.ModuleDict({"own": Ulysses(), "shared": Projected()}).to(_device())
    _parallelize(model["shared"], ["query", "key", "value"])
    with _recorded(model, out, sample="first"):
        if _rank() == 0:
            alone = _normal(1, 2, 3, HEAD_DIM, seed=0)
            model["own"].forward = lambda: F.scaled_dot_product_attention(alone, alone, alone)
            model["own"]()
        for seed in range(2):
            model["shared"](_states(seed))
        if _rank() == 0:
            model["shared"](_states(2))


def killed(out: Path) -> None:
    """Kill the second rank once its first call is on disk."""
    model = Projected().to(_device())
    _parallelize(model, ["query", "key", "value"])
    with _recorded(model, out, sample="first", durable=True):
        model(_states(0))
        if _rank() == 1:
            os.kill(os.getpid(), signal.SIGKILL)
        model(_states(1))


def _llama(*sharded: str, **config: Any) -> nn.Module:
    dtype = config.pop("dtype", torch.float32)
    model = tiny_llama(**config).to(_device(), dtype)
    for layer in model.model.layers:
        _parallelize(layer.self_attn, list(sharded), rowwise="o_proj")
    return model


def _generate(model: Any) -> None:
    with torch.no_grad():
        model.generate(
            torch.arange(TOKENS, device=_device())[None], max_new_tokens=3, do_sample=False
        )


def _parallelize(module: nn.Module, names: list[str], rowwise: str = "") -> None:
    if _ranks() == 1:
        return
    plan: dict[str, Any] = {name: ColwiseParallel() for name in names}
    if rowwise:
        plan[rowwise] = RowwiseParallel()
    parallelize_module(module, _mesh(), plan)


def _mesh() -> DeviceMesh:
    return init_device_mesh("cuda" if _on_gpu() else "cpu", (_ranks(),), mesh_dim_names=("tp",))


def _recorded(model: nn.Module, out: Path, **options: Any) -> AbstractContextManager[Any]:
    return record(model, out, name="model", max=100, **options)


def _integers(*shape: int, generator: torch.Generator) -> Tensor:
    return torch.randint(-3, 4, shape, generator=generator).float()


def _states(seed: int) -> Tensor:
    states = _integers(1, TOKENS, WIDTH, generator=torch.Generator().manual_seed(seed))
    return states.to(_device())


def _normal(*shape: int, seed: int) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed)).to(_device())


def _share(total: int) -> tuple[int, int]:
    """Return the start and end of this rank's share of `total` items."""
    return total * _rank() // _ranks(), total * (_rank() + 1) // _ranks()


def _rank() -> int:
    return int(os.environ.get("RANK", "0"))


def _ranks() -> int:
    return int(os.environ.get("WORLD_SIZE", "1"))


def _on_gpu() -> bool:
    return os.environ.get("RANKS_ON") == "cuda"


def _device() -> torch.device:
    return torch.device("cuda", _rank()) if _on_gpu() else torch.device("cpu")


SCENARIOS: dict[str, Callable[[Path], None]] = {
    each.__name__: each
    for each in (
        tensor_parallel,
        one_key_head,
        medium,
        exact,
        ulysses,
        queries,
        differing_calls,
        killed,
    )
}


def main() -> None:
    """Run the scenarios in the order of the command line."""
    out = Path(sys.argv[1])
    if _on_gpu():
        torch.cuda.set_device(_device())
    if _ranks() > 1:
        group.init_process_group("nccl" if _on_gpu() else "gloo")
    for name in sys.argv[2:]:
        SCENARIOS[name](out / name)
    if _ranks() > 1:
        group.destroy_process_group()


if __name__ == "__main__":
    main()
