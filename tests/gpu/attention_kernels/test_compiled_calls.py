"""`attention_kernels.attention` in compiled code, graphs, streams, threads and autocast."""

from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention

import attention_kernels as ak
from attention_kernels.launch import workspace

Call = Callable[..., Tensor]
CALLS: dict[str, tuple[int, int, dict[str, object]]] = {
    "prefill": (300, 300, {"is_causal": True}),
    "decode": (1, 3000, {}),
    "fp8": (300, 300, {"precision": "fp8"}),
    "int8": (300, 300, {"precision": "int8", "is_causal": True}),
}
"""Numbers of queries and keys, and options."""


def tensors(q_len: int, kv_len: int, seed: int = 0, head_dim: int = 64) -> tuple[Tensor, ...]:
    generator = torch.Generator("cuda").manual_seed(seed)
    return tuple(
        torch.randn(2, 4, length, head_dim, generator=generator, device="cuda").half()
        for length in (q_len, kv_len, kv_len)
    )


def layer(query: Tensor, key: Tensor, value: Tensor, **options: object) -> Tensor:
    """Return attention amid other operators, as in a model."""
    output: Tensor = ak.attention(query * 1, key, value, **options)  # type: ignore[arg-type]
    return output.transpose(1, 2).flatten(2) * 2


@pytest.fixture(autouse=True)
def _no_grad() -> object:
    torch.compiler.reset()  # programs of earlier tests count towards the limit of recompilations
    with torch.no_grad():
        yield


@pytest.mark.parametrize("name", CALLS)
def test_compiled_code_is_one_graph_for_all_lengths(name: str) -> None:
    q_len, kv_len, options = CALLS[name]
    compiled = torch.compile(layer, fullgraph=True, dynamic=True)
    for step, more in enumerate((0, 1, 29, 100)):
        given = tensors(q_len if q_len == 1 else q_len + more, kv_len + more)
        with torch._dynamo.config.patch(error_on_recompile=step > 0):
            torch.testing.assert_close(compiled(*given, **options), layer(*given, **options))


@pytest.mark.parametrize("name", CALLS)
@pytest.mark.parametrize("is_compiled", [False, True])
def test_cuda_graph_attends_to_new_values(name: str, is_compiled: bool) -> None:
    q_len, kv_len, options = CALLS[name]
    run = torch.compile(layer, fullgraph=True) if is_compiled else layer
    given = tensors(q_len, kv_len)
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        run(*given, **options)
    torch.cuda.current_stream().wait_stream(stream)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        output = run(*given, **options)
    for seed in (1, 2):
        for old, new in zip(given, tensors(q_len, kv_len, seed), strict=True):
            old.copy_(new)
        graph.replay()
        torch.testing.assert_close(output, layer(*given, **options))


@pytest.mark.parametrize("name", CALLS)
def test_streams_and_threads_do_not_disturb_each_other(name: str) -> None:
    q_len, kv_len, options = CALLS[name]
    given = [tensors(q_len, kv_len, seed) for seed in range(4)]
    expected = [layer(*each, **options) for each in given]
    torch.cuda.synchronize()

    def attend(place: int) -> bool:
        stream = torch.cuda.Stream()
        with torch.no_grad(), torch.cuda.stream(stream):
            outputs = [layer(*given[place], **options) for _ in range(20)]
        stream.synchronize()
        return all(torch.equal(output, expected[place]) for output in outputs)

    with ThreadPoolExecutor(4) as threads:
        assert all(threads.map(attend, range(4)))


def test_autocast_converts_tensors_as_for_sdpa() -> None:
    query, key, value = (each.float() for each in tensors(300, 300))
    with torch.autocast("cuda", torch.bfloat16):
        expected = scaled_dot_product_attention(query, key, value)
        for attend in (ak.attention, torch.compile(ak.attention, fullgraph=True)):
            output = attend(query, key, value)
            assert output.dtype == expected.dtype == torch.bfloat16
            torch.testing.assert_close(output, expected, atol=2e-2, rtol=0)


@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two GPUs")
def test_tensors_may_be_on_another_gpu_than_the_current() -> None:
    given = tensors(300, 300)
    there = [each.to("cuda:1") for each in given]
    assert torch.equal(layer(*there).to("cuda:0"), layer(*given))
    assert torch.cuda.current_device() == 0


def test_graphs_of_reduce_overhead_keep_no_scratch_memory_of_the_warm_up() -> None:
    workspace._kept.cache_clear()  # the first use of scratch memory is within the warm-up
    workspace._reserves.clear()
    given = {lengths: tensors(*lengths) for lengths in ((1, 3000), (2, 9000))}
    compiled = {
        lengths: torch.compile(layer, fullgraph=True, dynamic=False, mode="reduce-overhead")
        for lengths in given
    }
    other = tensors(1, 20000, seed=5)
    expected = {lengths: layer(*each) for lengths, each in given.items()}
    workspace._kept.cache_clear()
    workspace._reserves.clear()
    for _ in range(6):
        for lengths, each in given.items():
            torch.compiler.cudagraph_mark_step_begin()
            torch.testing.assert_close(compiled[lengths](*each), expected[lengths])
            assert torch.equal(layer(*other), layer(*other))
