"""The adapters of xFormers, Transformer Engine, FlashInfer and Hub kernels make the right calls.

The tests use stand-ins (see conftest) with the parameters of xformers 0.0.35, flashinfer-python
0.6.6, kernels 0.17.2 and NVIDIA/TransformerEngine's `main` branch.
"""

from __future__ import annotations

import os
import socket
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor

from capture.call.attention_call import AttentionCall
from capture.call.attention_variant import AttentionVariant
from replay.accuracy.verdict import Expected
from replay.kernels.adapters import flashinfer, hub, transformer_engine
from replay.kernels.registry import catalogue
from tests.factories import random_call
from tests.replay.kernels.kinds import (
    CAPPED,
    DENSE,
    KINDS,
    MASKED,
    PACKED,
    REFUSED,
    check,
    judge_call,
    verify,
    verify_variants,
)
from tests.replay.kernels.stand_ins import (
    check_readable,
    flash_attention,
    heads_second,
    parameters,
    textbook,
)
from tests.variant_calls import LIBRARY_CALLS, mla_call

Install = Callable[..., ModuleType]
Unavailable = Callable[..., "str | None"]

OTHER_HEAD_DIMS = {
    "head_dim 96": "head_dim 96: needs 64, 128 or 256",
    "head_dim 80": "head_dim 80: needs 64, 128 or 256",
}


@pytest.fixture
def xformers(install: Install) -> None:
    class LowerTriangularMask:
        """Causal mask aligned top left."""

    class LowerTriangularFromBottomRightMask:
        pass

    @dataclass
    class LocalAttentionFromBottomRightMask:
        window_left: int
        window_right: int

    @dataclass
    class BlockDiagonalMask:
        q_seqlen: list[int]
        kv_seqlen: list[int]
        causal: bool = False
        window_size: int | None = None

        @staticmethod
        @parameters("q_seqlen, kv_seqlen=None, *, device=None")
        def from_seqlens(given: SimpleNamespace) -> BlockDiagonalMask:
            assert given.device == torch.device("cpu"), "None is the first GPU"
            return BlockDiagonalMask(given.q_seqlen, given.kv_seqlen)

        def make_causal_from_bottomright(self) -> BlockDiagonalMask:
            for queries, keys in zip(self.q_seqlen, self.kv_seqlen, strict=True):
                if keys < queries:
                    raise ValueError("Expected `num_keys >= num_queries`")
            return replace(self, causal=True)

        def make_local_attention_from_bottomright(self, window_size: int) -> BlockDiagonalMask:
            """Make it causal: the query aligned with key j sees window_size keys up to j."""
            assert window_size > 0
            return replace(self.make_causal_from_bottomright(), window_size=window_size)

    @parameters("query, key, value, attn_bias=None, *, scale=None")
    def memory_efficient_attention(given: SimpleNamespace) -> Tensor:
        query, bias = given.query, given.attn_bias
        tensors = (query, given.key, given.value)
        heads = query.shape[2:-1]
        assert all(each.shape[2:-1] == heads for each in tensors), "it does not broadcast"
        assert all(each.stride(-1) == 1 for each in tensors)
        flat = [each.flatten(2, -2).transpose(1, 2) for each in tensors]
        output = biased(*flat, given.scale, aligned(bias, query, given.key))
        return output.transpose(1, 2).unflatten(2, heads)

    def aligned(bias: Any, query: Tensor, key: Tensor) -> Any:
        """Check that kernels can read a tensor bias 16 bytes at a time, and return it as BHSD."""
        if not isinstance(bias, Tensor):
            return bias
        assert bias.dtype == query.dtype
        assert bias.shape == (query.shape[0], *query.shape[2:-1], query.shape[1], key.shape[1])
        assert bias.stride(-1) == 1
        assert all(stride % 8 == 0 for stride in bias.stride()[:-1])
        assert bias.data_ptr() % 16 == 0
        return bias.flatten(1, -3).float()

    def biased(query: Tensor, key: Tensor, value: Tensor, scale: float | None, bias: Any) -> Tensor:
        """Attend to BHSD tensors with one of the library's biases."""
        tensors = (query, key, value)
        if bias is None or isinstance(bias, Tensor):
            return textbook(*tensors, scale, mask=bias)
        if isinstance(bias, LowerTriangularMask):
            return textbook(*tensors, scale, causal=True, top_left=True)
        if isinstance(bias, LowerTriangularFromBottomRightMask):
            return textbook(*tensors, scale, causal=True)
        if isinstance(bias, LocalAttentionFromBottomRightMask):
            assert query.dtype != torch.float32, "FlashAttention's alone"
            assert query.shape[-1] == value.shape[-1] <= 256
            return textbook(*tensors, scale, window=(bias.window_left, bias.window_right))
        assert isinstance(bias, BlockDiagonalMask)
        window = (-1 if bias.window_size is None else bias.window_size - 1, -1)
        lengths = (bias.q_seqlen, bias.kv_seqlen, bias.kv_seqlen)
        split = [each.split(sizes, 2) for each, sizes in zip(tensors, lengths, strict=True)]
        each_sequence = zip(*split, strict=True)
        outputs = [textbook(*parts, scale, bias.causal, window=window) for parts in each_sequence]
        return torch.cat(outputs, dim=2)

    install("xformers._cpp_lib", _cpp_library_load_exception=None)
    install(
        "xformers.ops",
        version=("xformers", "0.0.35"),
        memory_efficient_attention=memory_efficient_attention,
        LowerTriangularMask=LowerTriangularMask,
        fmha=SimpleNamespace(
            attn_bias=SimpleNamespace(
                LowerTriangularFromBottomRightMask=LowerTriangularFromBottomRightMask,
                LocalAttentionFromBottomRightMask=LocalAttentionFromBottomRightMask,
                BlockDiagonalMask=BlockDiagonalMask,
            )
        ),
    )


