"""Compiled decode kernels are right on models' shapes, in CUDA graphs and on several streams."""

import functools
import math
from collections.abc import Callable
from dataclasses import replace

import pytest
import torch
from torch import Tensor

from capture.call.attention_call import AttentionCall
from capture.call.attention_variant import AttentionVariant
from replay.accuracy.sparse import kept_share, restricted
from replay.accuracy.verdict import Expected
from replay.kernels.registry import find
from tests.attention_kernels.calls import assert_right, lengths, verify
from tests.factories import sized_call

Sizes = tuple[int, int, int, int, int, int, int]
"""(B, Hq, Hkv, Sq, Sk, D, Dv)."""

SMALL: Sizes = (8, 64, 16, 1, 1024, 64, 64)
LONG: Sizes = (4, 32, 8, 1, 32000, 256, 256)
IN_8_BITS = ("triton-decode-int8", "triton-decode-fp8")
IN_PAGES = ("triton-paged-decode-int8", "triton-paged-decode-fp8")

call_of = functools.partial(sized_call, dtype=torch.bfloat16, device="cuda")


def padding(call: AttentionCall, counts: list[int], at_end: bool = True) -> AttentionCall:
    place = torch.arange(call.shape.kv_len, device="cuda")
    counted = lengths(*counts)[:, None]
    keys = place < counted if at_end else place >= call.shape.kv_len - counted
    return call.with_tensors({"attn_mask": keys[:, None, None]})


@pytest.mark.parametrize(
    "sizes",
    [
        SMALL,
        (8, 32, 8, 1, 32768, 128, 128),
        (2, 8, 2, 1, 1, 64, 64),
        (2, 8, 8, 1, 7, 40, 40),
        (2, 8, 2, 3, 127, 72, 96),
        (1, 8, 1, 16, 4250, 80, 80),
        (1, 12, 4, 5, 4250, 96, 40),
        (2, 4, 1, 1, 4250, 256, 256),
        (1, 64, 1, 4, 999, 128, 128),
    ],
)
def test_decode(sizes: Sizes) -> None:
    verify("triton-decode", call_of(sizes))


@pytest.mark.parametrize("name", ["triton-decode", "triton-paged-decode"])
@pytest.mark.parametrize("heads", [16, 32, 128])
def test_a_value_that_is_part_of_the_key(name: str, heads: int) -> None:
    """The value is the first part of the key in DeepSeek's absorbed latent attention."""
    call = call_of((2, heads, 1, 1, 8000, 576, 512))
    verify(name, replace(call, value=call.key[..., :512]))


