"""Kernels inside a compiled graph: one graph, the promised layout, the right counts."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.attention.flex_attention import flex_attention

from capture.hooks.interceptor import TORCH_SDPA
from replay import register_kernel, use_kernel
from replay.patch.custom_op import attend, attend_by_step, costs_reshape, laid_out, strides_like

from .conftest import graphs


class Block(nn.Module):
    """Attention block on (B, S, 16): projection, two heads of size 8, projection."""

    def __init__(self) -> None:
        super().__init__()
        self.inward, self.outward = nn.Linear(16, 16), nn.Linear(16, 16)

    def forward(self, states: Tensor, mask: Tensor | None = None) -> Tensor:
        batch, length, _ = states.shape
        heads = self.inward(states).view(batch, length, 2, 8).transpose(1, 2)
        attended = F.scaled_dot_product_attention(heads, heads, heads, attn_mask=mask)
        mixed: Tensor = self.outward(attended.transpose(1, 2).reshape(batch, length, 16))
        return mixed


def operators(seen: list[list[str]]) -> Callable[..., Any]:
    """Return a backend that keeps the function names of each graph and runs it unchanged."""

    def backend(graph: torch.fx.GraphModule, inputs: object) -> Any:
        calls = [node for node in graph.graph.nodes if node.op == "call_function"]
        seen.append([getattr(node.target, "__name__", str(node.target)) for node in calls])
        return graph.forward

    return backend


@pytest.mark.parametrize("backend", ["aot_eager", pytest.param("inductor", marks=pytest.mark.slow)])
def test_a_model_compiled_before_takes_the_kernel_and_is_the_same_afterwards(
    doubling: str, backend: str
) -> None:
    model, states = Block().eval(), torch.randn(2, 5, 16)
    compiled = torch.compile(model, backend=backend, fullgraph=True)
    before = compiled(states)
    for _ in range(2):
        with use_kernel(doubling) as swap:
            torch.testing.assert_close(compiled(states), model(states))
            assert not torch.allclose(compiled(states), before)
        assert swap.hits == 3
        assert torch.equal(compiled(states), before)
    assert graphs() == 2  # with and without the kernel, however often each was entered


@torch._dynamo.config.patch(recompile_limit=2)
def test_more_kernels_than_dynamo_has_room_for_all_run_compiled() -> None:
    model, states = Block().eval(), torch.randn(2, 5, 16)
    compiled = torch.compile(model, backend="eager", fullgraph=True)
    names = [f"copy-{number}" for number in range(4)]
    for name in names:
        register_kernel(name)(TORCH_SDPA)
        with use_kernel(name) as swap:
            compiled(states)
        assert swap.hits == 1
    assert graphs() == len(names)
    assert torch._dynamo.config.recompile_limit == 2


def test_support_is_checked_when_the_graph_runs(doubling: str) -> None:
    model, states = Block().eval(), torch.randn(2, 5, 16)
    mask = torch.ones(5, 5, dtype=torch.bool).tril()
    compiled = torch.compile(model, backend="aot_eager", fullgraph=True)
    with use_kernel(doubling) as swap:
        for _ in range(3):
            assert torch.equal(compiled(states, mask), model(states, mask))
    assert torch.equal(model(states, mask), compiled(states, mask))
    assert str(swap) == "doubling: 0 calls, 6 fell back (6 × no mask)"


@torch.enable_grad()
def test_a_compiled_training_step_keeps_its_own_attention(doubling: str) -> None:
    model, states = Block(), torch.randn(2, 5, 16)
    compiled = torch.compile(model, backend="aot_eager", fullgraph=True)
    wanted = torch.autograd.grad(model(states).sum(), model.inward.weight)
    with use_kernel(doubling) as swap:
        found = torch.autograd.grad(compiled(states).sum(), model.inward.weight)
        counted = dict(swap.fallbacks)
        compiled(states)
    torch.testing.assert_close(found, wanted)
    assert list(counted) == ["gradients are needed in a compiled graph"]
    # The call is counted at compilation, because the graph holds PyTorch's own function.
    assert (swap.hits, swap.fallbacks) == (0, counted)


def test_lengths_may_vary(doubling: str) -> None:
    model = Block().eval()
    compiled = torch.compile(model, backend="aot_eager", fullgraph=True, dynamic=True)
    with use_kernel(doubling) as swap:
        for length in (5, 7, 9):
            states = torch.randn(2, length, 16)
            assert torch.equal(compiled(states), model(states))
    assert (swap.hits, graphs()) == (6, 1)


def test_an_output_in_another_layout_is_copied_and_counted() -> None:
    model, states = Block().eval(), torch.randn(2, 5, 16)
    compiled = torch.compile(model, backend="aot_eager", fullgraph=True)

    @register_kernel("contiguous")
    def contiguous(*args: Any, **kwargs: Any) -> Tensor:
        return TORCH_SDPA(*args, **kwargs).contiguous()

    @register_kernel("as-query")
    def as_query(query: Tensor, *args: Any, **kwargs: Any) -> Tensor:
        return torch.empty_like(query).copy_(TORCH_SDPA(query, *args, **kwargs))

    for name, copies in (("contiguous", 1), ("as-query", 0)):
        for run in (compiled, model):  # the operator or the model's reshape copies
            with use_kernel(name) as swap:
                torch.testing.assert_close(run(states), compiled(states))
            assert swap.layout_copies == 2 * copies
    assert str(swap) == "as-query: 2 calls"


@pytest.mark.parametrize("order", [(0, 1, 2), (0, 2, 1), (2, 0, 1)])
@pytest.mark.parametrize(
    ("sizes", "gap"),
    [((2, 3, 5), 0), ((2, 3, 5), 4), ((1, 3, 5), 0), ((2, 1, 5), 4), ((1, 1, 1), 4)],
)
def test_output_gets_the_querys_layout_without_a_copy_if_possible(
    sizes: tuple[int, int, int], order: tuple[int, int, int], gap: int
) -> None:
    memory = torch.randn(*(sizes[dim] for dim in order), 8 + gap)
    query = memory.permute(*(order.index(dim) for dim in range(3)), 3)[..., :8]
    assert query.shape == (*sizes, 8)
    output = torch.randn_like(query)  # the copy keeps the dimensions' order, but no gaps
    assert laid_out(output, query)[0].data_ptr() == output.data_ptr()
    assert not laid_out(output, query)[1]
    other = torch.randn(sizes[2], sizes[1], sizes[0], 8).transpose(0, 2)
    placed, copied = laid_out(other, query)
    assert torch.equal(placed, other)
    assert placed.stride() == strides_like(query, 8)
    assert copied == (placed.data_ptr() != other.data_ptr())


def test_reshape_is_free_in_the_layout_of_a_transposed_query() -> None:
    query, plain = torch.empty(2, 5, 3, 8).transpose(1, 2), torch.empty(2, 3, 5, 8)
    assert costs_reshape(plain, query)
    assert not costs_reshape(query, query)
    assert not costs_reshape(plain, plain)
    assert not costs_reshape(torch.empty(2, 3, 1, 8), torch.empty(2, 1, 3, 8).transpose(1, 2))


def test_fake_implementation_matches_the_operator() -> None:
    query, key = torch.randn(2, 5, 4, 8).transpose(1, 2), torch.randn(2, 2, 7, 8)
    value, mask = torch.randn(2, 2, 7, 6), torch.ones(5, 7, dtype=torch.bool)
    for operator in (attend, attend_by_step):
        torch.library.opcheck(
            operator,
            ("", query, key, value, mask, 0.0, False, None, True),
            test_utils=("test_schema", "test_faketensor", "test_aot_dispatch_dynamic"),
        )
    unsafe = {tag for tag in operator._opoverload.tags if tag.name == "cudagraph_unsafe"}
    assert unsafe or not hasattr(torch.Tag, "cudagraph_unsafe")


def test_a_kernel_that_compiles_flex_attention_is_compiled_once() -> None:
    """The function is replaced in every block, and the kernel is compiled with the replacement."""
    seen: list[list[str]] = []

    @register_kernel("flex-inside")
    @torch.compile(backend=operators(seen), fullgraph=True)
    def attend(query: Tensor, key: Tensor, value: Tensor, **options: Any) -> Tensor:
        output = flex_attention(query, key, value)
        assert isinstance(output, Tensor)
        return output

    model, states = Block().eval(), torch.randn(2, 5, 16)
    for _ in range(3):
        with use_kernel("flex-inside") as swap:
            model(states)
        assert swap.hits == 1
    assert len(seen) == 1


def test_a_kernel_that_compiles_itself_does_so_inside_the_operator() -> None:
    seen: list[list[str]] = []

    @register_kernel("compiled-inside")
    @torch.compile(backend=operators(seen))
    def inside(query: Tensor, key: Tensor, value: Tensor, *args: Any, **kwargs: Any) -> Tensor:
        # The kernel must not replace this call again.
        return F.scaled_dot_product_attention(torch.sin(query), key, value)

    model, states = Block().eval(), torch.randn(2, 5, 16)
    with use_kernel("compiled-inside") as swap:
        wanted = model(states)
        compiled = torch.compile(model, backend="eager", fullgraph=True)
        assert torch.equal(compiled(states), wanted)
    assert swap.hits == 2
    assert any("sin" in calls for calls in seen)


def test_an_exception_in_a_compiled_kernel_leaves_the_model_as_it_was() -> None:
    model, states = Block().eval(), torch.randn(2, 5, 16)
    compiled = torch.compile(model, backend="aot_eager", fullgraph=True)
    before = compiled(states)

    @register_kernel("failing")
    def failing(*args: Any, **kwargs: Any) -> Tensor:
        raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError), use_kernel("failing"):
        compiled(states)
    assert F.scaled_dot_product_attention is TORCH_SDPA
    assert torch.equal(compiled(states), before)
    with use_kernel("torch-math") as swap:
        compiled(states)
    assert swap.hits == 1