@pytest.mark.usefixtures("xformers")
def test_xformers_is_exact_or_refuses() -> None:
    assert verify("xformers") == dict.fromkeys(
        ("padded right", "padded left", "padded decode", "padded, scale", "bool mask"),
        "attn_mask over 130 keys: needs a multiple of 8",
    )
    assert verify_variants("xformers") == DENSE | PACKED


def _window(**changes: Any) -> AttentionCall:
    variant = AttentionVariant(window=(3, None), bottom_right=True)
    return random_call(**{"dtype": torch.float16, **changes}, is_causal=True, variant=variant)


BOTTOM_RIGHT = AttentionVariant(bottom_right=True)
BOTH_WAYS = AttentionVariant(window=(3, 2), bottom_right=True)
PACKED_CALL = LIBRARY_CALLS["packed, bottom right"]
LONGER_QUERIES = replace(PACKED_CALL, cu_seqlens_q=torch.tensor([0, 12, 16]).int())
WIDE = random_call(dtype=torch.float16, head_dim=264, is_causal=True)
QUERIES_BEFORE_KEYS = random_call(
    dtype=torch.float16, head_dim=64, q_len=21, is_causal=True, variant=BOTTOM_RIGHT
)
NARROW_KEYS = "value head_dim 64 differs from query head_dim 32"


@pytest.mark.parametrize(
    ("name", "call", "reason"),
    [
        (
            "xformers",
            replace(LIBRARY_CALLS["packed"], variant=BOTH_WAYS),
            "a window over packed sequences that is not causal",
        ),
        # Only xFormers' FlashAttention supports windows.
        ("xformers", _window(dtype=torch.float32), f"a window with {REFUSED['float32']}"),
        ("xformers", _window(v_head_dim=64), f"a window with {NARROW_KEYS}"),
        ("xformers", _window(head_dim=264), "a window with head_dim 264: at most 256"),
        ("xformers", WIDE, None),
        ("xformers", LONGER_QUERIES, "causal packed sequences with fewer keys than queries"),
        ("xformers", replace(LONGER_QUERIES, is_causal=False), None),
        ("flashinfer-mla", mla_call(q_len=2), "decode only: one query per sequence, not 2"),
        ("flashinfer-fa2", QUERIES_BEFORE_KEYS, "causal with more queries (21) than keys (13)"),
    ],
)
def test_calls_are_refused_with_reason(name: str, call: AttentionCall, reason: str | None) -> None:
    assert catalogue()[name].refuses(call) == reason


