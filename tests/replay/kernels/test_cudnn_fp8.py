"""`cudnn-fp8` runs on a stand-in with the parameters of nvidia-cudnn-frontend 1.32."""

from __future__ import annotations

from collections.abc import Callable
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor

from replay.kernels.adapters import cudnn_fp8
from replay.kernels.registry import find
from tests.factories import random_call
from tests.replay.kernels.kinds import MASKED, verify
from tests.replay.kernels.stand_ins import parameters, textbook

Install = Callable[..., ModuleType]
Pack = dict[int, Tensor]

STREAM = 17


class Node:
    """Stand-in for a tensor of a cuDNN graph."""

    def __init__(self, **known: Any) -> None:
        self.known = known

    def __getattr__(self, name: str) -> Callable[[Any], Node]:
        if not name.startswith("set_"):
            raise AttributeError(name)

        def keep(value: Any) -> Node:
            self.known[name.removeprefix("set_")] = value
            return self

        return keep


@pytest.fixture
def graphs(install: Install, monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    """Graphs that were built with cuDNN's stand-in."""
    built: list[Any] = []

    class PyGraph:
        @parameters("self, *, io_data_type, intermediate_data_type, compute_data_type, handle=None")
        def __init__(given: Any) -> None:
            types = (given.io_data_type, given.intermediate_data_type, given.compute_data_type)
            assert types == ("8", "32", "32")
            given.self.nodes = []

        def tensor(
            self, dim: Any, stride: Any, data_type: Any = None, name: str = "", uid: int = -1
        ) -> Node:
            self.nodes.append(Node(dim=dim, stride=stride, data_type=data_type, uid=uid))
            return self.nodes[-1]

        @parameters(
            "self, *, q, k, v, descale_q, descale_k, descale_v, descale_s, scale_s, scale_o, "
            "attn_scale=None, diagonal_alignment=None, right_bound=None, generate_stats=None"
        )
        def sdpa_fp8(given: Any) -> tuple[Node, None, Node, Node]:
            assert given.diagonal_alignment == "top left"
            assert given.generate_stats is False
            assert given.right_bound in (None, 0)
            graph, output, amax_s, amax_o = given.self, Node(), Node(), Node()
            graph.inputs = {name: v for name, v in vars(given).items() if isinstance(v, Node)}
            graph.scale, graph.is_causal = given.attn_scale, given.right_bound == 0
            graph.output = output
            graph.nodes += (output, amax_s, amax_o)
            return output, None, amax_s, amax_o

        def build(self, heuristics: list[Any]) -> None:
            assert heuristics == ["A", "fallback"]
            for node in self.nodes:
                assert len(node.known["dim"]) == len(node.known["stride"]) == 4
            built.append(self)

        def get_workspace_size(self) -> int:
            return 48

        def execute(self, pack: Pack, workspace: Tensor, handle: Any = None) -> None:
            assert handle == {"stream": STREAM}
            assert workspace.nbytes == 48
            assert sorted(pack) == sorted(node.known["uid"] for node in self.nodes)
            for node in self.nodes:
                each = pack[node.known["uid"]]
                assert each.data_ptr() % 16 == 0
                kind = torch.float8_e4m3fn if node.known["data_type"] == "8" else torch.float32
                assert each.dtype == kind
            found = {name: pack[node.known["uid"]] for name, node in self.inputs.items()}
            for name in "qkv":
                assert found[name].stride() == self.inputs[name].known["stride"]
                assert tuple(found[name].shape) == self.inputs[name].known["dim"]
            query, key, value = (
                found[name].float() * found[f"descale_{name}"].flatten()[0] for name in "qkv"
            )
            assert float(found["scale_s"] * found["descale_s"]) == 1
            exact = textbook(query, key, value, self.scale, self.is_causal, top_left=True)
            scaled = exact * found["scale_o"].flatten()[0]
            assert scaled.abs().max() <= 448
            output = self.output.known
            # The graph's tensors are (B, H, S, D) with BSHD memory.
            assert pack[output["uid"]].transpose(1, 2).stride() == output["stride"]
            pack[output["uid"]].copy_(scaled.transpose(1, 2).to(torch.float8_e4m3fn))

    handle: dict[str, int] = {}
    install(
        "cudnn",
        version=("nvidia-cudnn-frontend", "1.32.0"),
        pygraph=PyGraph,
        data_type=SimpleNamespace(FP8_E4M3="8", FLOAT="32"),
        heur_mode=SimpleNamespace(A="A", FALLBACK="fallback"),
        diagonal_alignment=SimpleNamespace(TOP_LEFT="top left"),
        create_handle=lambda: handle,
        set_stream=lambda handle, stream: handle.update(stream=stream),
    )
    stream = SimpleNamespace(cuda_stream=STREAM)
    monkeypatch.setattr(torch.cuda, "current_stream", lambda device=None: stream)
    cudnn_fp8._graph.cache_clear()
    cudnn_fp8._handle.cache_clear()
    return built


@pytest.mark.usefixtures("graphs")
def test_cudnn_fp8_is_right_or_refuses() -> None:
    assert verify("cudnn-fp8") == {
        "float32": "dtype float32: needs float16 or bfloat16",
        **dict.fromkeys(MASKED, "takes no attn_mask"),
        **dict.fromkeys(("decode", "decode of one", "decode, scale"), "length 1: at least 2"),
    }


def test_graphs_are_built_once_for_each_kind_of_call(graphs: list[Any]) -> None:
    kernel = find("cudnn-fp8")
    for is_causal in (False, True, False):
        for seed in (0, 1):
            call = random_call(head_dim=16, is_causal=is_causal, dtype=torch.float16, seed=seed)
            kernel.attention(**call.arguments())
    assert len(graphs) == 2


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
@pytest.mark.parametrize("size", [0.0, 1e-3, 1e4])
@pytest.mark.usefixtures("graphs")
def test_values_of_any_size_are_quantised(size: float, dtype: torch.dtype) -> None:
    call = random_call(head_dim=16, dtype=dtype)
    call.value.mul_(size)
    output = find("cudnn-fp8").attention(**call.arguments())
    exact = find("eager").attention(**call.arguments())
    assert (output - exact).abs().max() <= 0.08 * call.value.abs().max()