@pytest.mark.parametrize(
    ("name", "sizes"),
    [
        ("triton-decode", (7, 32, 8, 1, 16384, 128, 128)),
        ("triton-decode", (130, 8, 8, 1, 2048, 64, 64)),
        ("triton-decode", (7, 32, 8, 8, 8192, 128, 128)),
        ("triton-paged-decode", (7, 32, 8, 1, 16384, 128, 128)),
        ("triton-paged-decode[page_size=64]", (7, 32, 8, 1, 16384, 128, 128)),
        ("triton-paged-decode[page_size=192]", (7, 32, 8, 8, 8192, 128, 128)),
        ("triton-paged-decode[page_size=128]", (7, 16, 8, 1, 16384, 64, 64)),
        ("triton-paged-decode[page_size=64]", (7, 16, 4, 1, 16384, 256, 256)),
        *((name, (7, 32, 8, 1, 16384, 128, 128)) for name in (*IN_8_BITS, *IN_PAGES)),
    ],
)
def test_keys_assigned_by_length(name: str, sizes: Sizes) -> None:
    """Lengths range from zero to all keys, and are large enough for an assignment. Each call runs
    three times, because programs that merge must reset their counters."""
    batch, kv_len = sizes[0], sizes[4]
    counts = [kv_len, 0, 1, 129, kv_len // 2 + 5, 77, kv_len // 9]
    used = lengths(*(counts * batch)[:batch])
    variant = AttentionVariant(bottom_right=sizes[3] > 1)
    call = replace(call_of(sizes), seqused_k=used, is_causal=sizes[3] > 1, variant=variant)
    verify(name, call)
    first, *others = (find(name).attention(**call.arguments()) for _ in range(3))
    assert all(torch.equal(first, other) for other in others)


@pytest.mark.parametrize(
    "name", ["triton-decode", "triton-paged-decode", "triton-paged-decode[page_size=64]"]
)
@pytest.mark.parametrize("heads", [16, 128])
def test_latents_assigned_by_length(name: str, heads: int) -> None:
    call = call_of((5, heads, 1, 1, 16384, 576, 512))
    used = lengths(16384, 3, 0, 7000, 12345)
    verify(name, replace(call, value=call.key[..., :512], seqused_k=used))


@pytest.mark.parametrize("heads", [16, 128])
def test_latents_in_one_piece(heads: int) -> None:
    """The calls are large enough for tensor descriptors."""
    call = call_of((4, heads, 1, 1, 17000, 576, 512))
    verify("triton-decode", replace(call, value=call.key[..., :512]))


def test_programs_merge_together_whatever_else_runs() -> None:
    """Calls on another stream delay some programs. The output keeps its bits, because a row's parts
    are added in order."""
    call = call_of((8, 16, 1, 1, 9000, 576, 512))
    arguments = replace(call, value=call.key[..., :512]).arguments()
    decode = find("triton-decode").attention
    expected = decode(**arguments)
    other = torch.cuda.Stream()
    with torch.cuda.stream(other):
        beside = [decode(**arguments) for _ in range(200)]
    own = [decode(**arguments) for _ in range(200)]
    torch.cuda.synchronize()
    assert all(torch.equal(each, expected) for each in own + beside)


@pytest.mark.parametrize("sizes", [(2, 8, 8, 1, 4096, 64, 64), (2, 8, 2, 9, 500, 128, 128)])
def test_decode_with_masks(sizes: Sizes) -> None:
    call = call_of(sizes)
    full = (sizes[0], sizes[1], sizes[3], sizes[4])
    generator = torch.Generator("cuda").manual_seed(1)
    biases = torch.randn(full, device="cuda", generator=generator)
    for mask in (biases > 0, biases, biases[:, :1, :1].to(torch.bfloat16)):
        verify("triton-decode", call.with_tensors({"attn_mask": mask}))
    verify("triton-decode", padding(call, [500, 3]))
    nothing = call.with_tensors({"attn_mask": biases > math.inf})
    assert not find("triton-decode").attention(**nothing.arguments()).any()


@pytest.mark.parametrize("name", ["triton-paged-decode", "triton-paged-decode[page_size=13]"])
@pytest.mark.parametrize("sizes", [(3, 4, 4, 1, 1000, 64, 64), (3, 8, 2, 4, 4250, 128, 96)])
def test_paged(name: str, sizes: Sizes) -> None:
    call = call_of(sizes)
    verify(name, call)
    for at_end in (True, False):
        verify(name, padding(call, [sizes[4], 1, 345], at_end))


@pytest.mark.parametrize("name", ["triton-sparse-decode", "triton-paged-sparse-decode"])
def test_sparse(name: str) -> None:
    call = call_of(LONG)
    verify(name, call)
    chosen = find(name).chosen
    assert chosen is not None
    assert kept_share(call, restricted(call, chosen(call))) == pytest.approx(0.02)
    short = padding(call_of((3, 8, 2, 2, 700, 64, 64)), [700, 1, 345], at_end=False)
    verify(f"{name}[keep=0.1]", short)
    verify(f"{name}[keep=1]", short)


@pytest.mark.parametrize("name", [*IN_8_BITS, *IN_PAGES])
@pytest.mark.parametrize(
    "sizes",
    [
        (8, 32, 8, 1, 32768, 128, 128),
        SMALL,
        LONG,
        (2, 8, 2, 3, 127, 72, 96),
        (1, 64, 1, 4, 999, 128, 128),
    ],
)
def test_a_cache_in_8_bits(name: str, sizes: Sizes) -> None:
    verify(name, call_of(sizes))


@pytest.mark.parametrize("name", [*IN_8_BITS, *IN_PAGES])
def test_a_cache_in_8_bits_beyond_plain_attention(name: str) -> None:
    call = call_of((2, 8, 2, 5, 4250, 128, 128), is_causal=True)
    window = AttentionVariant(True, (1000, None), 20.0)
    sinks = torch.randn(8, device="cuda", generator=torch.Generator("cuda").manual_seed(1))
    verify(name, replace(call, variant=window, sinks=sinks))
    verify(name, replace(call, variant=AttentionVariant(True), seqused_k=lengths(4250, 77)))
    verify(name, padding(replace(call, is_causal=False), [500, 3]))


@pytest.mark.parametrize(
    ("name", "dtype"), zip(IN_8_BITS, [torch.int8, torch.float8_e4m3fn], strict=True)
)
def test_every_8_bit_number_is_converted_exactly(name: str, dtype: torch.dtype) -> None:
    """Each number is a separate value, and each query attends to a single key."""
    numbers = torch.arange(256, device="cuda", dtype=torch.uint8).view(dtype).half()
    numbers = numbers[numbers.isfinite() & (numbers != -128)]  # equally many on either side of 0
    numbers = torch.nn.functional.pad(numbers, (0, 256 - len(numbers))).view(2, 128)
    key = torch.eye(128, device="cuda", dtype=torch.half).roll(1, 0)[:2, None] * 2
    key = key.view(1, 1, 2, 128)
    query = key.repeat(1, 1, 8, 1) * 100
    found = find(name).attention(query, key, numbers[None, None], scale=1.0)
    assert torch.equal(found, numbers.repeat(8, 1)[None, None])


def test_keys_beyond_two_to_the_31_elements() -> None:
    key = torch.empty(1, 2, 2**23 + 100, 128, device="cuda", dtype=torch.bfloat16)
    key.normal_()
    query = torch.randn(1, 4, 1, 128, device="cuda", dtype=torch.bfloat16)
    output = find("triton-decode").attention(query, key, key, enable_gqa=True)
    last = slice(-100, None)
    mask = torch.zeros(1, 1, 1, key.shape[2], dtype=torch.bool, device="cuda")
    mask[..., last] = True
    masked = find("triton-decode").attention(query, key, key, mask, enable_gqa=True)
    assert output.isfinite().all()
    alone = AttentionCall(query, key[:, :, last], key[:, :, last], enable_gqa=True)
    assert_right(masked, Expected.of(alone).reference, alone)


@pytest.mark.parametrize("name", ["triton-decode", "triton-decode-int8"])
def test_the_same_bits_on_many_streams_and_in_graphs(name: str) -> None:
    call = call_of((4, 32, 8, 1, 4096, 128, 128))
    attend: Callable[..., Tensor] = find(name).attention
    expected = attend(**call.arguments())
    streams = [torch.cuda.Stream() for _ in range(4)]
    torch.cuda.synchronize()
    outputs = []
    for turn in range(200):
        with torch.cuda.stream(streams[turn % 4]):
            outputs.append(attend(**call.arguments()))
    graphs = []
    for _ in range(2):
        graph = torch.cuda.CUDAGraph()
        torch.cuda.synchronize()
        with torch.cuda.graph(graph):
            outputs += [attend(**call.arguments()) for _ in range(10)]
        graphs.append(graph)
    for turn in range(20):
        with torch.cuda.stream(streams[turn % 2]):
            graphs[turn % 2].replay()
    torch.cuda.synchronize()
    assert all(torch.equal(output, expected) for output in outputs)