@pytest.mark.usefixtures("xformers")
@pytest.mark.parametrize(("keys", "first"), [(19, 2), (24, 2)], ids=["rows", "address"])
def test_parts_of_masks_are_copied_where_xformers_needs_them_aligned(keys: int, first: int) -> None:
    query, key, value = (torch.randn(1, 2, length, 16) for length in (9, 16, 16))
    mask = torch.randn(1, 2, 9, keys)[..., first : first + 16]
    output = catalogue()["xformers"].attention(query, key, value, mask)
    torch.testing.assert_close(output, catalogue()["eager"].attention(query, key, value, mask))


@pytest.mark.usefixtures("xformers")
def test_xformers_names_why_its_compiled_part_is_missing(
    gpu: Callable[[int, int], torch.device], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The library can be imported without its compiled part, so this check must give the reason."""
    kernel = catalogue()["xformers"]
    device = gpu(9, 0)
    assert kernel.unavailable(device) is None
    error = Exception("xFormers can't load C++/CUDA extensions.\n  Please reinstall")
    cause = "libcudart.so.12: cannot open shared object file: No such file or directory"
    error.__cause__ = OSError(cause)
    part = sys.modules["xformers._cpp_lib"]
    monkeypatch.setattr(part, "_cpp_library_load_exception", error)
    assert kernel.unavailable(device) == f"its compiled part cannot be loaded: {cause}"


def _as_if_contiguous(tensor: Tensor) -> Tensor:
    """Reinterpret memory as contiguous, because TE 2.20.2's fused backend ignores strides."""
    return tensor.as_strided(tensor.shape, torch.empty(tensor.shape, device="meta").stride())


class DotProductAttention:
    """Stand-in for Transformer Engine's class, with the arguments that the adapter may use."""

    @parameters(
        "self, num_attention_heads, kv_channels, num_gqa_groups=None, attention_dropout=0.0, *, "
        "qkv_format='sbhd', attn_mask_type='causal', attention_type='self', softmax_scale=None"
    )
    def __init__(given: Any) -> None:
        assert given.attention_dropout == 0.0
        given.self.made = given

    @parameters(
        "self, query_layer, key_layer, value_layer, *, qkv_format=None, attn_mask_type=None, "
        "window_size=None"
    )
    def __call__(given: Any) -> Tensor:
        made, mask = given.self.made, given.attn_mask_type
        query, key, value = layers = (given.query_layer, given.key_layer, given.value_layer)
        assert given.qkv_format == "bshd"
        assert mask in ("no_mask", "causal", "causal_bottom_right")
        assert (query.shape[2], key.shape[2]) == (made.num_attention_heads, made.num_gqa_groups)
        dims = (key.shape[3], value.shape[3])
        assert made.kv_channels == (dims if dims[0] != dims[1] else dims[0])
        assert made.attention_type == ("self" if query.shape[1] == key.shape[1] else "cross")
        left, right = given.window_size or (-1, 0 if mask != "no_mask" else -1)
        if mask == "no_mask":  # TE 2.20.2, dot_product_attention/utils.py
            assert (left, right) == (-1, -1) or min(left, right) >= 0
        else:
            assert left >= -1
            assert right == 0
        if os.environ[transformer_engine.SWITCHES["fused"]] == "1":
            layers = tuple(_as_if_contiguous(each) for each in layers)
        output = textbook(
            *(each.transpose(1, 2) for each in layers),
            made.softmax_scale,
            mask != "no_mask",
            top_left=mask == "causal",
            window=given.window_size or (-1, -1),
        )
        return output.transpose(1, 2).flatten(2)


@pytest.fixture
def te(install: Install, monkeypatch: pytest.MonkeyPatch) -> Callable[[], None]:
    """Return a function that makes the library importable; environment variables are restored."""
    for switch in transformer_engine.SWITCHES.values():
        monkeypatch.setenv(switch, "1")

    def put() -> None:
        install(
            "transformer_engine.pytorch",
            version=("transformer-engine", "2.9.0"),
            DotProductAttention=DotProductAttention,
        )

    return put


@pytest.mark.parametrize("backend", ["flash", "fused", "unfused"])
def test_transformer_engine_is_exact_or_refuses(te: Callable[[], None], backend: str) -> None:
    transformer_engine.choose(backend)
    te()
    assert verify(f"te-{backend}") == {
        kind: reason for kind, reason in REFUSED.items() if kind != "narrow values"
    }
    assert verify_variants(f"te-{backend}") == DENSE
    switches = {name: os.environ[switch] for name, switch in transformer_engine.SWITCHES.items()}
    assert switches == {name: str(int(name == backend)) for name in switches}


def test_te_has_one_backend_a_process(te: Callable[[], None], unavailable: Unavailable) -> None:
    assert unavailable("te-flash") == (
        "not installed: pip install --no-build-isolation transformer-engine[pytorch]"
    )
    transformer_engine.choose("fused")
    te()
    taken = (
        "this process runs te-fused, and Transformer Engine has one backend per process: "
        "name te-flash alone"
    )
    assert unavailable("te-flash") == taken
    assert unavailable("te-fused") is None
    check("te-fused", "plain")
    with pytest.raises(RuntimeError, match="one backend per process"):
        check("te-flash", "plain")


def test_checks_choose_no_backend(te: Callable[[], None], unavailable: Unavailable) -> None:
    for name in ("te-flash", "te-fused", "te-unfused"):
        unavailable(name)
    assert transformer_engine._chosen is None
    te()  # the library now counts as imported
    assert unavailable("te-flash") == (
        "Transformer Engine was imported before its backend could be chosen"
    )


@pytest.fixture
def planned(install: Install, monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Install a stand-in for FlashInfer and return its log of plans, runs and packings."""
    log: list[str] = []
    monkeypatch.setattr(flashinfer, "WORKSPACE_BYTES", 16)
    flashinfer._workspace.cache_clear()
    flashinfer.shared_wrapper.cache_clear()

    @parameters(
        "q, k, v, *, custom_mask=None, packed_custom_mask=None, causal=False, kv_layout='NHD', "
        "sm_scale=None, window_left=-1, logits_soft_cap=None, backend='auto'"
    )
    def single_prefill_with_kv_cache(given: SimpleNamespace) -> Tensor:
        assert given.kv_layout == "NHD"
        check_readable(given.q, given.k, given.v)
        size, mask = (len(given.q), len(given.k)), given.custom_mask
        if given.packed_custom_mask is not None:
            bits = given.packed_custom_mask[:, None] >> torch.arange(8) & 1
            mask = bits.flatten()[: size[0] * size[1]].bool().view(size)
        if mask is not None:
            assert (given.backend, given.causal, given.window_left) == ("fa2", False, -1)
            assert mask.shape == size
        log.append(f"single {given.backend}")
        assert not given.causal or size[0] <= size[1]
        return sequence(given.q, given.k, given.v, given, given.causal, mask)

    def sequence(
        q: Tensor, k: Tensor, v: Tensor, how: SimpleNamespace, causal: bool, mask: Tensor | None
    ) -> Tensor:
        beyond = {"window": (how.window_left, -1), "softcap": how.logits_soft_cap}
        mask = None if mask is None else mask.view(len(q), len(k))
        parts = map(heads_second, (q, k, v))
        return textbook(*parts, how.sm_scale, causal, mask, **beyond)[0].transpose(0, 1)

    def in_pages(given: Any, queries: Sequence[Tensor], causal: bool) -> Tensor:
        """Attend with each sequence's queries to its pages, which were planned before."""
        how, outputs = given.self.planned, []
        pages_of_each = how.indices.split(how.indptr.diff().tolist())
        for query, pages, last in zip(queries, pages_of_each, how.last_page_len, strict=True):
            length = (len(pages) - 1) * how.page_size + int(last)
            key, value = (cache[pages].flatten(0, 1)[:length] for cache in given.paged_kv_cache)
            outputs.append(sequence(query, key, value, how, causal, None))
        return torch.cat(outputs)

    class BatchPrefillWithRaggedKVCacheWrapper:
        @parameters("self, float_workspace_buffer, kv_layout='NHD', *, backend='auto'")
        def __init__(given: Any) -> None:
            assert given.kv_layout == "NHD"
            given.self.backend, given.self.mask = given.backend, None

        @parameters(
            "self, qo_indptr, kv_indptr, num_qo_heads, num_kv_heads, head_dim_qk, *, "
            "custom_mask=None, causal=False, window_left=-1, logits_soft_cap=None, sm_scale=None, "
            "q_data_type='float16'"
        )
        def plan(given: Any) -> None:
            assert given.qo_indptr.dtype == given.kv_indptr.dtype == torch.int32
            log.append("plan")
            given.self.planned = given
            if given.custom_mask is not None:  # else the last mask stays, as in the library
                assert given.self.backend == "fa2"
                assert given.custom_mask.ndim == 1
                given.self.mask = given.custom_mask

        @parameters("self, q, k, v")
        def run(given: Any) -> Tensor:
            how, mask = given.self.planned, given.self.mask
            heads = (how.num_qo_heads, how.num_kv_heads)
            assert (given.q.shape[1], given.k.shape[1]) == heads
            assert given.q.dtype == how.q_data_type
            check_readable(given.q, given.k, given.v)
            log.append("run")
            lengths = [each.diff().tolist() for each in (how.qo_indptr, how.kv_indptr)]
            queries = given.q.split(lengths[0])
            keys, values = given.k.split(lengths[1]), given.v.split(lengths[1])
            sizes = [q_len * kv_len for q_len, kv_len in zip(*lengths, strict=True)]
            masks = [None] * len(sizes) if mask is None else mask.split(sizes)
            each_sequence = zip(queries, keys, values, masks, strict=True)
            return torch.cat(
                [
                    sequence(q, k, v, how, how.causal and part is None, part)
                    for q, k, v, part in each_sequence
                ]
            )

    class BatchDecodeWithPagedKVCacheWrapper:
        @parameters("self, float_workspace_buffer, kv_layout='NHD', *, use_tensor_cores=False")
        def __init__(given: Any) -> None:
            assert given.kv_layout == "NHD"
            assert not given.float_workspace_buffer.any()
            given.self.tensor_cores = given.use_tensor_cores

        @parameters(
            "self, indptr, indices, last_page_len, num_qo_heads, num_kv_heads, head_dim, "
            "page_size, *, window_left=-1, logits_soft_cap=None, q_data_type='float16', "
            "kv_data_type=None, sm_scale=None"
        )
        def plan(given: Any) -> None:
            for each in (given.indptr, given.indices, given.last_page_len):
                assert each.dtype == torch.int32
            is_wide = given.num_qo_heads >= 4 * given.num_kv_heads
            assert given.self.tensor_cores == is_wide
            log.append(f"plan of pages of {given.page_size}")
            given.self.planned = given

        @parameters("self, q, paged_kv_cache")
        def run(given: Any) -> Tensor:
            log.append("run")
            return in_pages(given, given.q.split(1), causal=False)

    class BatchPrefillWithPagedKVCacheWrapper:
        def __init__(self, float_workspace_buffer: Tensor, kv_layout: str = "NHD") -> None:
            assert kv_layout == "NHD"

        @parameters(
            "self, qo_indptr, indptr, indices, last_page_len, num_qo_heads, num_kv_heads, "
            "head_dim_qk, page_size, *, causal=False, sm_scale=None, window_left=-1, "
            "logits_soft_cap=None, q_data_type='float16', kv_data_type=None"
        )
        def plan(given: Any) -> None:
            for each in (given.qo_indptr, given.indptr, given.indices, given.last_page_len):
                assert each.dtype == torch.int32
            given.self.planned = given

        @parameters("self, q, paged_kv_cache")
        def run(given: Any) -> Tensor:
            how = given.self.planned
            return in_pages(given, given.q.split(how.qo_indptr.diff().tolist()), how.causal)

    class BatchMLAPagedAttentionWrapper:
        def __init__(self, float_workspace_buffer: Tensor) -> None:
            pass

        @parameters(
            "self, qo_indptr, kv_indptr, kv_indices, kv_len_arr, num_heads, head_dim_ckv, "
            "head_dim_kpe, page_size, causal, sm_scale, q_data_type, kv_data_type"
        )
        def plan(given: Any) -> None:
            for each in (given.qo_indptr, given.kv_indptr, given.kv_indices, given.kv_len_arr):
                assert each.dtype == torch.int32
            assert given.qo_indptr.diff().eq(1).all()
            assert (given.head_dim_ckv, given.head_dim_kpe) == (512, 64)
            given.self.planned = SimpleNamespace(**vars(given), window_left=-1, logits_soft_cap=0)

        @parameters("self, q_nope, q_pe, ckv_cache, kpe_cache")
        def run(given: Any) -> Tensor:
            how, outputs = given.self.planned, []
            assert given.ckv_cache.shape[1] == how.page_size
            queries = torch.cat([given.q_nope, given.q_pe], dim=-1)
            cache = torch.cat([given.ckv_cache, given.kpe_cache], dim=-1)
            pages_of_each = how.kv_indices.split(how.kv_indptr.diff().tolist())
            for query, pages, length in zip(queries, pages_of_each, how.kv_len_arr, strict=True):
                key = cache[pages].flatten(0, 1)[:length, None]
                outputs.append(sequence(query[None], key, key[..., :512], how, how.causal, None))
            return torch.cat(outputs)

    def packbits(x: Tensor, bitorder: str = "big") -> Tensor:
        assert bitorder == "little"
        log.append("pack")
        padded = torch.nn.functional.pad(x.to(torch.uint8), (0, -len(x) % 8)).view(-1, 8)
        return (padded << torch.arange(8)).sum(1)

    install(
        "flashinfer",
        version=("flashinfer-python", "0.6.6"),
        single_prefill_with_kv_cache=single_prefill_with_kv_cache,
        BatchPrefillWithRaggedKVCacheWrapper=BatchPrefillWithRaggedKVCacheWrapper,
        BatchDecodeWithPagedKVCacheWrapper=BatchDecodeWithPagedKVCacheWrapper,
        BatchMLAPagedAttentionWrapper=BatchMLAPagedAttentionWrapper,
        BatchPrefillWithPagedKVCacheWrapper=BatchPrefillWithPagedKVCacheWrapper,
        packbits=packbits,
    )
    return log


WITHOUT_MASKS = {**REFUSED, **OTHER_HEAD_DIMS}
WITH_MASKS = {
    **{kind: reason for kind, reason in WITHOUT_MASKS.items() if kind not in MASKED},
    "mask by head": "takes one attn_mask for all heads",
    "float mask": "takes a bool attn_mask only, not float16",
}
PREFILL = DENSE - {"window, both ways"} | CAPPED | PACKED | {"packed, soft cap"}


@pytest.mark.usefixtures("planned")
@pytest.mark.parametrize(
    ("name", "refused", "beyond"),
    [
        ("flashinfer-fa2", WITH_MASKS, PREFILL | {"soft cap, padded"}),
        ("flashinfer-fa3", WITHOUT_MASKS, PREFILL),
    ],
)
def test_flashinfer_prefill_is_exact_or_refuses(
    name: str, refused: dict[str, str], beyond: set[str]
) -> None:
    assert verify(name) == refused
    assert verify_variants(name) == beyond


ONE_EACH = {
    "q_len": 2,
    "cu_seqlens_q": torch.arange(3).int(),
    "variant": AttentionVariant(max_seqlen_q=1),
}


@pytest.mark.usefixtures("planned")
def test_flashinfer_decode_is_exact_or_refuses() -> None:
    refused = verify("flashinfer-decode")
    assert refused["padded decode"] == "takes no attn_mask"
    assert set(KINDS) - set(refused) == {"decode", "decode of one", "decode, scale"}
    beyond = {"bottom right, decode", "window, decode", "soft cap, decode", "key lengths, decode"}
    pages = {"pages, decode, window", "pages, packed decode"}
    assert verify_variants("flashinfer-decode") == beyond | pages
    of_prefill = {"pages", "pages of 256", "pages, packed, bottom right", "pages, packed, window"}
    assert verify_variants("flashinfer-paged") == pages | of_prefill


@pytest.mark.usefixtures("planned")
@pytest.mark.parametrize(("page_size", "queries"), [(16, ONE_EACH), (64, {"q_len": 1})])
def test_flashinfer_mla_is_exact(page_size: int, queries: dict[str, Any]) -> None:
    kernel, call = catalogue()["flashinfer-mla"], mla_call(page_size, scale=0.05, **queries)
    assert kernel.refuses(call) is None
    judge_call(kernel, lambda: call.to("cpu"), Expected.of(call), "exact", "MLA")


def test_core_plans_once(planned: list[str]) -> None:
    kernel = catalogue()["flashinfer-fa2"]
    call = random_call(batch=2, head_dim=64, dtype=torch.float16)
    core = kernel.prepare(call)  # type: ignore[misc]
    core()
    core()
    assert planned == ["plan", "run", "run"]
    planned.clear()
    kernel.attention(**call.arguments())
    kernel.attention(**call.arguments())
    assert planned == ["plan", "run", "plan", "run"]


def test_a_mask_is_not_kept(planned: list[str]) -> None:
    kernel = catalogue()["flashinfer-fa2"]
    call = random_call(batch=2, head_dim=64, dtype=torch.float16)
    before = kernel.attention(**call.arguments())
    kernel.attention(**{**call.arguments(), "attn_mask": torch.rand(2, 1, 9, 13) < 0.5})
    assert torch.equal(kernel.attention(**call.arguments()), before)


@pytest.fixture
def kernels_package(install: Install, monkeypatch: pytest.MonkeyPatch) -> dict[str, Any]:
    """Install a stand-in for `kernels` with three cached kernels. Return the log of requests."""
    asked: dict[str, Any] = {}
    import huggingface_hub.constants

    @parameters("q, k, v, softmax_scale=None, causal=False, window_size=(-1, -1), softcap=0.0")
    def flash_attn_func(given: SimpleNamespace) -> tuple[Tensor, None]:
        return flash_attention(given), None

    @parameters("q, k, v, tensor_layout='HND', is_causal=False, sm_scale=None")
    def sageattn(given: SimpleNamespace) -> Tensor:
        assert given.tensor_layout == "HND"
        return textbook(given.q, given.k, given.v, given.sm_scale, given.is_causal)

    def get_kernel(
        repo_id: str, *, revision: str | None = None, version: int | None = None
    ) -> ModuleType:
        assert (revision is None) != (version is None)
        asked[repo_id] = huggingface_hub.constants.HF_HUB_OFFLINE
        if asked.get("error"):
            raise asked["error"]
        module = ModuleType(repo_id)
        if "sage" in repo_id:
            module.sageattn = sageattn  # type: ignore[attr-defined]
        else:
            module.flash_attn_func = flash_attn_func  # type: ignore[attr-defined]
        return module

    def no_network(address: tuple[str, int], timeout: float) -> socket.socket:
        assert timeout <= 2
        asked["address"] = address
        raise TimeoutError("timed out")

    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_OFFLINE", False)
    monkeypatch.setattr(socket, "create_connection", no_network)
    install("kernels", version=("kernels", "0.17.2"), get_kernel=get_kernel)
    return asked


@pytest.mark.parametrize("repository", [each.repository for each in hub.KNOWN])
def test_hub_kernels_are_exact_or_refuse(kernels_package: dict[str, Any], repository: str) -> None:
    assert verify(f"hub:{repository}") == REFUSED
    known = set() if "sage" in repository else DENSE | CAPPED
    assert verify_variants(f"hub:{repository}") == known


def test_hub_kernels_are_found_in_the_cache_without_a_network(
    kernels_package: dict[str, Any], unavailable: Unavailable
) -> None:
    import huggingface_hub.constants

    name = "kernels-community/flash-attn2"
    assert unavailable(f"hub:{name}") is None
    assert kernels_package[name] is True
    assert huggingface_hub.constants.HF_HUB_OFFLINE is False


def test_hub_that_cannot_be_reached_is_named(
    kernels_package: dict[str, Any], unavailable: Unavailable, monkeypatch: pytest.MonkeyPatch
) -> None:
    for variable in ("HTTPS_PROXY", "https_proxy", "ALL_PROXY", "all_proxy"):
        monkeypatch.delenv(variable, raising=False)
    monkeypatch.setenv("HF_ENDPOINT", "https://hub.example:8443")
    kernels_package["error"] = FileNotFoundError("no snapshot\nlong story")
    assert unavailable("hub:kernels-community/sage-attention") == (
        "hub.example cannot be reached (timed out), and not in the cache: no snapshot"
    )
    assert kernels_package["address"] == ("hub.example", 8443)
    # If there is a proxy, it gets the request first.
    hub._fetch.cache_clear()
    monkeypatch.setenv("https_proxy", "http://proxy.example:3128")
    unavailable("hub:kernels-community/sage-attention")
    assert kernels_package["address"] == ("proxy.example", 3128)
